"""No tag is given up for files that lack something of it: one value after the other is changed.

What a tag holds is known in many places to be alike, or to follow from something else. If a value
is another, or one is there that nobody knows, the tag is either refused by what `--delete` looks
at, or it comes back as it was. Below stage 3 nothing goes as padding that may be somebody's.
"""

import copy
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamshard.errors import DisagreementError, StreamshardError, UnsupportedError
from streamshard.operations.compact.tag_checks import accounted_for, padding_alike, ranks_agree
from streamshard.operations.repartition.repartition import repartition
from streamshard.source.source import open_source
from tests.checkpoints.test_old_spellings import as_bf16_optimizer, respell
from tests.comparing import differences
from tests.fabricated import client_state, edit, load, save, write
from tests.fabricated_states import flat
from tests.job import EXPERTS, STATES, TAG, Job
from tests.samples import sampled

JOBS = {
    "stage 2, round robin": Job(round_robin=True, alignment=True, client_state=client_state()),
    "stage 3": Job(stage=3, garbage=False, client_state=client_state()),
    "tensor parallel": Job(parts=2, frozen=()),
    "experts": Job(world_size=4, experts=EXPERTS, expert_parallel=2),
    "Muon": Job(world_size=3, muon=(0,), tied={}),
}
Step = tuple[str, Any]
"""How to get a level deeper: by attribute, or by key or index."""
Change = Callable[[Any], object]


def increase(value: Any) -> object:  # noqa: ANN401
    """Return another value of the kind."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().clone().reshape(-1)
        flat[:1] = ~flat[:1] if flat.dtype == torch.bool else flat[:1] + 1
        return like(value, flat.reshape(value.shape))
    return value + "!" if isinstance(value, str) else value + 1


def lengthen(value: Any) -> object:  # noqa: ANN401
    """Return the value with something behind it, or next to it."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)
        return like(value, torch.cat([flat, torch.ones(1, dtype=flat.dtype)]))
    return with_beside(value, 5) if isinstance(value, dict) else [*value, 5]


def enrich(value: dict[Any, Any]) -> object:
    """Return the values with a tensor next to them that nobody knows."""
    return with_beside(value, torch.arange(2.0))


def like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return other content as a tensor of the same kind."""
    other.requires_grad_(tensor.requires_grad)
    found = torch.nn.Parameter(other) if isinstance(tensor, torch.nn.Parameter) else other
    vars(found).update(vars(tensor))
    return found


def with_beside(held: dict[Any, Any], value: object) -> dict[Any, Any]:
    """Return a dict of the same kind with one more entry."""
    found = copy.copy(held)
    found["of its own"] = value
    return found


def places(value: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], Any]]:  # noqa: ANN401
    """Yield everything in a file that is a value or holds some, and where it is."""
    yield path, value
    deeper: list[tuple[Step, Any]] = []
    if isinstance(value, Mapping):
        deeper = [(("key", key), held) for key, held in value.items()]
    elif isinstance(value, list):
        deeper = [(("key", index), held) for index, held in enumerate(value)]
    elif type(value).__name__ in ("LossScaler", "fragment_address"):
        deeper = [(("attribute", name), held) for name, held in vars(value).items()]
    for step, held in deeper:
        yield from places(held, (*path, step))


def changes(path: tuple[Step, ...], value: Any, *, is_padded: bool) -> Iterator[Change]:  # noqa: ANN401
    """Yield what is done to a value."""
    if any(key == "num_experts" for _, key in path):
        return  # of which not being empty says how DeepSpeed spells all else
    is_tensor = isinstance(value, torch.Tensor)
    if (is_tensor and value.numel() and not is_padded) or type(value) in (int, float, str):
        yield increase
    if is_tensor or isinstance(value, list | dict):
        yield lengthen
    if isinstance(value, dict):
        yield enrich


def changed(content: Any, path: tuple[Step, ...], change: Change) -> object:  # noqa: ANN401
    """Change one value of what a file holds."""
    if not path:
        return change(content)
    holder = content
    for kind, key in path[:-1]:
        holder = getattr(holder, key) if kind == "attribute" else holder[key]
    kind, key = path[-1]
    if kind == "attribute":
        setattr(holder, key, change(getattr(holder, key)))
    else:
        holder[key] = change(holder[key])
    return content


def missing(run: Path, back: Path, world_size: int) -> list[str]:
    """List what does not come back, if a tag might be given up."""
    source = open_source(run)
    accounted_for(source, run / source.checkpoint.tag)
    ranks_agree(source)
    padding_alike(source)
    shutil.rmtree(back, ignore_errors=True)
    repartition(run, back, world_size=world_size)
    return [
        line
        for path in sorted((run / TAG).iterdir())
        for line in differences(load(back / TAG / path.name), load(path), path.name)
    ]


def kind_of(path: Path) -> str:
    """Name a file without its rank's numbers."""
    return re.sub(r"\d+", "", path.name)


@sampled(18)
@pytest.mark.parametrize("name", JOBS)
def test_every_value_comes_back_or_keeps_its_tag(name: str, one_in: int, tmp_path: Path) -> None:
    """Where not every one is tried, it is of each kind of file the one of the first rank."""
    job = JOBS[name]
    run, ranks = write(job, tmp_path / "run"), job.world_size * job.parts
    assert missing(run, tmp_path / "back", ranks) == []
    lost, counts = [], {"refused": 0, "back": 0}
    files = sorted((run / TAG).iterdir())
    first = {kind_of(path): path for path in reversed(files)}.values()
    number = count()
    for path in files if one_in == 1 else first:
        whole = path.read_bytes()
        # Behind the last rank's parameters there is memory that nobody filled.
        is_padded = job.stage == 3 and "rank_0_mp" not in path.name
        for where, value in places(load(path)):
            for change in changes(where, value, is_padded=is_padded):
                if next(number) % one_in:
                    continue
                save(changed(load(path), where, change), path)
                try:
                    found = missing(run, tmp_path / "back", ranks)
                    counts["back"] += 1
                except StreamshardError:
                    found = []
                    counts["refused"] += 1
                what = "/".join(str(key) for _, key in where)
                lost += [f"{path.name}: {what}, {change.__name__}: {line}" for line in found]
                path.write_bytes(whole)
    assert not lost, "\n".join(lost)
    assert min(counts.values()) > 0


SMALL = Job(groups=((("a", (3,)), ("b", (2, 2)), ("c", (2,))), (("d", (1,)),)), frozen=(), tied={})
FEW = replace(SMALL, groups=((("a", (3,)), ("b", (2,))), (("c", (1,)),)))
TINY_EXPERTS = tuple((name, (2,)) for name, _ in EXPERTS[:2])
PADDED = {
    "empty-ranks": replace(FEW, world_size=5),
    "aligned-round-robin": replace(FEW, alignment=True, round_robin=True),
    "experts": replace(FEW, world_size=4, experts=TINY_EXPERTS, expert_parallel=2),
    "muon": replace(SMALL, muon=(0,), world_size=3),
    "muon-offload": replace(SMALL, muon=(0,), offload=True, world_size=3),
}


def flat_tensors(content: dict[str, Any]) -> list[Tensor]:
    """List all that a rank's file has an element of for each of its parameters' elements."""
    state = content["optimizer_state_dict"]
    groups = state["base_optimizer_state"]["state"].values()
    moments = [tensor for held in groups for key, tensor in held.items() if key != "step"]
    return [*(part.detach() for part in state["single_partition_of_fp32_groups"]), *moments]


def padding_numel(job: Job) -> int:
    """Count what is saved and no parameter's, of all states."""
    count = 0
    for group, shapes in enumerate(job.cut_groups):
        whole, gaps = flat(job, "fp32", group)
        end = len(whole) - sum(gaps) - sum(prod(shape) for _, shape in shapes)
        states = len(STATES)
        if group in job.muon:
            states = 1 if job.offload else 0
        replicas = job.world_size // job.sharers(group)
        count += replicas * (sum(gaps) * (1 + states) + end * states)
    return count


def edited(run: Path) -> Iterator[None]:
    """Give every element of every state another value, one at a time."""
    for path in sorted((run / TAG).glob("*optim_states.pt")):
        whole, content = path.read_bytes(), load(path)
        for tensor in flat_tensors(content):
            for place, value in enumerate(tensor.tolist()):
                tensor[place] = 77.0
                save(content, path)
                yield
                tensor[place] = value
        path.write_bytes(whole)


def refusals(run: Path) -> int:
    """Count the elements of states that are refused where their value is another."""
    refused = 0
    for _ in edited(run):
        try:
            padding_alike(open_source(run))
        except UnsupportedError:
            refused += 1
        except DisagreementError:
            continue  # momentum that two ranks hold
    return refused


@pytest.mark.parametrize("job", PADDED.values(), ids=PADDED)
def test_every_element_that_is_no_parameters_is_looked_at(tmp_path: Path, job: Job) -> None:
    run = write(job, tmp_path / "run")
    padding_alike(open_source(run))
    assert refusals(run) == padding_numel(job) > 0


def test_masters_that_are_saved_with_their_padding_are_looked_at(tmp_path: Path) -> None:
    job = replace(SMALL, stage=1)
    run = respell(job, tmp_path / "run", as_bf16_optimizer)
    padding_alike(open_source(run))
    assert refusals(run) == padding_numel(job) // len(STATES) * (1 + len(STATES))


def test_one_value_may_be_any(tmp_path: Path) -> None:
    """Adagrad's sums begin where its user says."""

    def fill(content: dict[str, Any]) -> None:
        for tensor in flat_tensors(content):
            tensor[tensor == 0] = 0.1

    run = write(SMALL, tmp_path / "run")
    for path in (run / TAG).glob("*optim_states.pt"):
        edit(path, fill)
    padding_alike(open_source(run))

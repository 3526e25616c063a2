"""Below stage 3 nothing goes as padding that may be somebody's."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import streamshard as api
from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.operations.compact.originals import padding_alike
from streamshard.operations.source.source import open_source
from tests.checkpoints.test_old_spellings import as_bf16_optimizer, respell
from tests.compact.runs import ALL, FIRST, actions, age, receipt_of, tag_of, tags_in
from tests.fabricated import edit, load, save, write
from tests.fabricated_states import flat
from tests.job import EXPERTS, STATES, TAG, Job

SMALL = Job(groups=((("a", (3,)), ("b", (2, 2)), ("c", (2,))), (("d", (1,)),)), frozen=(), tied={})
JOBS = {
    "stage-1": replace(SMALL, stage=1),
    "stage-2": SMALL,
    "empty-ranks": replace(SMALL, world_size=7),
    "empty-group": replace(SMALL, groups=(*SMALL.groups, ())),
    "round-robin": replace(SMALL, round_robin=True),
    "aligned": replace(SMALL, alignment=True, world_size=3),
    "aligned-round-robin": replace(SMALL, alignment=True, round_robin=True),
    "aligned-elastic": replace(SMALL, alignment=True, elastic=True),
    "experts": replace(SMALL, world_size=4, experts=EXPERTS, expert_parallel=2),
    "muon": replace(SMALL, muon=(0,), world_size=3),
    "muon-offload": replace(SMALL, muon=(0,), offload=True, world_size=3),
}


def flat_tensors(content: dict[str, Any]) -> list[Tensor]:
    """List all that a rank's file has an element of for each of its parameters' elements."""
    state = content["optimizer_state_dict"]
    inner = state["base_optimizer_state"]
    groups = inner if isinstance(inner, list) else inner["state"].values()
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
        count += replicas * (sum(gaps) * (1 + states) + (0 if job.elastic else end * states))
    return count


def edited(run: Path) -> Iterator[None]:
    """Give every element of every state another value, one at a time."""
    for path in sorted((run / TAG).glob("*optim_states.pt")):
        whole = path.read_bytes()
        for number, tensor in enumerate(flat_tensors(load(path))):
            for place in range(tensor.numel()):
                content = load(path)
                flat_tensors(content)[number][place] = 77.0
                save(content, path)
                yield
                path.write_bytes(whole)


def refusals(run: Path, like: Path | None = None) -> int:
    """Count the elements of states that are refused where their value is another."""
    refused = 0
    for _ in edited(run):
        try:
            padding_alike(open_source(run, like=like))
        except UnsupportedError:
            refused += 1
        except DisagreementError:
            continue  # momentum that two ranks hold
    return refused


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_element_that_is_no_parameters_is_looked_at(tmp_path: Path, job: Job) -> None:
    run = write(job, tmp_path / "run")
    like = write(replace(job, elastic=False), tmp_path / "like") if job.elastic else None
    padding_alike(open_source(run, like=like))
    assert refusals(run, like) == padding_numel(job) > 0


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


def test_what_may_be_somebodys_stays(run: Path, archive: Path) -> None:
    path = sorted((run / FIRST).glob("*optim_states.pt"))[-1]
    edit(path, lambda content: flat_tensors(content)[-1][-1:].fill_(1.0))
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True, keep_last=2)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert str(path) in found.problems[0].reason
    assert tags_in(run) == {FIRST, *ALL} - {tag_of(90)}
    failed = [check for check in receipt_of(archive, FIRST)["checks"] if not check["holds"]]
    assert [check["name"] for check in failed] == ["padding_alike"]

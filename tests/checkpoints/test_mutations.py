"""Checkpoints with anything in them changed: opened and planned, or refused; never another error.

The changes are the same in every run. Each that was found to break something is kept as a test of
its own, beside what it broke. Bytes of files and of stores are changed in `tests/fuzz`, reader by
reader.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.errors import StreamshardError
from streamshard.formats.pickle.inert import Call, Global, Node
from streamshard.formats.torch import torch_file, zip_layout
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.operations.convert.convert import plan_convert
from streamshard.operations.repartition.repartition import plan_repartition
from tests.fabricated import client_state, write
from tests.fabricated_universal import write_universal
from tests.formats.test_torch_file import put_together
from tests.job import EXPERTS, Job
from tests.samples import sampled

ROUNDS = 60
"""Changes for each kind of checkpoint."""
Stages = Sequence[int]


def understood(source: Path, out: Path, stages: Stages) -> bool:
    """Tell whether a checkpoint is opened and all that can be done with it is planned."""
    try:
        ranks = 2 * streamshard.inspect(source).world_size
        for stage in stages:
            plan_repartition(source, out, world_size=ranks, zero_stage=stage)
        plan_convert(source, out)
    except StreamshardError:
        return False
    return True


# Values -------------------------------------------------------------------------------------------

Place = tuple[Any, Any]
"""Something that holds values, and where in it one is."""


def places(root: Node) -> Iterator[Place]:
    """Yield every place in a file's nodes at which another value could stand."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack += node
        if id(node) in seen or not isinstance(node, dict | list | Call | Storage):
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            yield from ((node, key) for key in node)
            stack += node.values()
        elif isinstance(node, list):
            yield from ((node, index) for index in range(len(node)))
            stack += node
        elif isinstance(node, Call):
            yield from ((node, index) for index in range(len(node.args)))
            yield node, "state"
            stack += [*node.args, node.state]
        else:
            yield node, "numel"


def value_at(place: Place) -> Node:
    holder, where = place
    if isinstance(holder, Call):
        return holder.state if where == "state" else holder.args[where]
    return getattr(holder, where) if isinstance(holder, Storage) else holder[where]


def put_at(place: Place, value: Node) -> None:
    holder, where = place
    if isinstance(holder, Storage):
        holder.numel += 1
    elif isinstance(holder, Call) and where == "state":
        holder.state = value
    elif isinstance(holder, Call):
        holder.args = tuple(value if n == where else arg for n, arg in enumerate(holder.args))
    else:
        holder[where] = value


VALUES: list[Callable[[], Node]] = [
    lambda: None, lambda: -1, lambda: 0, lambda: 1, lambda: 1 << 62, lambda: 1 << 70, lambda: True,
    lambda: 1.5, lambda: "x", lambda: b"x", list, dict, tuple, lambda: [[]],
    lambda: Call(Global("os", "system"), ("x",)),
]  # fmt: skip


def changed_values(chance: random.Random, path: Path, data: bytes) -> bytes:
    """Put something else in one or two places: any value, or the one of another place."""
    root = torch_file.read(path, 0).root
    for _ in range(chance.choice([1, 1, 2])):
        found = list(places(root))
        place = chance.choice(found)
        if chance.random() < 0.2 and isinstance(place[0], dict | list):
            del place[0][place[1]]
        elif chance.random() < 0.3:
            put_at(place, value_at(chance.choice(found)))
        else:
            put_at(place, chance.choice(VALUES)())
    return put_together(zip_layout.lay_out(zip_layout.serialize(root), path.stem), data + bytes(64))


def universal(job: Job, place: Path) -> Path:
    """Make a universal checkpoint alone in its run directory."""
    made = write_universal(job, place / "made")
    run = place / "universal"
    run.mkdir()
    (run / "latest_universal").write_text(made.name)
    made.rename(run / made.name)
    return run


def native(job: Job, place: Path) -> Path:
    return write(replace(job, client_state=client_state()), place / "native")


KINDS: dict[str, tuple[Callable[[Job, Path], Path], Job, Stages]] = {
    "stage 2 in parts": (native, Job(stage=2, parts=2), (1, 2, 3)),
    "stage 3": (native, Job(stage=3), (1, 2, 3)),
    "experts": (native, Job(world_size=4, experts=EXPERTS, expert_parallel=2), (1, 2)),
    "muon": (native, Job(muon=(0,)), (1, 2)),
    "universal": (universal, Job(stage=3), (1, 2, 3)),
}


@sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_values(tmp_path: Path, kind: str, one_in: int) -> None:
    """One file at a time; some changes must do no harm, and some must be noticed."""
    make, job, stages = KINDS[kind]
    run = make(job, tmp_path)
    whole = {path: path.read_bytes() for path in sorted(run.rglob("*.pt"))}
    outcomes = []
    for number in range(0, ROUNDS, one_in):
        chance = random.Random(f"{kind}-{number}")
        path = chance.choice([*whole])
        with suppress(StreamshardError):  # nested in itself, so that no pickler can write it
            path.write_bytes(changed_values(chance, path, whole[path]))
        outcomes.append(understood(run, tmp_path / "out", stages))
        path.write_bytes(whole[path])
    assert understood(run, tmp_path / "out", stages)
    assert 0 < outcomes.count(False) < len(outcomes)

"""Rank files that are read in batches elsewhere: the same checkpoint, and the same errors."""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamshard.batches import BatchMapper, mapped_by
from streamshard.errors import SourceError
from streamshard.formats.deepspeed.read import model_files, rank_files, rank_headers
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.inert_dump import dump
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.operations.source.source import Source, open_source
from tests.fabricated import (
    client_state,
    edit,
    optimizer_file,
    without_zero,
    wrapped,
    write,
    write_dumps,
)
from tests.job import EXPERTS, TAG, Job

JOBS = {
    "1": Job(stage=1, world_size=3, client_state=client_state()),
    "2": Job(stage=2, world_size=4),
    "2-one-rank": Job(stage=2, world_size=1),
    "2-aligned": Job(stage=2, world_size=3, alignment=True, round_robin=True),
    "2-fp16": Job(stage=2, world_size=3, dtype=torch.float16),
    "3": Job(stage=3, world_size=12, sub_group_size=20, client_state=client_state()),
    "3-frozen": Job(stage=3, world_size=4, tied={}),
    "experts": Job(stage=2, world_size=4, experts=EXPERTS, expert_parallel=2),
    "tensor-2": Job(stage=2, world_size=3, parts=2),
    "tensor-3": Job(stage=3, world_size=3, parts=2, sub_group_size=20),
    "muon": Job(stage=2, world_size=3, muon=(0,)),
}
Opener = Callable[[], Source]


def elsewhere(size: int, order: int) -> AbstractContextManager[None]:
    """Have batches of a size done in some order by somebody who gets and returns bytes."""

    def worked(
        function: Callable[[Any], Any], batches: Sequence[Sequence[Any]]
    ) -> Iterable[Sequence[Any]]:
        turns = list(range(len(batches)))
        random.Random(order).shuffle(turns)
        done = {}
        for turn in turns:
            task, batch = pickle.loads(pickle.dumps((function, batches[turn])))
            done[turn] = pickle.loads(pickle.dumps(task(batch)))
        return [done[turn] for turn in range(len(batches))]

    return mapped_by(BatchMapper(worked, size))


def nowhere() -> AbstractContextManager[None]:
    """Have every file read by itself where it is needed, as if there were no batches."""

    def refused(_: object, batches: Sequence[Sequence[Any]]) -> Iterable[Sequence[None]]:
        return [[None] * len(batch) for batch in batches]

    return mapped_by(BatchMapper(refused, 3))


Way = Callable[[], AbstractContextManager[None]]
WAYS: list[Way] = [
    nullcontext,
    *(partial(elsewhere, size, order) for size in (1, 2, 5) for order in (1, 2)),
]
FEW: list[Way] = [nullcontext, partial(elsewhere, 1, 1), partial(elsewhere, 5, 2)]


@pytest.fixture(params=[*JOBS, "0", "dumps-2"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    name: str = request.param
    if name == "0":
        return partial(open_source, without_zero(write(Job(stage=1), tmp_path / "run")))
    job = JOBS[name.removeprefix("dumps-")]
    path = write(job, tmp_path / "run")
    if name.startswith("dumps-"):
        path = write_dumps(path, tmp_path / "dumps")
    return partial(open_source, path)


def described(source: Source) -> dict[str, object]:
    """Tell all that a source holds, storages by their places, in a form that can be compared."""

    def persistent_id(node: Node) -> Node | None:
        if not isinstance(node, Storage):
            return None
        place = node.file, node.offset, repr(node.path), node.crc32, repr(node.content)
        return node.dtype, node.numel, *place

    checkpoint, cutting = source.checkpoint, source.cutting
    files = [(f.model_state, f.optimizer_file) for f in checkpoint.model_parts]
    bare = [replace(f, model_state={}, optimizer_file={}) for f in checkpoint.model_parts]
    return {
        "checkpoint": replace(checkpoint, model_parts=tuple(bare)),
        "objects": dump(files, persistent_id),
        "cutting": {
            name: np.asarray(getattr(cutting, name)).tolist() for name in cutting.__slots__
        },
        "files": source.files,
    }


def test_the_source_is_that_of_files_read_one_by_one(opener: Opener) -> None:
    with nowhere():
        wanted = described(opener())
    for way in WAYS:
        with way():
            assert described(opener()) == wanted


@pytest.mark.parametrize("stage", [2, 3])
def test_other_processes_read_them(stage: int, tmp_path: Path) -> None:
    run = write(Job(stage=stage, world_size=12), tmp_path / "run")
    with nowhere():
        wanted = described(open_source(run))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        with mapped_by(BatchMapper(pool.map, 3)):
            assert described(open_source(run)) == wanted
        torn(optimizer_file(run, 7))
        with (
            mapped_by(BatchMapper(pool.map, 3)),
            pytest.raises(SourceError, match=r"rank_7_.*Was the save interrupted"),
        ):
            open_source(run)


# Errors -------------------------------------------------------------------------------------------


def model(run: Path, rank: int) -> Path:
    return run / TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"ds_version") + 2] ^= 1
    path.write_bytes(data)


def state_changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda file: change(file["optimizer_state_dict"]))


OF_EITHER: dict[str, Callable[[Path], None]] = {
    "torn": torn, "flipped": flipped, "missing": Path.unlink,
}  # fmt: skip
OF_OPTIMIZERS = OF_EITHER | {
    "stage": state_changed(lambda state: state.update(zero_stage=1)),
    "overflow": state_changed(lambda state: state.update(overflow=True)),
    "count": state_changed(lambda state: state.update(partition_count=9)),
    "rate": state_changed(lambda state: wrapped(state)["param_groups"][0].update(lr=0.5)),
    "step": state_changed(lambda state: wrapped(state)["state"][0].update(step=torch.tensor(9.0))),
    "no state": lambda path: edit(path, lambda file: file.pop("optimizer_state_dict")),
}
OTHER_SHAPE = {"embed.weight": torch.Size((4, 11))}
OF_MODELS = OF_EITHER | {
    "steps": lambda path: edit(path, lambda file: file.update(global_steps=8)),
    "shapes": lambda path: edit(path, lambda file: file["param_shapes"][0].update(OTHER_SHAPE)),
}
DAMAGES = {
    **{
        f"2-optimizer-{name}": (2, optimizer_file, change) for name, change in OF_OPTIMIZERS.items()
    },
    **{
        f"3-optimizer-{name}": (3, optimizer_file, change) for name, change in OF_OPTIMIZERS.items()
    },
    **{f"3-model-{name}": (3, model, change) for name, change in OF_MODELS.items()},
}


@pytest.mark.parametrize("ranks", [(0,), (10,), (11, 4, 5)], ids=str)
@pytest.mark.parametrize(("stage", "place", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_errors_are_those_of_files_read_one_by_one(
    tmp_path: Path,
    stage: int,
    place: Callable[[Path, int], Path],
    damage: Callable[[Path], None],
    ranks: tuple[int, ...],
) -> None:
    run = write(Job(stage=stage, world_size=12, sub_group_size=20), tmp_path / "run")
    for rank in ranks:
        damage(place(run, rank))
    with nowhere(), pytest.raises(SourceError) as wanted:
        open_source(run)
    assert str(run) in str(wanted.value)
    for way in FEW:
        with way(), pytest.raises(SourceError) as found:
            open_source(run)
        assert (type(found.value), str(found.value)) == (type(wanted.value), str(wanted.value))
        assert found.value.exit_code == 3


def test_ranks_that_differ_in_notes_alone(tmp_path: Path) -> None:
    run = write(Job(stage=2, world_size=5), tmp_path / "run")
    edit(optimizer_file(run, 3), lambda file: file.update(of_a_user=[1, 2]))
    edit(optimizer_file(run, 4), lambda file: file.update(ds_version="0.18.0"))
    with nowhere():
        wanted = described(open_source(run))
    assert "of_a_user" in str(wanted["checkpoint"])
    for way in WAYS:
        with way():
            assert described(open_source(run)) == wanted


def test_true_is_not_one(tmp_path: Path) -> None:
    """Values that are equal in Python and other ones in the file are told apart."""
    run = write(Job(stage=2, world_size=3), tmp_path / "run")
    edit(optimizer_file(run, 2), lambda file: file["optimizer_state_dict"].update(overflow=0))
    for way in [nowhere, *WAYS]:
        with way(), pytest.raises(SourceError, match=r"rank_2_.*disagrees with .* about overflow"):
            open_source(run)


# What is sent -------------------------------------------------------------------------------------


def sent(run: Path, name: str) -> Iterator[bytes]:
    """Open a checkpoint; yields what comes back for each batch of one function, itself small."""
    found: list[bytes] = []

    def worked(function: Any, batches: Sequence[Any]) -> Iterable[Any]:  # noqa: ANN401
        for batch in batches:
            result = function(batch)
            if function.func.__name__ == name:
                assert len(pickle.dumps(function)) < 1_000
                found.append(pickle.dumps(result))
            yield result

    with mapped_by(BatchMapper(worked, 4)):
        open_source(run)
    yield from found


@pytest.mark.parametrize(
    ("stage", "function", "most"),
    [
        (2, rank_headers.read_headers, 2_500),
        (3, rank_headers.read_headers, 1_000),
        (3, model_files.match_models, 200),
    ],
)
def test_what_comes_back_is_small(
    tmp_path: Path, stage: int, function: Callable[..., Any], most: int
) -> None:
    """What all ranks have is not sent, however much it is."""
    names = [(f"layers.{n}.weight", (3, 5)) for n in range(60)]
    job = Job(stage=stage, world_size=16, groups=(tuple(names),), frozen=(), tied={})
    run = write(job, tmp_path / "run")
    sizes = [len(batch) / 4 for batch in sent(run, function.__name__)]
    assert len(sizes) == 4
    assert np.median(sizes) < most


def test_a_worker_that_sees_another_first_file_is_not_believed(tmp_path: Path) -> None:
    """Its parts are not those that it is asked about."""
    run = write(Job(stage=3, world_size=4), tmp_path / "run")
    other = write(Job(stage=3, world_size=4, sub_group_size=20), tmp_path / "other")

    def mistaken(function: Any, batches: Sequence[Any]) -> Iterable[Any]:  # noqa: ANN401
        (given,) = function.args
        if isinstance(given, rank_files.ReadFile):
            arrived = pickle.loads(pickle.dumps(given))
            given = replace(arrived, path=optimizer_file(other, 0))
        else:
            given = {size: replace(one, path=model(other, 2)) for size, one in given.items()}
        return [partial(function.func, given)(batch) for batch in batches]

    with nowhere():
        wanted = described(open_source(run))
    with mapped_by(BatchMapper(mistaken, 2)):
        assert described(open_source(run)) == wanted

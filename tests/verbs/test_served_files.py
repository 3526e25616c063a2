"""Files that are served to a job are, object by object, the files that `repartition` writes.

Real engines load them in `tests/oracle`; this asks the same often, in seconds.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamshard
from streamshard.live import served_files
from streamshard.live.served_files import ServedFiles
from streamshard.native.files_on_demand import FilesOnDemand
from streamshard.native.resharding import resharding_of
from streamshard.source.source import open_source
from tests.checkpoints.test_world_sizes import SIZES
from tests.comparing import differences
from tests.fabricated import load, write
from tests.held import open_files
from tests.job import Job, stand_ins


@contextmanager
def serving(
    source: Path, world_size: int, stage: int | None = None, *, maps: bool = True
) -> Iterator[ServedFiles]:
    """Serve a checkpoint's files for another world size."""
    found = resharding_of(open_source(source), world_size, zero_stage=stage)
    served = ServedFiles(found.source, FilesOnDemand(found), maps=maps)
    try:
        with stand_ins():
            yield served
    finally:
        served.close()


def check(source: Path, out: Path, world_size: int, stage: int | None = None) -> ServedFiles:
    streamshard.repartition(source, out, world_size=world_size, zero_stage=stage)
    with serving(source, world_size, stage) as served:
        paths = [path for path in served.paths if served.real_path(path) is None]
        tag = (out / "latest").read_text()
        written = {f"{tag}/{path.name}" for path in (out / tag).iterdir()}
        assert {*served.paths} == written
        for path in paths:
            served.prepare(path)
            assert differences(served.load(path), load(out / path), path) == []
    return served


@pytest.fixture
def maps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Map the small storages of fabricated checkpoints too."""
    monkeypatch.setattr(served_files, "_LEAST_MAPPED", 1)


@pytest.mark.usefixtures("maps_all")
@pytest.mark.parametrize(
    ("stage", "source", "target"), [(1, 2, 4), (2, 4, 3), (3, 4, 3), (3, 1, 2)]
)
def test_from_shards_and_from_a_store(tmp_path: Path, stage: int, source: int, target: int) -> None:
    run = write(Job(stage=stage, world_size=source), tmp_path / "run")
    served = check(run, tmp_path / "out", target)
    assert served.read_bytes
    streamshard.convert(run, tmp_path / "run.zarr", codec="zstd")
    assert not check(tmp_path / "run.zarr", tmp_path / "of-store", target).mapped
    streamshard.convert(run, tmp_path / "plain.zarr", codec="none")
    check(tmp_path / "plain.zarr", tmp_path / "of-plain", target)


def test_storages_of_several_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(stage=2, world_size=3, groups=((("w", (1024, 2309)), ("v", (7,))),), tied={})
    run = write(job, tmp_path / "run")
    streamshard.convert(run, tmp_path / "run.zarr", codec="zstd")
    for source in ("run", "run.zarr"):
        check(tmp_path / source, tmp_path / f"out-{source}", 1)


@settings(max_examples=10, deadline=None)
@given(SIZES, st.data())
def test_any_job(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], data: st.DataObject
) -> None:
    params = tuple((f"p{number}", tuple(shape)) for number, shape in enumerate(sizes))
    stage = data.draw(st.integers(1, 3))
    job = Job(
        stage=stage,
        world_size=data.draw(st.integers(1, 5)),
        groups=(params,),
        tied={},
        round_robin=stage < 3 and data.draw(st.booleans()),
        sub_group_size=data.draw(st.sampled_from([1, 4, 9, 10**9])),
    )
    root = tmp_path_factory.mktemp("job")
    ranks, resumes = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    check(write(job, root / "run"), root / "out", ranks, resumes)


@pytest.mark.usefixtures("maps_all")
def test_a_storage_that_is_one_fragment_is_mapped(tmp_path: Path) -> None:
    """At twice the ranks each partition is a half of one; the module's weights are as they are."""
    run = write(Job(stage=2, world_size=2, groups=((("w", (64, 8)),),), tied={}), tmp_path / "run")
    with serving(run, 4) as served:
        model, optimizer = served.paths[0], served.paths[1]
        served.load(model)
        of_model = sum(served.mapped.values())
        assert of_model >= 64 * 8 * 2
        served.load(optimizer)
        assert sum(served.mapped.values()) - of_model == 3 * (64 * 8 // 4) * 4
    with serving(run, 4, maps=False) as served:
        served.load(served.paths[0])
        assert not served.mapped


@pytest.mark.usefixtures("maps_all")
def test_what_is_settled_does_not_see_the_file_any_more(tmp_path: Path) -> None:
    run = write(Job(stage=2, world_size=2), tmp_path / "run")
    with serving(run, 4) as served:
        content = served.load(served.paths[0])
        assert served.mapped
        module = content["module"]
        before = {name: value.clone() for name, value in module.items()}
        tied = [n for n, v in module.items() if v.data_ptr() in pointers(module, but=n)]
        served.settle()
    for file in run.rglob("*.pt"):
        os.truncate(file, 0)
    for name, value in module.items():
        assert torch.equal(value, before[name])
    assert tied
    assert tied == [n for n, v in module.items() if v.data_ptr() in pointers(module, but=n)]


def pointers(module: dict[str, torch.Tensor], *, but: str) -> set[int]:
    return {value.data_ptr() for name, value in module.items() if name != but}


@dataclass(frozen=True)
class Machine:
    """What goes otherwise than it should among ranks of a machine; each is a rank's number."""

    elsewhere: int | None = None
    """Runs on another machine."""
    without: int | None = None
    """Has no memory to offer."""
    shut_out: int | None = None
    """May not open the memory of the others."""
    mistaken: int | None = None
    """Fills memory that is not that of the others."""

    def load(self, ranks: Sequence[ServedFiles], path: str) -> list[Any]:
        """Load a file on ranks that need it alike, step by step."""
        for one in ranks:
            one.prepare(path)
        shares = [one.share(path, len(ranks)) for one in ranks]
        wanted = [share.ask() for share in shares]
        for rank, own in enumerate(wanted):
            if own.offer is not None and rank == self.elsewhere:
                wanted[rank] = replace(own, offer=replace(own.offer, machine=("another",)))
            elif rank == self.without:
                wanted[rank] = replace(own, offer=None)
        joined = [share.join(wanted, rank) for rank, share in enumerate(shares)]
        for rank, share in enumerate(shares):
            have_joined = [ok and rank != self.shut_out for rank, ok in enumerate(joined)]
            if rank != self.mistaken:
                share.fill(have_joined, rank, ranks[rank].fill)
        return [one.load(path) for one in ranks]


@pytest.fixture(params=["mapped", "copied"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "mapped":
        monkeypatch.setattr(served_files, "_LEAST_MAPPED", 1)
    return str(request.param)


@pytest.mark.parametrize(
    ("machine", "times"),
    [
        (Machine(), 1),
        (Machine(elsewhere=0), 2),
        (Machine(without=2), 2),
        (Machine(shut_out=1), 3),
        (Machine(mistaken=1), 3),
    ],
    ids=lambda value: next((n for n, v in vars(value).items() if v is not None), "all")
    if isinstance(value, Machine) else "",
)  # fmt: skip
def test_ranks_of_a_machine_read_together(
    tmp_path: Path, way: str, machine: Machine, times: int
) -> None:
    """The module is read as many times as there are ranks that do not share."""
    run = write(Job(stage=2, world_size=2), tmp_path / "run")
    streamshard.repartition(run, tmp_path / "out", world_size=3)
    streamshard.convert(run, tmp_path / "run.zarr", codec="zstd")
    before = open_files()
    with ExitStack() as stack:
        alone, *ranks = [
            stack.enter_context(serving(tmp_path / "run.zarr", 3)) for _ in range(1 + 3)
        ]
        path = alone.paths[0]
        expected = load(tmp_path / "out" / path)
        assert differences(alone.load(path), expected, path) == []
        for loaded in machine.load(ranks, path):
            assert differences(loaded, expected, path) == []
        read = [one.read_bytes for one in ranks]
        if machine.mistaken is None:
            assert sum(read) == times * alone.read_bytes
        assert (way == "mapped" and times < 3) == bool(ranks[1].mapped)
    assert open_files() == before


def test_a_parameter_of_no_elements_is_not_mapped(tmp_path: Path, way: str) -> None:
    params = ("none", (0, 4)), ("w", (64, 8))
    run = write(Job(stage=2, world_size=2, groups=(params,), tied={}), tmp_path / "run")
    streamshard.convert(run, tmp_path / "run.zarr", codec="zstd")
    with serving(tmp_path / "run.zarr", 3) as one, serving(tmp_path / "run.zarr", 3) as other:
        for loaded in Machine().load([one, other], one.paths[0]):
            assert loaded["module"]["none"].shape == (0, 4)
        assert (way == "mapped") == bool(one.mapped)


@pytest.mark.usefixtures("maps_all")
def test_what_ranks_read_together_is_of_each_alone(tmp_path: Path) -> None:
    run = write(Job(stage=2, world_size=2), tmp_path / "run")
    streamshard.convert(run, tmp_path / "run.zarr", codec="zstd")
    with serving(tmp_path / "run.zarr", 3) as one, serving(tmp_path / "run.zarr", 3) as other:
        first, second = Machine().load([one, other], one.paths[0])
        for value in first["module"].values():
            value.zero_()
        assert any(value.any() for value in second["module"].values())
        again = one.load(one.paths[0])
        assert differences(second, again, "module") == []
        one.settle()
        assert not any(value.any() for value in first["module"].values())

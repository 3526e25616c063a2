"""Files that are served to a job are, object by object, the files that `repartition` writes.

Real engines load them in `tests/oracle`; this asks the same often, in seconds.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamshard
from streamshard.live import served_files
from streamshard.live.served_files import ServedFiles
from streamshard.operations.native.files_on_demand import FilesOnDemand
from streamshard.operations.native.resharding import resharding_of
from streamshard.operations.source.source import open_source
from tests.checkpoints.test_world_sizes import SIZES
from tests.comparing import differences
from tests.fabricated import load, write
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
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("source", "target"), [(4, 3), (2, 4), (3, 1), (1, 2)])
def test_from_shards_and_from_a_store(tmp_path: Path, stage: int, source: int, target: int) -> None:
    run = write(Job(stage=stage, world_size=source), tmp_path / "run")
    served = check(run, tmp_path / "out", target)
    assert served.read_bytes
    streamshard.convert(run, tmp_path / "run.zarr", codec="zstd")
    assert not check(tmp_path / "run.zarr", tmp_path / "of-store", target).mapped
    streamshard.convert(run, tmp_path / "plain.zarr", codec="none")
    check(tmp_path / "plain.zarr", tmp_path / "of-plain", target)


@settings(max_examples=15, deadline=None)
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

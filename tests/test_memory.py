"""The memory contract: measured <= projected <= floor + limit, whatever the checkpoint's size.

Every run is a process of its own, on a checkpoint of four and a half times the limit in which a
single parameter is larger than the limit. Each result is checked element by element. None is forked
from a process that has loaded the program: its memory would not begin as a user's does.
"""

import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._cgroup import NoCgroupError, hits_of_limit, inside, memory_cgroup
from benchmarks._check import exported_differences, native_differences, store_differences
from benchmarks._fabricate import fabricate
from benchmarks._layout import TAG
from benchmarks._measure import STREAMSHARD, Measured, measure
from benchmarks._model import Model, transformer, values
from benchmarks._model import Run as ModelRun
from streamshard.formats.torch.zip_audit import audit
from streamshard.io.changes import sync_tree
from streamshard.io.page_cache import drop_cached
from streamshard.layout.memory_plan import METADATA_STEP_BYTES

MIB = 1 << 20
LIMIT = 48 * MIB
LARGE, SMALL = 9 * LIMIT // 2, 2 * LIMIT
GROUP = 128 * MIB
"""What a memory cgroup may have: of that a run takes half by default, which is to be enough."""
FROM, TO = 8, 6

pytestmark = pytest.mark.memory
AT_STAGE_3 = pytest.mark.parametrize("source", [3], ids=["stage3"], indirect=True)
"""For what the same code does at every stage, once a source is open."""


@dataclass(frozen=True)
class Source:
    path: Path
    model: Model
    stage: int

    def differences(self, result: Path, world_size: int = TO) -> list[str]:
        """Say how a native result differs from what it must be."""
        found = native_differences(result, self.model, stage=self.stage, world_size=world_size)
        return list(found)

    def store_differences(self, store: Path) -> list[str]:
        """Say how a store differs from what it must be."""
        return list(store_differences(store, self.model, stage=self.stage))


@contextmanager
def fabricated(directory: Path, nbytes: int, stage: int) -> Iterator[Source]:
    """Make a checkpoint, and take the space back: pytest would keep it for days."""
    path = directory / "source"
    model = transformer(nbytes, stage=stage, layers=2, vocabulary=96)
    fabricate(path, model, stage=stage, world_size=FROM)
    try:
        yield Source(path, model, stage)
    finally:
        shutil.rmtree(path)


@pytest.fixture(scope="module", params=[2, 3], ids=["stage2", "stage3"])
def source(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Source]:
    with fabricated(tmp_path_factory.mktemp("memory"), LARGE, request.param) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for results, which are large and do not outlive the test."""
    (tmp_path / "results").mkdir()
    yield tmp_path / "results"
    shutil.rmtree(tmp_path / "results")


def run(verb: str, source: Path, target: Path, *options: str, limit: int = LIMIT) -> Measured:
    limited = ("--memory-limit", str(limit), "--json")
    return measure(*STREAMSHARD, verb, source, target, *options, *limited)


def require_kept_contract(done: Measured, limit: int = LIMIT) -> dict[str, Any]:
    """Hold projected, measured and limit against each other, and against the kernel's word."""
    assert done.exit_code == 0, done.stderr
    report = done.report
    assert report["limit_bytes"] == limit
    assert report["projected_bytes"] <= report["floor_bytes"] + limit
    assert report["floor_bytes"] <= report["peak_bytes"] <= report["projected_bytes"]
    # The report's own figure is what the kernel tells this process, which is its parent.
    assert done.peak_bytes <= report["projected_bytes"]
    assert abs(done.peak_bytes - report["peak_bytes"]) <= 2 * MIB
    return report


@AT_STAGE_3
def test_the_checkpoint_is_out_of_all_proportion(source: Source) -> None:
    largest = max(
        4 * a * b for a, b in ((*shape, 1, 1)[:2] for shape in source.model.trained.values())
    )
    assert largest > LIMIT
    assert sum(path.stat().st_size for path in source.path.rglob("*.pt")) > 4.4 * LIMIT


def test_repartition_direct(source: Source, place: Path) -> None:
    require_kept_contract(run("repartition", source.path, place / "out", "--world-size", str(TO)))
    assert source.differences(place / "out") == []


@AT_STAGE_3
def test_repartition_to_more_ranks(source: Source, place: Path) -> None:
    require_kept_contract(run("repartition", source.path, place / "out", "--world-size", "33"))
    assert source.differences(place / "out", 33) == []


@pytest.mark.parametrize(
    ("source", "form"), [(2, "torch"), (3, "safetensors")], indirect=["source"]
)
def test_export(source: Source, place: Path, form: str) -> None:
    options = ("--format", form, "--max-shard-size", "4MiB", "--verify")
    direct = run("export", source.path, place / "direct", *options)
    require_kept_contract(direct)
    require_kept_contract(run("convert", source.path, place / "kept.zarr"))
    of_store = run("export", place / "kept.zarr", place / "of-store", *options)
    require_kept_contract(of_store)
    made = [sorted((place / name).iterdir()) for name in ("direct", "of-store")]
    assert len(made[0]) > 3
    for mine, other in zip(*made, strict=True):
        assert mine.read_bytes() == other.read_bytes()
    if form == "safetensors":
        assert list(exported_differences(place / "direct", source.model)) == []


@AT_STAGE_3
def test_export_dcp(source: Source, place: Path) -> None:
    options = ("--format", "dcp", "--layout", "torch", "--verify")
    require_kept_contract(run("export", source.path, place / "out", *options))


@AT_STAGE_3
def test_export_universal(source: Source, place: Path) -> None:
    out = place / "out"
    require_kept_contract(run("export", source.path, out, "--format", "universal", "--verify"))
    for name, shape in source.model.trained.items():
        found = torch.load(out / TAG / "zero" / name / "exp_avg.pt", mmap=True)
        assert found.shape == (math.prod(shape),)
        wanted = values(ModelRun("exp_avg", name, 0, math.prod(shape)), torch.float32)
        assert torch.equal(found.flatten(), wanted), name


@AT_STAGE_3
def test_graft(source: Source, place: Path) -> None:
    """Masters are copied; of one half of the states means are found first."""
    begun = ("--world-size", str(TO), "--fresh-states")
    require_kept_contract(run("repartition", source.path, place / "start", *begun))
    (place / "rules").write_text("fresh warm *0*")
    measured = measure(
        *STREAMSHARD, "graft", source.path, place / "start", place / "out",
        "--rules", place / "rules", "--memory-limit", str(LIMIT), "--json",
    )  # fmt: skip
    require_kept_contract(measured)


@pytest.mark.parametrize(("source", "codec"), [(2, "zstd"), (3, "none")], indirect=["source"])
def test_through_a_store(source: Source, place: Path, codec: str) -> None:
    """What is read back, verified and compared is bounded as well."""
    store, out = place / "kept.zarr", place / "out"
    limit = LIMIT if codec == "none" else 2 * LIMIT

    def done(verb: str, *arguments: str | Path) -> dict[str, Any]:
        limited = ("--memory-limit", str(limit), "--json")
        return require_kept_contract(measure(*STREAMSHARD, verb, *arguments, *limited), limit)

    options = ("--codec", codec, "--chunk-size", "2MiB", "--verify")
    done("convert", source.path, store, *options)
    assert source.store_differences(store) == []
    done("repartition", store, out, "--world-size", str(TO), "--verify")
    assert source.differences(out) == []
    verified: list[tuple[str | Path, ...]] = [(store,), (out, "--against", store)]
    if codec == "none":
        verified = [(source.path,), (out, "--against", source.path)]
    for arguments in verified:
        report = done("verify", *arguments)
        assert (report["problems"], report["differences"]) == ([], [])
        assert report["bytes_read"] > 0.9 * LARGE
    report = done("diff", store, source.path)
    assert not any(tensor["distance"]["changed"] for tensor in report["tensors"])
    assert report["bytes_read"] > 0.9 * LARGE


@AT_STAGE_3
def test_verify_of_what_differs_everywhere(source: Source, place: Path) -> None:
    """What is found is held until the end: it must not grow with what differs."""
    other = place / "other"
    shutil.copytree(source.path, other)
    for path in sorted(other.rglob("*_optim_states.pt")):
        for record in audit(path).records:
            with path.open("r+b") as stream:
                for at in range(0, record.nbytes - MIB, MIB):
                    stream.seek(record.start + at)
                    stream.write(os.urandom(MIB // 2))
    limited = ("--memory-limit", str(LIMIT), "--json")
    for options, found in ((("--against", source.path), "differences"), ((), "problems")):
        done = measure(*STREAMSHARD, "verify", other, *options, *limited)
        assert done.exit_code == 6
        report = done.report
        assert report["peak_bytes"] <= report["projected_bytes"]
        assert done.peak_bytes <= report["projected_bytes"]
        assert len(report[found]) > 3
    done = measure(*STREAMSHARD, "diff", other, source.path, *limited)
    assert done.exit_code == 6
    assert done.peak_bytes <= done.report["projected_bytes"]
    changed = [tensor for tensor in done.report["tensors"] if tensor["distance"]["changed"]]
    assert len(changed) > 3


@AT_STAGE_3
@pytest.mark.parametrize("verb", ["repartition", "convert"])
def test_memory_does_not_grow_with_the_checkpoint(
    source: Source, tmp_path: Path, place: Path, verb: str
) -> None:
    options = ("--world-size", str(TO)) if verb == "repartition" else ()
    above_floor: list[int] = []
    with fabricated(tmp_path, SMALL, source.stage) as other:
        for made in (other, source):
            target = place / str(len(above_floor))
            report = require_kept_contract(run(verb, made.path, target, *options))
            above_floor.append(report["peak_bytes"] - report["floor_bytes"])
    small, large = above_floor
    assert large <= 1.05 * small + 2 * MIB


@AT_STAGE_3
@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("repartition", ("--world-size", str(TO))),
        ("convert", ("--codec", "zstd", "--chunk-size", "2MiB")),
    ],
)
def test_too_small_a_limit_is_refused_and_the_one_it_names_works(
    source: Source, place: Path, verb: str, options: tuple[str, ...]
) -> None:
    refused = run(verb, source.path, place / "out", *options, limit=4 * MIB)
    assert refused.exit_code == 5
    assert list(place.iterdir()) == []
    named = re.search(r"use --memory-limit (\d+)MiB", refused.stderr)
    assert named is not None, refused.stderr
    enough = int(named[1]) * MIB
    # Two runs may differ by a step, which the advice therefore has to spare.
    too_small = enough - 2 * METADATA_STEP_BYTES - 2 * MIB
    assert run(verb, source.path, place / "out", *options, limit=too_small).exit_code == 5
    require_kept_contract(run(verb, source.path, place / "out", *options, limit=enough), enough)
    assert [path.name for path in place.iterdir()] == ["out"]


@AT_STAGE_3
@pytest.mark.kernel
def test_inside_a_hard_memory_cgroup(source: Source, place: Path, group: Path) -> None:
    """The kernel kills what takes more than the group may have, all its page cache counted."""
    verb = ("repartition", source.path, place / "out", "--world-size", str(TO))
    assert measure(*inside(group), "cp", "-r", source.path, place / "copy").exit_code == 0
    assert hits_of_limit(group) > 0, "the limit is never in force"
    # What is in the cache already would not count as the group's.
    sync_tree(source.path)
    drop_cached(source.path)
    done = measure(*inside(group), *STREAMSHARD, *verb, "--json")
    require_kept_contract(done, (GROUP - done.report["floor_bytes"]) // 2)
    assert source.differences(place / "out") == []


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup, if one can be made here."""
    with ExitStack() as stack:
        try:
            path = stack.enter_context(memory_cgroup(GROUP))
        except NoCgroupError as error:
            pytest.skip(str(error))
        yield path

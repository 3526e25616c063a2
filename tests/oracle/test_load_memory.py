"""What loads map stays no part of the job, and what memory they take."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import streamshard
from tests.oracle import measured_loads
from tests.oracle.compare import differences
from tests.oracle.measured_loads import LargeModel, MeasuredLoad, SaveHeld, WideModel
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

FROM, TO = 1, 2
"""Growth: the partitions of the new ranks are one piece each of the old ones."""
MIB = 1 << 20
ALLOWED_BYTES = 64 * MIB
OFFLOAD = {
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
MAPPED = {
    "stage 2, growing": Case("w2", 2, "bf16", model=WideModel),
    "stage 3, offloaded": Case("w3-offload", 3, "bf16", OFFLOAD, model=WideModel),
}
LARGE = [Case(f"large{stage}", stage, "bf16", model=LargeModel) for stage in (2, 3)]
BY_FUNCTION = "stage 2, by a function"


@dataclass(frozen=True)
class Loads:
    root: Path

    def source(self, case: Case) -> Path:
        return self.root / case.name

    def truth_path(self, case: Case) -> Path:
        return self.root / f"{case.name}.truth.pt"

    def results(self, name: str) -> Path:
        return self.root / "results" / name

    def said(self, name: str) -> list[dict[str, Any]]:
        return [json.loads((self.results(name) / f"{n}.json").read_text()) for n in range(TO)]


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Loads:
    made = Loads(tmp_path_factory.mktemp("loads"))
    saves = [SaveHeld(case, made.source(case), made.truth_path(case)) for case in MAPPED.values()]
    require_success(run_jobs(FROM, saves, made.root / "ranks", measured_loads.save))
    saves = [SaveHeld(case, made.source(case)) for case in LARGE]
    require_success(run_jobs(3, saves, made.root / "ranks", measured_loads.save))
    work = [
        MeasuredLoad(case, _copy(made, case, name), made.results(name), is_overwritten=True)
        for name, case in MAPPED.items()
    ]
    stage_2 = MAPPED["stage 2, growing"]
    work.append(
        MeasuredLoad(stage_2, made.source(stage_2), made.results(BY_FUNCTION), has_function=True)
    )
    for case in LARGE:
        source, store, plain = (made.root / f"{case.name}{end}" for end in ("", ".zarr", "-plain"))
        streamshard.convert(source, store, codec="zstd")
        streamshard.repartition(source, plain, world_size=TO)
        work += [
            MeasuredLoad(case, path, made.results(path.name), is_plain=path == plain)
            for path in (plain, source, store)
        ]
    require_success(run_jobs(TO, work, made.root / "ranks", measured_loads.load))
    return made


def _copy(made: Loads, case: Case, name: str) -> Path:
    place = made.root / "ruined" / name
    shutil.copytree(made.source(case), place)
    return place


@pytest.mark.parametrize("name", MAPPED)
def test_what_was_mapped_is_no_part_of_the_job(name: str, loads: Loads) -> None:
    for said in loads.said(name):
        assert said["mapped_bytes"]
        assert min(said["mapped_bytes"][0]) > MIB
        assert said["maps"] == []
        assert said["is_shared"]


@pytest.mark.parametrize("name", MAPPED)
def test_a_job_goes_on_when_its_source_is_overwritten(name: str, loads: Loads) -> None:
    saved = Truth.load(loads.truth_path(MAPPED[name]))
    loaded = Truth.load(loads.results(name) / "truth.pt")
    assert differences(saved, loaded) == []
    assert all(said["is_kept"] for said in loads.said(name))


def test_nothing_is_mapped_for_a_function_of_the_job(loads: Loads) -> None:
    for said in loads.said(BY_FUNCTION):
        assert said["mapped_bytes"] == [[0, 0]]
    saved = Truth.load(loads.truth_path(MAPPED["stage 2, growing"]))
    loaded = Truth.load(loads.results(BY_FUNCTION) / "truth.pt")
    assert differences(saved, loaded) == []


def test_ranks_of_a_machine_read_the_module_of_a_store_once(loads: Loads) -> None:
    """Each file that `repartition` writes holds just that, apart from a few kilobytes."""
    plain = [*(loads.root / f"{LARGE[0].name}-plain").rglob("*_states.pt")]
    for said in loads.said(f"{LARGE[0].name}.zarr"):
        (read,), (mapped,) = said["read_bytes"], said["mapped_bytes"]
        assert min(mapped) > 16 * MIB
        assert max(read) - min(read) < 8 * MIB
        assert sum(read) == pytest.approx(sum(path.stat().st_size for path in plain), abs=MIB)


@pytest.mark.memory
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("end", ["", ".zarr"], ids=["shards", "store"])
def test_a_load_takes_no_more_memory_than_that_of_converted_files(
    case: Case, end: str, loads: Loads
) -> None:
    plain, direct = loads.said(f"{case.name}-plain"), loads.said(f"{case.name}{end}")
    # What torch has freed by then differs between ranks that load the same: the larger one counts.
    most = max(theirs["peak_bytes"] for theirs in plain) + ALLOWED_BYTES
    for theirs, ours in zip(plain, direct, strict=True):
        assert theirs["mapped_bytes"] == []
        assert theirs["peak_bytes"] > 16 * MIB
        assert ours["peak_bytes"] <= most

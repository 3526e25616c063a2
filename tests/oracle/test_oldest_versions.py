"""What engines of DeepSpeed 0.9 and 0.12 saved is read in their order, and written in today's.

`old_engines` tells how the files were made: those of the second world size were saved by an engine
that had loaded what `repartition` wrote, and held then what the first engine had held.
"""

import re
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from tests.oracle.files import file_differences
from tests.oracle.jobs import Resume
from tests.oracle.models import Case
from tests.oracle.old_engines import CASES, RESUMED, ROUND_ROBIN_1, unpacked
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

EACH = [(version, case) for version, cases in CASES.items() for case in cases]
IDS = [f"{version}-{case.name}" for version, case in EACH]
Ordered = list[list[str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {version: unpacked(version, tmp_path_factory.mktemp(version)) for version in CASES}


def tag(run_dir: Path) -> Path:
    return run_dir / (run_dir / "latest").read_text()


def unlike(written: Path, saved: Path) -> list[str]:
    """List where files differ from an engine's own; 0.9.5 lists no ties in what it saves again.

    What is written is for a later version, and says so.
    """
    found = file_differences(tag(written), tag(saved))
    return [one for one in found if not re.search(r"\['(shared_params|ds_version)'\]", one)]


def stored_order(run_dir: Path) -> Ordered:
    """Return the parameters of each group in the order in which files say that they are stored."""
    (path,) = tag(run_dir).glob("mp_rank_00_model_states.pt")
    return [list(unit) for unit in torch.load(path, weights_only=False)["param_shapes"]]


@pytest.mark.parametrize(("version", "case"), EACH, ids=IDS)
def test_saves_for_two_world_sizes_hold_the_same(
    version: str, case: Case, runs: dict[str, Path]
) -> None:
    place = runs[version] / case.name
    assert streamshard.verify(place / "resumed", against=place / "saved").is_good


@pytest.mark.parametrize(("version", "case"), EACH, ids=IDS)
def test_what_is_written_is_what_an_engine_of_that_version_saves(
    version: str, case: Case, runs: dict[str, Path], tmp_path: Path
) -> None:
    if case == ROUND_ROBIN_1:
        return  # the next test is about the order, which is another since 0.13.0
    place = runs[version] / case.name
    streamshard.repartition(place / "saved", tmp_path / "out", world_size=RESUMED)
    assert unlike(tmp_path / "out", place / "resumed") == []


@pytest.mark.parametrize("version", CASES)
def test_round_robin_at_stage_1_is_written_as_newer_versions_heed_it(
    version: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    place, out = runs[version] / ROUND_ROBIN_1.name, tmp_path / "out"
    report = streamshard.repartition(place / "saved", out, world_size=RESUMED)
    assert any(f"DeepSpeed {version} saved it" in note for note in report.notes)
    plain = stored_order(place / "resumed")
    shuffled = [unit[::2] + unit[1::2] for unit in plain]  # for two ranks
    assert stored_order(out) == shuffled != plain
    assert streamshard.verify(out, against=place / "saved").is_good


@pytest.mark.parametrize("way", ["files", "live"])
def test_the_newest_engine_holds_what_the_old_one_saved(
    way: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    place, out = runs["0.12.6"] / ROUND_ROBIN_1.name, tmp_path / "out"
    source = place / "saved"
    if way == "files":
        streamshard.repartition(source, out, world_size=RESUMED)
        source = out
    load = Resume(ROUND_ROBIN_1, source, tmp_path / "truth.pt", reshards=way == "live")
    require_success(run_jobs(RESUMED, [load], tmp_path / "ranks"))
    loaded, saved = Truth.load(load.truth_path).states, states_in(place / "resumed")
    assert saved.keys() == loaded.keys()
    for state, tensors in saved.items():
        assert tensors.keys() == loaded[state].keys()
        wrong = [name for name in tensors if not tensors[name].equal(loaded[state][name])]
        assert wrong == [], state


def states_in(run_dir: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Join the partitions in files of stage 1, and cut them in the order that the files record."""
    files = [torch.load(path, weights_only=False) for path in sorted(tag(run_dir).glob("*optim*"))]
    ranks: list[dict[str, Any]] = [file["optimizer_state_dict"] for file in files]
    (path,) = tag(run_dir).glob("mp_rank_00_model_states.pt")
    found: dict[str, dict[str, torch.Tensor]] = {}
    for number, shapes in enumerate(torch.load(path, weights_only=False)["param_shapes"]):
        flats = [
            {
                "fp32": rank["single_partition_of_fp32_groups"][number],
                **rank["base_optimizer_state"]["state"][number],
            }
            for rank in ranks
        ]
        stops = list(accumulate(prod(shape) for shape in shapes.values()))
        for state in flats[0].keys() - {"step"}:
            whole = torch.cat([flat[state] for flat in flats])
            for (name, shape), stop in zip(shapes.items(), stops, strict=True):
                cut = whole[stop - prod(shape) : stop].view(shape)
                found.setdefault(state, {})[name] = cut.detach()
    return found

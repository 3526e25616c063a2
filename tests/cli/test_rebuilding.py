"""What an archive gives back is written, and held against the tag, before the tag may go."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.engine.run.phases import Progress
from streamshard.transfer.plan import TransferPlan
from streamshard.transfer.report import Report
from tests.cli.conftest import streamshard
from tests.cli.test_targets import mount
from tests.compact.runs import (
    FIRST,
    HEALTH,
    RECORD,
    actions,
    bits,
    failed_checks,
    make_run,
    receipt_of,
    tags_in,
)
from tests.fabricated import edit
from tests.job import Job

OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory of which the oldest tag may go."""
    return make_run(tmp_path / "run", first=Job(stage=3))


@pytest.fixture
def archive(run: Path, tmp_path: Path) -> Path:
    """Where that tag is archived already."""
    api.compact(run, tmp_path / "archive")
    return tmp_path / "archive"


def own_files(archive: Path) -> list[str]:
    """List what is in a directory of archives except them and the records of runs."""
    found = [path.name for path in archive.iterdir() if path.name.startswith(".")]
    return [name for name in found if name not in (RECORD, HEALTH)]


def change_a_weight(rebuilt: Path) -> None:
    """Change an element of a rank's master weights."""

    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["fp32_flat_groups"][0].data[0] += 1

    edit(rebuilt / OPTIMIZER, change)


def count_a_step_more(rebuilt: Path) -> None:
    """Change what is not a tensor."""
    for path in rebuilt.glob("*model_states.pt"):
        edit(path, lambda content: content.update(global_steps=content["global_steps"] + 1))


@pytest.mark.parametrize(
    ("damage", "action", "is_archived"),
    [
        (change_a_weight, "failed", True),
        (change_a_weight, "failed", False),
        (count_a_step_more, "failed", True),
    ],
)
def test_a_tag_of_which_something_else_comes_back_stays(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    action: str,
    is_archived: bool,
) -> None:
    before, write, archive = bits(run), TransferPlan.run, tmp_path / "archive"
    if is_archived:
        api.compact(run, archive)

    def write_wrongly(plan: TransferPlan, progress: Progress | None = None) -> Report:
        report = write(plan, progress)
        if report.verb == "repartition":
            damage(plan.target / FIRST)
        return report

    monkeypatch.setattr(TransferPlan, "run", write_wrongly)
    assert actions(api.compact(run, archive, delete=True))[FIRST] == action
    assert bits(run) == before
    assert (failed_checks(archive), own_files(archive)) == (["rebuilt_equal"], [])
    assert receipt_of(archive, FIRST)["state"] == "archived"
    monkeypatch.undo()
    assert actions(api.compact(run, archive, delete=True))[FIRST] == "trashed"
    assert (failed_checks(archive), own_files(archive)) == ([], [])
    assert "rebuilt_equal" in {check["name"] for check in receipt_of(archive, FIRST)["checks"]}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", where)
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.kernel
def test_without_room_to_rebuild_it_a_tag_stays(run: Path, small_disk: Path) -> None:
    archive, size = small_disk / "archive", sum(map(len, bits(run / FIRST).values()))
    assert api.compact(run, archive).exit_code == 0
    before = bits(run)
    free = shutil.disk_usage(small_disk).free
    (small_disk / "others").write_bytes(bytes(free - size * 3 // 4))
    done = streamshard("compact", run, archive, "--delete", "-q")
    assert (done.code, bits(run)) == (4, before)
    message = f"{FIRST}: failed: is archived, and stays until there is room to rebuild it from its"
    assert message in done.err
    assert own_files(archive) == []
    (small_disk / "others").unlink()
    assert streamshard("compact", run, archive, "--delete", "-q").code == 0
    assert FIRST not in tags_in(run)

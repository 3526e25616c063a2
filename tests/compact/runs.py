"""Run directories with several tags, each with values of its own, that are long at rest."""

import json
import os
import shutil
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import streamshard as api
from tests.fabricated import client_state, write
from tests.job import LEAN, Job

SMALL = replace(LEAN, client_state=client_state())
"""A job whose archives are small, and that has something of each kind all the same."""
STEPS = (80, 90, 100, 1000)
"""By name the newest comes first."""
DAY = 24 * 3600
NO_GRACE, MONTH = timedelta(0), timedelta(days=30)
RUN, ARCHIVE, TRASH = "run", "archive", ".streamshard.trash"
MODEL = "mp_rank_00_model_states.pt"
SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
CHUNK = "state/fp32/embed.weight/c/0/0"
"""A file of an archive."""


def tag_of(step: int) -> str:
    """Name a step's tag."""
    return f"global_step{step}"


def save(run_dir: Path, step: int, job: Job | None = None, *, days: float = 30) -> Path:
    """Save a step as a job would, so many days ago; returns the tag directory."""
    base = job or SMALL
    run_dir.mkdir(exist_ok=True)
    # Another value in every save, as training changes it.
    changed = replace(base, changed=("fp32", "embed.weight", step % 44))
    write(changed, run_dir, tag_of(step))
    age(run_dir / tag_of(step), days)
    age(run_dir / "zero_to_fp32.py", days)
    return run_dir / tag_of(step)


def age(path: Path, days: float) -> None:
    """Make everything in a directory as old as that."""
    then = time.time() - days * DAY
    for entry in [*path.rglob("*"), path]:
        os.utime(entry, (then, then), follow_symlinks=False)


def make_run(
    run_dir: Path,
    job: Job | None = None,
    steps: Sequence[int] = STEPS,
    *,
    first: Job | None = None,
) -> Path:
    """Make a run directory whose last step is the one that is needed.

    Its `first` step may be of another job, for what is asked about this one alone.
    """
    for number, step in enumerate(steps):
        save(run_dir, step, job if number or first is None else first)
    return run_dir


def copy_place(made: Path, place: Path) -> None:
    """Make a place as it would be if all had been done there: receipts know their inodes."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(made, place, copy_function=shutil.copy2)
    for path in (place / ARCHIVE).glob("*.receipt.json"):
        receipt = json.loads(path.read_text())
        here = (place / RUN).stat()
        receipt["device"], receipt["inode"] = here.st_dev, here.st_ino
        for record in receipt["source"]:
            places = [place / RUN / record["path"], place / RUN / TRASH / record["path"]]
            for stat in (file.stat() for file in places if file.exists()):
                record["device"], record["inode"] = stat.st_dev, stat.st_ino
        times = path.stat()
        path.write_text(json.dumps(receipt))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


RECORD = ".streamshard.last_run.json"
"""Each run writes it, with its times."""
HEALTH = ".streamshard.health.json"
"""What runs have found out about the tags that they have read."""


def bits(root: Path) -> dict[str, bytes]:
    """Every file below a directory with its bytes, except the records of runs."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in (RECORD, HEALTH)
    }


def entries(packed: Path | BytesIO) -> dict[str, bytes]:
    """Every file of a store in one file, of whose zip each is as its CRC-32 says."""
    with zipfile.ZipFile(packed) as opened:
        assert opened.testzip() is None
        return {entry.filename: opened.read(entry) for entry in opened.infolist()}


def damage(path: Path) -> None:
    """Flip a bit; done twice, it is as it was."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def tags_in(run: Path) -> set[str]:
    """List the tags that are where they were saved."""
    return {path.name for path in run.iterdir() if path.is_dir() and path.name[0] != "."}


def actions(found: api.Compaction) -> dict[str, str]:
    """Tell what became of each tag."""
    return {tag.tag: tag.action for tag in found.tags}


def receipt_of(archive: Path, tag: str) -> dict[str, Any]:
    """Read a receipt as anybody would."""
    document: dict[str, Any] = json.loads((archive / f"{tag}.receipt.json").read_text())
    return document


def later(days: float) -> datetime:
    """Tell a time that is still to come."""
    return datetime.now(UTC) + timedelta(days=days)


ALL = {tag_of(step) for step in STEPS}
FIRST = tag_of(STEPS[0])
"""The one that may go."""


def failed_checks(archive: Path) -> list[str]:
    """Name what was found wrong with the archive of the first tag."""
    return [check["name"] for check in receipt_of(archive, FIRST)["checks"] if not check["holds"]]

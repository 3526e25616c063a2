"""A month of nights over a run directory that grows: what is kept, archived and gone."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import streamshard as api
from tests.compact.runs import save, tag_of
from tests.job import Job

JOB = Job(groups=((("embed.weight", (11, 4)),),), frozen=(("old", (3,)),), tied={})
DAYS = 30
EVERY = 700

TABLE = {
    # day: (beside the tags, in the trash, archived in all)
    1: ({100}, set(), 0),
    3: ({100, 200, 300}, set(), 0),
    4: ({200, 300, 400}, {100}, 1),
    8: ({600, 700, 800}, {100, 200, 300, 400, 500}, 5),
    11: ({700, 900, 1000, 1100}, {100, 200, 300, 400, 500, 600, 800}, 7),
    12: ({700, 1000, 1100, 1200}, {200, 300, 400, 500, 600, 800, 900}, 8),
    30: (
        {700, 1400, 2100, 2800, 2900, 3000},
        {2000, 2200, 2300, 2400, 2500, 2600, 2700},
        24,
    ),
}


def steps(names: list[str]) -> set[int]:
    return {int(name.removeprefix("global_step").partition(".")[0]) for name in names}


def test_a_month(tmp_path: Path) -> None:
    """Each day a step is saved at noon; at night three are kept, and every seventh."""
    run, archive = tmp_path / "run", tmp_path / "archive"
    begin = datetime.now(UTC)
    for day in range(1, DAYS + 1):
        save(run, 100 * day, JOB)
        found = api.compact(
            run,
            archive,
            keep_last=3,
            keep_every=EVERY,
            delete=True,
            grace=timedelta(days=7),
            now=begin + timedelta(days=day),
        )
        assert (found.problems, found.exit_code) == ((), 0)
        if day in TABLE:
            beside = steps([path.name for path in run.glob("global_step*")])
            trash = steps([path.name for path in run.glob(".streamshard.trash/global_step*")])
            archives = [path.name for path in archive.glob("*.zarr")]
            assert (beside, trash, len(archives)) == TABLE[day], day
    for day in (1, 5, 26):
        store = archive / f"{tag_of(100 * day)}.zarr"
        assert api.verify(store).is_good
        first = archive / f"{tag_of(100)}.zarr" / "module/old/c/0"
        assert first.samefile(store / "module/old/c/0")

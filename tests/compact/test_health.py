"""Tags that hold NaN, or are damaged: they do not count, and what is good is never removed."""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.compare.assessment import Assessor
from streamshard.engine.scan.probe import Probe
from streamshard.errors import SourceError
from streamshard.operations.compact.run_context import RunContext
from streamshard.operations.compact.run_directory import scan_run_directory
from tests.cli.conftest import streamshard
from tests.compact.runs import (
    DAY,
    HEALTH,
    NO_GRACE,
    SHARD,
    actions,
    age,
    later,
    make_run,
    save,
    tag_of,
    tags_in,
)
from tests.compact.sides import Sides
from tests.fabricated import edit
from tests.verify.conftest import flip_data

GOOD, BAD = (80, 90, 100), (110, 120, 130)


def poison(tag: Path, days: float = 30) -> None:
    """Put NaN into a master weight of a tag of long ago."""

    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[3] = math.nan

    edit(tag / SHARD, change)
    age(tag, days)


def heal(run: Path, step: int) -> None:
    """Save a tag again, without NaN."""
    for path in (run / tag_of(step)).iterdir():
        path.unlink()
    (run / tag_of(step)).rmdir()
    save(run, step)


@pytest.fixture
def ill_run(tmp_path: Path) -> Path:
    """A run that was good until a step, and has saved NaN since."""
    run = make_run(tmp_path / "run", steps=(*GOOD, *BAD))
    for number, step in enumerate(BAD):
        poison(run / tag_of(step), 20 - number)
    return run


def known(archive: Path) -> dict[str, str]:
    """Tell what is recorded of each tag."""
    document = json.loads((archive / HEALTH).read_text())
    return {one["tag"]: one["unhealthy"] for one in document["tags"]}


def test_the_last_good_one_stays_after_three_that_are_not(ill_run: Path, archive: Path) -> None:
    """Three whole ones would have been enough."""
    for step in GOOD[:-1]:
        poison(ill_run / tag_of(step))
    found = api.compact(ill_run, archive, keep_last=3, delete=True, grace=NO_GRACE)
    later_on = api.compact(ill_run, archive, keep_last=3, delete=True, grace=NO_GRACE, now=later(1))
    assert {*actions(found).values(), *actions(later_on).values()} == {"kept"}
    assert tags_in(ill_run) == {tag_of(step) for step in (*GOOD, *BAD)}
    assert api.newest(ill_run).path == str(ill_run / tag_of(100))


def test_one_that_is_damaged_does_not_count(tmp_path: Path, archive: Path) -> None:
    run = make_run(tmp_path / "run", steps=(80, 90, 100))
    flip_data(run / tag_of(100) / SHARD)
    age(run / tag_of(100), 30)
    found = api.compact(run, archive, keep_last=2, delete=True)
    assert ({*actions(found).values()}, found.exit_code) == ({"kept"}, 6)
    assert "CRC-32" in found.tags[-1].reason


def test_the_first_night_says_so(ill_run: Path, archive: Path) -> None:
    done = streamshard("compact", ill_run, archive, "--keep-last", "2")
    assert done.code == 6
    assert done.out.startswith(f"{ill_run}: 1 archived, 5 kept")  # it has done all that it can
    record = json.loads(streamshard("compact", ill_run, archive, "--status", "--json").out)[
        "last_run"
    ]
    assert [one["tag"] for one in record["problems"]] == [tag_of(step) for step in BAD]
    assert "1 NaN of" in record["problems"][0]["unhealthy"]
    newer = "kept: newer than the 2nd newest healthy one; not healthy: state/"
    assert done.err.count(newer) == 2
    assert done.err.count("kept: 'latest' names it; not healthy: state/") == 1
    assert "global_step100" not in done.err


def test_the_first_problem_makes_the_exit_code(ill_run: Path, archive: Path) -> None:
    save(ill_run, 140)
    (ill_run / "latest").write_text(tag_of(130))  # the last save did not end
    found = api.compact(ill_run, archive, keep_last=2)
    assert [one.exit_code for one in found.problems] == [6, 6, 6, 3]
    assert found.exit_code == 6
    assert api.compact_status(ill_run, archive).last_run.exit_code == 6  # type: ignore[union-attr]


def test_each_save_is_read_once(
    ill_run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    find = Assessor.find

    def note(self: Assessor, source: Any, request: Any) -> Any:  # noqa: ANN401
        read.append(source.checkpoint.tag)
        return find(self, source, request)

    monkeypatch.setattr(Assessor, "find", note)
    wanted = [tag_of(step) for step in reversed((90, 100, *BAD))]
    api.compact(ill_run, archive, keep_last=2, dry_run=True)
    assert read == wanted
    assert not (archive / HEALTH).exists()  # a dry run writes nothing
    api.compact(ill_run, archive, keep_last=2)
    assert read == 2 * wanted
    api.compact(ill_run, archive, keep_last=2)
    api.compact(ill_run, archive, keep_last=2, dry_run=True)
    assert read == 2 * wanted
    heal(ill_run, 130)
    save(ill_run, 140)
    api.compact(ill_run, archive, keep_last=2)
    assert read[2 * len(wanted) :] == [tag_of(140), tag_of(130)]
    assert known(archive)[tag_of(130)] == ""


def lead_out(path: Path) -> None:
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


RECORDS: dict[str, Callable[[Path], object]] = {
    "a link that leads out": lead_out,
    "a pipe": make_pipe,
    "no document": lambda path: path.write_text("{"),
    "more elements than can be": lambda path: path.write_text(
        re.sub(r'"numel": \d+', f'"numel": {1 << 70}', path.read_text())
    ),
    "a path that leads out": lambda path: path.write_text(
        path.read_text().replace(tag_of(90), "../run")
    ),
}


def test_a_record_that_cannot_be_used_is_made_again(ill_run: Path, archive: Path) -> None:
    api.compact(ill_run, archive)
    before = (archive / HEALTH).read_bytes()
    for what, damage in RECORDS.items():
        damage(archive / HEALTH)
        assert api.compact(ill_run, archive).exit_code == 6
        assert not (archive / HEALTH).is_symlink(), what
        assert (archive / HEALTH).read_bytes() == before, what
    assert api.compact_status(ill_run, archive).newest_healthy == tag_of(100)


def test_a_disk_that_failed_once_is_tried_again(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", steps=(80, 90, 100))

    def refuse(*_: object, **__: object) -> None:
        raise SourceError("cannot be read (Input/output error)", path=run / tag_of(100) / SHARD)

    with monkeypatch.context() as patch:
        patch.setattr(Probe, "magnitudes", refuse)
        found = api.compact(run, archive, keep_last=2, delete=True)
    assert {*actions(found).values()} == {"ambiguous"}
    assert found.exit_code == 3
    assert known(archive) == {}
    found = api.compact(run, archive, keep_last=2, delete=True)
    assert found.exit_code == 0
    assert actions(found)[tag_of(80)] == "trashed"
    assert {*known(archive).values()} == {""}


def test_a_time_of_change_that_no_calendar_has_is_no_obstacle(
    ill_run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems keep any number; those of tests may not."""

    def late(*arguments: Any) -> Any:  # noqa: ANN401
        run = scan_run_directory(*arguments)
        return replace(run, tags=tuple(replace(tag, changed_ns=1 << 90) for tag in run.tags))

    monkeypatch.setattr("streamshard.operations.compact.compact.scan_run_directory", late)
    found = api.compact(ill_run, archive, delete=True)
    assert {*actions(found).values()} == {"kept"}
    assert api.compact_status(ill_run, archive).unhealthy_since[:4] == "9999"


def test_the_trash_is_judged_by_its_archive(tmp_path: Path, archive: Path) -> None:
    """One of NaN there does not stand for the good one before it."""
    run = make_run(tmp_path / "run", steps=(80, 90, 100, 110, 120))
    poison(run / tag_of(90))
    api.compact(run, archive, keep_last=2, delete=True)
    assert tags_in(run) == {tag_of(110), tag_of(120)}
    for step in (110, 120):
        poison(run / tag_of(step))
    found = api.compact(run, archive, keep_last=2, delete=True, grace=NO_GRACE, now=later(1))
    assert actions(found)[tag_of(80)] == "in the trash"
    assert tag_of(90) in known(archive)
    assert known(archive)[tag_of(90)]


def test_the_states_stay_if_what_was_good_is_gone_meanwhile(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a job's rotation removed it, or saved it anew, while others were archived."""
    run = make_run(tmp_path / "run", steps=(80, 90, 100, 110))
    for days in (0, 1):
        api.compact(run, archive, keep_last=2, delete=True, grace=NO_GRACE, now=later(days))
    removed_at = RunContext.removed_at

    def change(*arguments: Any) -> datetime | None:  # noqa: ANN401
        for step in (100, 110):
            poison(run / tag_of(step))
        return removed_at(*arguments)

    monkeypatch.setattr(RunContext, "removed_at", change)
    options: dict[str, Any] = {"delete": True, "weights_only_older_than": timedelta(days=1)}
    found = api.compact(run, archive, keep_last=2, now=later(10), **options)
    reasons = {one.tag: one.reason for one in found.tags}
    assert reasons[tag_of(80)] == "no newer tag is known to be healthy"
    assert (archive / f"{tag_of(80)}.zarr").is_dir()


def test_what_a_link_leads_to_is_read_again_if_it_changed(tmp_path: Path, archive: Path) -> None:
    run = make_run(tmp_path / "run", steps=(80, 90, 100))
    place, elsewhere = run / tag_of(100) / SHARD, run / "elsewhere" / SHARD
    elsewhere.parent.mkdir()
    place.rename(elsewhere)
    (run / tag_of(100) / "link").symlink_to(elsewhere.parent)
    place.symlink_to(Path("link") / SHARD)
    age(run, 30)
    api.compact(run, archive, keep_last=2)
    poison(elsewhere.parent)
    found = api.compact(run, archive, keep_last=2, delete=True)
    assert {*actions(found).values()} == {"kept"}


def test_the_status_says_since_when(ill_run: Path, archive: Path) -> None:
    new = streamshard("compact", ill_run, archive, "--status")
    assert "no tag read yet" in new.out
    api.compact(ill_run, archive, keep_last=2)
    status = api.compact_status(ill_run, archive)
    assert (status.newest_healthy, status.unhealthy) == (tag_of(100), tuple(map(tag_of, BAD)))
    since = datetime.fromisoformat(status.unhealthy_since)
    assert abs(datetime.now(UTC) - timedelta(days=20) - since) < timedelta(seconds=DAY / 24)
    shown = streamshard("compact", ill_run, archive, "--status").out
    assert f"newest {tag_of(100)}; 3 tags after it not healthy, since {since:%Y-%m-%d}" in shown
    save(ill_run, 140)
    api.compact(ill_run, archive, keep_last=2)
    status = api.compact_status(ill_run, archive)
    assert (status.newest_healthy, status.unhealthy) == (tag_of(140), ())


def test_what_was_measured_of_a_newest_tag_is_not_read_again_to_archive_it(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", steps=(80, 90))
    wanted = api.verify(run, tag=tag_of(80), health=True).health
    api.compact(run, archive, keep_last=2)
    save(run, 100)
    save(run, 110)

    def refuse(*_: object) -> None:
        raise AssertionError("read to measure it")

    monkeypatch.setattr("streamshard.compare.tensor_content.scan", refuse)
    assert actions(api.compact(run, archive, keep_last=2))[tag_of(80)] == "archived"
    found = api.inspect(archive / f"{tag_of(80)}.zarr").health
    assert found
    assert found.items() <= wanted.items()


def test_it_is_the_same_in_a_bucket(sides: Sides) -> None:
    far = replace(sides.archive, name="runs")
    far.bucket.put(sides.run, far.name)
    assert str(api.newest(far.where)) == f"{far.where}/{tag_of(1000)}"
    far.write(f"{tag_of(1000)}/{SHARD}", b"")
    assert str(api.newest(far.where, quick=True)) == f"{far.where}/{tag_of(100)}"
    (sides.run / tag_of(1000) / SHARD).write_bytes(b"")
    sides.compact(keep_last=4)
    status = api.compact_status(sides.run, sides.archive.where)
    assert (status.newest_healthy, status.unhealthy) == (tag_of(100), ())

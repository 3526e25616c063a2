"""A broken tag that somebody has looked at is told of no more, until it is broken otherwise."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

import streamshard as api
from tests.cli.conftest import streamshard
from tests.compact.runs import STEPS, actions, bits, tag_of
from tests.fabricated import optimizer_file, write
from tests.job import Job

BROKEN, NEXT = tag_of(STEPS[0]), tag_of(STEPS[1])


def shard(run: Path, rank: int) -> Path:
    return run / BROKEN / optimizer_file(run, rank).name


@pytest.fixture
def broken(run: Path) -> Path:
    """A run directory whose oldest tag lacks a rank's file, since long ago."""
    then = (run / BROKEN).stat()
    shard(run, 1).unlink()
    os.utime(run / BROKEN, ns=(then.st_atime_ns, then.st_mtime_ns))
    return run


def test_the_message_says_how_and_that_is_enough(broken: Path, archive: Path) -> None:
    night = ("compact", broken, archive, "--delete", "-q")
    before = bits(broken / BROKEN)
    told = streamshard(*night)
    assert told.code == 3
    found = re.search(r"To leave it as it is: (streamshard compact .*)\n", told.err)
    assert found is not None
    command = shlex.split(found[1])[1:]
    tried = streamshard(*command, "-n", "-v")
    assert (tried.code, streamshard(*night).code) == (0, 3)
    kept = bits(archive)
    done = streamshard(*command, "-v")
    assert (done.code, done.err) == (0, "")
    assert re.search(rf"{BROKEN} +acknowledged .* reported again", done.out)
    assert set(bits(archive)) - set(kept) == {f"{BROKEN}.acknowledged.json"}
    again = streamshard(*night)
    assert (again.code, again.out, again.err) == (0, "", "")
    shown = streamshard(*night[:-1], "-v").out
    assert re.search(rf"{BROKEN} +kept .*missing.*; acknowledged 20", shown)
    assert bits(broken / BROKEN) == before


def test_another_damage_is_told_again(broken: Path, archive: Path) -> None:
    def night() -> api.Compaction:
        return api.compact(broken, archive)

    api.compact(broken, archive, acknowledge=[BROKEN])
    assert night().exit_code == 0
    other = shard(broken, 0)
    then, data = other.stat(), other.read_bytes()
    # Of the same size and age, and what cannot be read of it is another thing.
    other.write_bytes(data[:-22] + b"\0" * 22)
    os.utime(other, ns=(then.st_atime_ns, then.st_mtime_ns))
    (told,) = night().problems
    assert (told.tag, told.action, told.exit_code) == (BROKEN, "ambiguous", 3)
    assert "not as it was when it was acknowledged on 20" in told.reason
    api.compact(broken, archive, acknowledge=[BROKEN])
    assert night().exit_code == 0
    (broken / BROKEN / "notes.txt").write_text("looked into")
    os.utime(broken / BROKEN / "notes.txt", (0, 0))
    os.utime(broken / BROKEN, (0, 0))
    assert night().exit_code == 3


def test_another_tag_is_told(broken: Path, archive: Path) -> None:
    api.compact(broken, archive, acknowledge=[BROKEN])
    (broken / NEXT / shard(broken, 1).name).unlink()
    os.utime(broken / NEXT, (0, 0))
    assert [tag.tag for tag in api.compact(broken, archive).problems] == [NEXT]


def test_whole_again_it_is_a_tag_like_any_other(broken: Path, archive: Path) -> None:
    api.compact(broken, archive, acknowledge=[BROKEN])
    whole = write(Job(), archive.parent / "whole")
    for path in (whole / "global_step7").iterdir():
        (broken / BROKEN / path.name).write_bytes(path.read_bytes())
        os.utime(broken / BROKEN / path.name, (0, 0))
    os.utime(broken / BROKEN, (0, 0))
    assert actions(api.compact(broken, archive))[BROKEN] == "archived"


@pytest.mark.parametrize("what", ["kept", "candidate", "not there", "nothing but a name"])
def test_what_is_not_unclear_is_not_acknowledged(run: Path, archive: Path, what: str) -> None:
    (run / "global_step9").mkdir()
    tags = {
        "kept": (tag_of(STEPS[-1]), "kept anyway"),
        "candidate": (BROKEN, f"--keep-tag {BROKEN}"),
        "not there": ("global_step5", f"no tag global_step5 with shards; there are {BROKEN}"),
        "nothing but a name": ("global_step9", "no tag global_step9"),
    }
    tag, says = tags[what]
    done = streamshard("compact", run, archive, "--acknowledge", tag)
    assert done.code == 2
    assert says in done.err
    assert not [*archive.glob("*.json")]


def test_a_note_that_was_changed_is_told(broken: Path, archive: Path) -> None:
    api.compact(broken, archive, acknowledge=[BROKEN])
    note = archive / f"{BROKEN}.acknowledged.json"
    document = json.loads(note.read_text())
    note.write_text(json.dumps({**document, "changed_ns": "1"}))
    (told,) = api.compact(broken, archive).problems
    assert (told.action, str(note) in told.reason) == ("ambiguous", True)

"""What someone has acknowledged is told no more, until it is otherwise."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

import streamshard as api
from tests.cli.conftest import streamshard
from tests.compact.runs import FIRST, SHARD, STEPS, actions, bits, tag_of
from tests.fabricated import write
from tests.job import Job

NEXT = tag_of(STEPS[1])


@pytest.fixture
def broken(run: Path) -> Path:
    """A run directory whose oldest tag lacks a rank's file, since long ago."""
    then = (run / FIRST).stat()
    (run / FIRST / SHARD).unlink()
    os.utime(run / FIRST, ns=(then.st_atime_ns, then.st_mtime_ns))
    return run


def test_the_message_says_how_and_that_is_enough(broken: Path, archive: Path) -> None:
    scheduled = ("compact", broken, archive, "--delete", "-q")
    before = bits(broken / FIRST)
    said = streamshard(*scheduled)
    assert said.code == 3
    found = re.search(r"To leave it as it is: (streamshard compact .*)\n", said.err)
    assert found is not None
    command = shlex.split(found[1])[1:]
    tried = streamshard(*command, "-n", "-v")
    assert (tried.code, streamshard(*scheduled).code) == (0, 3)
    kept = bits(archive)
    done = streamshard(*command, "-v")
    assert (done.code, done.err) == (0, "")
    assert re.search(rf"{FIRST} +acknowledged .* reported again", done.out)
    assert set(bits(archive)) - set(kept) == {f"{FIRST}.acknowledged.json"}
    again = streamshard(*scheduled)
    assert (again.code, again.out, again.err) == (0, "", "")
    shown = streamshard(*scheduled[:-1], "-v").out
    assert re.search(rf"{FIRST} +kept .*missing.*; acknowledged 20", shown)
    assert bits(broken / FIRST) == before


def test_another_damage_is_told_again(broken: Path, archive: Path) -> None:
    api.compact(broken, archive, acknowledge=[FIRST])
    assert api.compact(broken, archive).exit_code == 0
    other = broken / FIRST / SHARD.replace("rank_1", "rank_0")
    then, data = other.stat(), other.read_bytes()
    # Of the same size and age, and what cannot be read of it is another thing.
    other.write_bytes(data[:-22] + b"\0" * 22)
    os.utime(other, ns=(then.st_atime_ns, then.st_mtime_ns))
    (problem,) = api.compact(broken, archive).problems
    assert (problem.tag, problem.action, problem.exit_code) == (FIRST, "ambiguous", 3)
    assert "not as it was when it was acknowledged on 20" in problem.reason
    api.compact(broken, archive, acknowledge=[FIRST])
    assert api.compact(broken, archive).exit_code == 0
    (broken / FIRST / "notes.txt").write_text("looked into")
    os.utime(broken / FIRST / "notes.txt", (0, 0))
    os.utime(broken / FIRST, (0, 0))
    assert api.compact(broken, archive).exit_code == 3


def test_another_tag_is_told(broken: Path, archive: Path) -> None:
    api.compact(broken, archive, acknowledge=[FIRST])
    (broken / NEXT / SHARD).unlink()
    os.utime(broken / NEXT, (0, 0))
    assert [tag.tag for tag in api.compact(broken, archive).problems] == [NEXT]


def test_whole_again_it_is_a_tag_like_any_other(broken: Path, archive: Path) -> None:
    api.compact(broken, archive, acknowledge=[FIRST])
    for path in (write(Job(), archive.with_name("whole"), FIRST) / FIRST).iterdir():
        (broken / FIRST / path.name).write_bytes(path.read_bytes())
        os.utime(broken / FIRST / path.name, (0, 0))
    os.utime(broken / FIRST, (0, 0))
    assert actions(api.compact(broken, archive))[FIRST] == "archived"


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        (tag_of(STEPS[-1]), "not ambiguous: 'latest' names it"),
        (FIRST, f"--keep-tag {FIRST}"),
        ("global_step5", f"no tag global_step5 with shards; there are {FIRST}"),
        ("global_step9", "no tag global_step9"),
    ],
    ids=["kept", "candidate", "not there", "nothing but a name"],
)
def test_what_is_not_unclear_is_not_acknowledged(
    run: Path, archive: Path, tag: str, says: str
) -> None:
    (run / "global_step9").mkdir()
    done = streamshard("compact", run, archive, "--acknowledge", tag)
    assert done.code == 2
    assert says in done.err
    assert not [*archive.glob("*.json")]


def test_a_note_that_was_changed_is_told(broken: Path, archive: Path) -> None:
    api.compact(broken, archive, acknowledge=[FIRST])
    path = archive / f"{FIRST}.acknowledged.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "changed_ns": "1"}))
    (problem,) = api.compact(broken, archive).problems
    assert (problem.action, str(path) in problem.reason) == ("ambiguous", True)

"""What comes between runs to a bucket, or into one: other writes, other runs, and kills."""

import pytest

import streamshard as api
from streamshard.errors import TargetLockedError
from streamshard.io.changes import lock_at
from streamshard.io.object_path import as_path
from streamshard.operations.compact import trash
from tests.compact.runs import ALL, FIRST, actions, bits, later
from tests.compact.sides import VICTIM, Sides
from tests.forked import run_forked


def test_an_object_that_is_replaced_after_it_was_read_keeps_the_original(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the second, and with as many bytes."""
    good = b""
    look = trash.Trash.being_removed

    def replace_and_look(mine: trash.Trash) -> list[str]:
        nonlocal good
        if not good and (VICTIM in sides.archive.content()):
            good = sides.archive.read(VICTIM)
            sides.archive.write(VICTIM, bytes(len(good)))
        return look(mine)

    monkeypatch.setattr(trash.Trash, "being_removed", replace_and_look)
    found = sides.compact(delete=True)
    assert good
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 6)
    assert sides.tags() == ALL


def test_a_second_night_ends_at_once(sides: Sides) -> None:
    for where, options in ((sides.archive.where, {}), (sides.run, {"delete": True})):
        place = as_path(where)
        held = lock_at(place / ".streamshard.lock", place)
        held.take()
        with pytest.raises(TargetLockedError) as caught:
            sides.compact(**options)
        assert caught.value.exit_code == 4
        assert str(where) in str(caught.value)
        held.release()
    assert {*actions(sides.compact(delete=True, keep_last=4)).values()} == {"kept"}


@pytest.mark.parametrize(("suffix", "at"), [(".zarr", 43), (".zarr.zip", 3)])
def test_a_night_that_is_killed_is_finished_by_the_next(sides: Sides, suffix: str, at: int) -> None:
    """It uploads the archive, its list and its receipt, and what is rebuilt from it."""
    whole, packed = bits(sides.tmp / "made" / FIRST), suffix == ".zarr.zip"
    assert killed(sides, at, packed=packed) == KILLED
    assert (sides.original(), sides.tags()) == (whole, ALL)
    found = sides.compact(delete=True, packed=packed)
    assert (actions(found)[FIRST], found.exit_code) == ("trashed", 0)
    assert sides.original() == whole
    assert api.verify(f"{sides.archive.where}/{FIRST}{suffix}").is_good
    known = {f"{FIRST}{suffix}", f"{FIRST}{suffix}.sha256", f"{FIRST}.receipt.json"}
    assert {path.split("/")[0] for path in sides.archive.content()} == known


KILLED = 99
SCRIPT = """
import os, sys, threading
from datetime import datetime, timedelta
from itertools import count
import streamshard
from streamshard.io.objects import clients

run, archive, at, packed, now = sys.argv[1:]
lock, made, real = threading.Lock(), [], clients.client_of

class Watched:
    '''A client with which the process ends after so many changes, the last of them carried out.'''

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        method = getattr(self._client, name)
        if name not in ("put", "copy", "delete"):
            return method

        def change(*given, **options):
            with lock:
                found = method(*given, **options)
                made.append(name)
                if len(made) == int(at):
                    os._exit(99)
                return found

        return change

clients.client_of = lambda bucket: Watched(real(bucket))
now = datetime.fromisoformat(now)
streamshard.compact(run, archive, delete=True, packed=packed == "True", now=now)
"""


def killed(sides: Sides, at: int, *, packed: bool) -> int:
    """Run until a given number of changes in a bucket; returns its exit code."""
    given = (str(at), str(packed), later(1).isoformat())
    return run_forked(str(sides.run), sides.archive.where, *given, script=SCRIPT).code

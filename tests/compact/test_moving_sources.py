"""A shard that is written to, cut off or replaced while its tag is archived: the tag stays."""

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.io.objects.clients import client_of
from tests.cloud.proxy import FaultProxy, Request
from tests.cloud.server import S3Server
from tests.compact.runs import ALL, FIRST, actions, make_run, tags_in
from tests.compact.sides import Sides
from tests.job import LEAN

SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
PARTS = 7
"""After how many parts of all reads the shard changes."""


def changed(path: Path) -> bytes:
    """Return the content of a shard with another value in a tensor, which no reader notices."""
    with zipfile.ZipFile(path) as archive:
        tensors = (info for info in archive.infolist() if "/data/" in info.filename)
        tensor = max(tensors, key=lambda info: info.file_size)
        found = archive.read(tensor)
    return path.read_bytes().replace(found, bytes([found[0] ^ 1, *found[1:]]))


def write_to(path: Path) -> None:
    """Change a shard where it lies."""
    content = changed(path)
    with path.open("r+b") as file:
        file.write(content)


def cut_off(path: Path) -> None:
    """Leave the first half of a shard."""
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    """Put another file at the place of a shard."""
    made = path.with_name("made")
    made.write_bytes(changed(path))
    made.replace(path)


@contextmanager
def at_read(number: int, tag: Path, do: Callable[[], None]) -> Iterator[Iterator[int]]:
    """Do something right before a read of a tag's files; yields the number of the next read."""
    plain, numbers = os.preadv, count(1)

    def read(descriptor: int, *given: Any) -> int:  # noqa: ANN401
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.parent == tag and next(numbers) == number:
            do()
        return plain(descriptor, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read)
        yield numbers


@pytest.mark.parametrize("change", [write_to, cut_off, replace])
@pytest.mark.parametrize("delete", [False, True])
def test_a_shard_that_changes_while_it_is_archived(
    tmp_path: Path, change: Callable[[Path], None], *, delete: bool
) -> None:
    def compacted(name: str, number: int) -> tuple[api.Compaction, int]:
        run = make_run(tmp_path / name, LEAN)
        with at_read(number, run / FIRST, lambda: change(run / FIRST / SHARD)) as reads:
            found = api.compact(run, tmp_path / f"{name}.archive", delete=delete, workers=1)
        return found, next(reads) - 1

    found, reads = compacted("still", 0)
    assert actions(found)[FIRST] == ("deleted" if delete else "archived")
    refused = 0
    for part in range(PARTS):
        found, _ = compacted(f"{part}", 1 + reads * part // PARTS)
        run, store = tmp_path / f"{part}", tmp_path / f"{part}.archive" / f"{FIRST}.zarr"
        assert tags_in(run) == ALL
        if actions(found)[FIRST] == "archived":  # it changed before its archive was begun
            assert api.verify(store, against=run / FIRST).is_good
        else:
            assert str(run / FIRST) in found.problems[0].reason
            refused += 1
    assert refused == PARTS if delete else refused > PARTS // 3


@pytest.mark.parametrize("sides", ["bucket to local"], indirect=True)
@pytest.mark.parametrize("gets", range(1, 5))
def test_an_object_that_is_replaced_while_it_is_archived(
    sides: Sides, gets: int, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = changed(sides.tmp / "made" / FIRST / SHARD)
    asked = count(1)

    def replace_it(request: Request) -> None:
        is_wanted = request.method == "GET" and request.path.endswith(f"{FIRST}/{SHARD}")
        if is_wanted and next(asked) == gets:
            sides.run.write(f"{FIRST}/{SHARD}", other)

    with FaultProxy(server.url) as proxy, monkeypatch.context() as patch:
        proxy.plan = replace_it
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        client_of.cache_clear()
        found = sides.compact(delete=True)
    client_of.cache_clear()
    assert next(asked) > gets
    assert actions(found)[FIRST] in ("ambiguous", "failed")
    assert FIRST in found.problems[0].reason
    assert sides.original()[SHARD] == other
    assert sides.run.tags() == ALL

"""A run reads each side as often as its proofs need, and nothing that changes meanwhile goes."""

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from benchmarks.compact_reads import times_read
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import Progress
from streamshard.operations.compact import omissions, removal
from streamshard.operations.compact.receipts import Receipt
from streamshard.operations.compact.run_context import RunContext
from streamshard.operations.compact.tag_checks import unchanged
from streamshard.source.source import Source
from tests.compact.runs import (
    ALL,
    CHUNK,
    FIRST,
    MODEL,
    SHARD,
    actions,
    age,
    damage,
    failed_checks,
    make_run,
    tags_in,
)
from tests.fabricated import edit
from tests.job import LEAN

NBYTES = 8_000_000
ROOM = 0.05
"""For headers, and for blocks of which two readers need a part."""
PARTS = 5
"""After how many parts of all reads the shard changes."""


def test_each_side_is_read_so_often_and_no_oftener(tmp_path: Path) -> None:
    found = times_read(tmp_path, NBYTES, 2, [True], layers=2)
    source, archive = (sum(column) for column in zip(*found.values(), strict=True))
    # Weights are held against their masters (6/14), the rest is written (12/14), and measured
    # (12/14), as nobody did so when it was one of the newest. Then come the SHA-256, and the
    # comparison with the files that are rebuilt from the archive.
    assert source == pytest.approx(6 / 14 + 12 / 14 + 12 / 14 + 1 + 1, abs=ROOM), found
    assert archive == pytest.approx(2 + 16 / 12, abs=ROOM), found


@pytest.mark.parametrize("runs", [[True], [False, True]], ids=["at once", "later"])
def test_a_weight_that_was_left_out_and_does_not_follow_keeps_its_tag(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch, runs: list[bool]
) -> None:
    exact_casts = omissions.exact_casts

    def wrongly(opened: Source, limits: Limits, progress: Progress) -> set[int]:
        tensors = enumerate(opened.checkpoint.tensors)
        missed = {n for n, t in tensors if (t.state, t.name) == ("module", "embed.weight")}
        found = exact_casts(opened, limits, progress)
        assert missed
        assert not missed & found
        return found | missed

    edit(run / FIRST / MODEL, lambda content: content["module"]["embed.weight"].data.add_(1))
    age(run / FIRST, 30)
    monkeypatch.setattr(omissions, "exact_casts", wrongly)
    for delete in runs:
        found = api.compact(run, archive, delete=delete)
    assert (actions(found)[FIRST], tags_in(run)) == ("failed", ALL)
    assert failed_checks(archive) == ["rebuilt_equal"]


def touch_the_tag(run: Path, archive: Path) -> None:
    """Write a file of the tag again."""
    path = run / FIRST / MODEL
    path.write_bytes(path.read_bytes())


def damage_the_archive(run: Path, archive: Path) -> None:
    damage(archive / f"{FIRST}.zarr" / CHUNK)


def restore_another_archive(run: Path, archive: Path) -> None:
    """Put a file of the same size there, as rsync does: with the times that were there."""
    path = archive / f"{FIRST}.zarr" / CHUNK
    before = {each: each.stat() for each in (path, path.parent)}
    path.rename(run.with_name("before"))
    path.write_bytes(run.with_name("before").read_bytes()[::-1])
    for each, stat in before.items():
        os.utime(each, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (touch_the_tag, "source_unchanged"),
        (damage_the_archive, "archive_unchanged"),
        (restore_another_archive, "archive_unchanged"),
    ],
)
def test_a_proof_of_this_night_holds_only_for_what_has_not_changed_since(
    run: Path,
    archive: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, Path], None],
    check: str,
) -> None:
    def late(receipt: Receipt, root: Path, context: RunContext | None = None) -> str:
        told = unchanged(receipt, root, context)
        if not done:
            change(run, archive)
            done.append(True)
        return told

    done: list[bool] = []
    monkeypatch.setattr(removal, "unchanged", late)
    found = api.compact(run, archive, delete=True)
    assert actions(found)[FIRST] in ("failed", "ambiguous")
    assert (failed_checks(archive), tags_in(run)) == ([check], ALL)


def changed(path: Path) -> bytes:
    """Return the content of a shard with another value in a tensor, which no reader notices."""
    with zipfile.ZipFile(path) as archive:
        tensors = (info for info in archive.infolist() if "/data/" in info.filename)
        tensor = max(tensors, key=lambda info: info.file_size)
        found = archive.read(tensor)
    return path.read_bytes().replace(found, bytes([found[0] ^ 1, *found[1:]]))


def write_to(path: Path) -> None:
    content = changed(path)
    with path.open("r+b") as file:
        file.write(content)


def replace(path: Path) -> None:
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


@pytest.mark.parametrize(("change", "delete"), [(write_to, False), (replace, True)])
def test_a_shard_that_changes_while_it_is_archived(
    tmp_path: Path, change: Callable[[Path], None], *, delete: bool
) -> None:
    def compacted(name: str, number: int) -> tuple[api.Compaction, int]:
        run = make_run(tmp_path / name, LEAN)
        with at_read(number, run / FIRST, lambda: change(run / FIRST / SHARD)) as reads:
            found = api.compact(run, tmp_path / f"{name}.archive", delete=delete, workers=1)
        return found, next(reads) - 1

    found, reads = compacted("still", 0)
    assert actions(found)[FIRST] == ("trashed" if delete else "archived")
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

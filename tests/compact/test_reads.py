"""A night reads each side as often as its proofs need, and no proof is given up for that."""

import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from benchmarks.compact_reads import times_read
from streamshard.operations.checks.problems import Findings
from streamshard.operations.compact import omissions, removal
from streamshard.operations.compact.originals import unchanged
from streamshard.operations.compact.proof import read_archive
from streamshard.operations.compact.receipts import Receipt
from streamshard.operations.compact.run_context import ProofContext
from streamshard.operations.source.source import Source
from streamshard.operations.transfer.execution import Limits
from streamshard.operations.transfer.report import Progress, Silent
from tests.compact.runs import ALL, FIRST, actions, age, bits, make_run, receipt_of, tags_in
from tests.compact.test_padding import flat_tensors
from tests.fabricated import edit

MODEL = "mp_rank_00_model_states.pt"
CHUNK = "state/fp32/embed.weight/c/0/0"
NBYTES = 16_000_000
ROOM = 0.05
"""For headers, and for blocks of which two readers need a part."""


@pytest.mark.parametrize("codec", ["zstd", "none"])
@pytest.mark.parametrize(
    ("deletes", "source", "archive"),
    [
        # Weights are held against their masters (6/14), the rest is written (12/14). Then come the
        # SHA-256, and the comparison: with the archive, or with the files rebuilt from it.
        ([False], 6 / 14 + 12 / 14 + 1 + 12 / 14, 3),
        ([True], 6 / 14 + 12 / 14 + 1 + 1, 2 + 16 / 12),
        ([False, True], 1 + 1, 1 + 16 / 12),
    ],
)
def test_each_side_is_read_so_often_and_no_oftener(
    tmp_path: Path, codec: str, deletes: list[bool], source: float, archive: float
) -> None:
    found = times_read(tmp_path, NBYTES, 2, deletes, codec)
    times = [sum(column) for column in zip(*found.values(), strict=True)]
    assert times == pytest.approx([source, archive], abs=ROOM), found


@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_one_reading_gives_the_sha256_of_what_is_whole(tmp_path: Path, codec: str) -> None:
    store = tmp_path / "store.zarr"
    api.convert(make_run(tmp_path / "run"), store, codec=codec)
    known = {store / path: sha256(data).hexdigest() for path, data in bits(store).items()}
    proofs = ProofContext(Limits(0, 1 << 40, None), Silent())
    findings = Findings()
    found = read_archive(store, proofs, findings)
    assert found.items() <= known.items()
    assert {path.name for path in known.keys() - found.keys()} <= {"zarr.json", "0"}
    assert findings.problems == []
    damaged = bytearray((store / CHUNK).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (store / CHUNK).write_bytes(damaged)
    findings = Findings()
    found = read_archive(store, proofs, findings)
    assert found.get(store / CHUNK) in (None, sha256(damaged).hexdigest())
    assert [problem.file for problem in findings.problems] == [str(store / CHUNK)]


def test_an_archive_of_other_values_is_noticed(run: Path, archive: Path, tmp_path: Path) -> None:
    """Whole by all of its own checksums, and with the training state of the tag."""
    api.compact(run, archive)
    other = make_run(tmp_path / "other")

    def change(content: dict[str, Any]) -> None:
        flat_tensors(content)[-1][5] += 1

    edit(other / FIRST / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", change)
    age(other / FIRST, 30)
    api.compact(other, tmp_path / "another")
    for name in (f"{FIRST}.zarr", f"{FIRST}.zarr.sha256"):
        path = archive / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        (tmp_path / "another" / name).rename(path)
    assert actions(api.compact(run, archive, delete=True))[FIRST] == "failed"
    assert (failed_checks(archive), tags_in(run)) == (["rebuilt_equal"], ALL)


@pytest.mark.parametrize("nights", [[True], [False, True]], ids=["at once", "later"])
def test_a_weight_that_was_left_out_and_does_not_follow_keeps_its_tag(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch, nights: list[bool]
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
    for delete in nights:
        found = api.compact(run, archive, delete=delete)
    assert (actions(found)[FIRST], tags_in(run)) == ("failed", ALL)
    assert failed_checks(archive) == ["rebuilt_equal"]


def touch_the_tag(run: Path, archive: Path) -> None:
    """Write a file of the tag again."""
    path = run / FIRST / MODEL
    path.write_bytes(path.read_bytes())


def damage_the_archive(run: Path, archive: Path) -> None:
    """Change one bit of the archive."""
    path = archive / f"{FIRST}.zarr" / CHUNK
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


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
    def late(receipt: Receipt, root: Path, proofs: ProofContext | None) -> str:
        told = unchanged(receipt, root, proofs)
        if not changed:
            change(run, archive)
            changed.append(True)
        return told

    changed: list[bool] = []
    monkeypatch.setattr(removal, "unchanged", late)
    found = api.compact(run, archive, delete=True)
    assert actions(found)[FIRST] in ("failed", "ambiguous")
    assert (failed_checks(archive), tags_in(run)) == ([check], ALL)


def failed_checks(archive: Path) -> list[str]:
    """Name what was found wrong."""
    return [check["name"] for check in receipt_of(archive, FIRST)["checks"] if not check["holds"]]

"""Archives that are one file each hold, prove and give back what directories do."""

import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.cli.main import main
from streamshard.engine.journals.journal import Journal
from streamshard.transfer.packed_target import PackedFiles, PackedTarget
from tests.compact.runs import (
    ALL,
    FIRST,
    MONTH,
    NO_GRACE,
    actions,
    age,
    bits,
    damage,
    entries,
    later,
    make_run,
    receipt_of,
    save,
    tag_of,
    tags_in,
)
from tests.compact.test_archive import JOBS

CHECK = ("sha256sum", "--check", "--strict", "--quiet")
FROZEN = ("old.weight", (1 << 10, 1 << 5))


@pytest.fixture
def store(archive: Path) -> Path:
    """The archive of the tag that may go."""
    return archive / f"{FIRST}.zarr.zip"


def test_the_whole_way_of_a_tag(tmp_path: Path, archive: Path, store: Path) -> None:
    """It is what a directory would be: the same arrays, the same checks, the same states."""
    run = make_run(tmp_path / "run", first=JOBS["experts"])
    (run / FIRST / "tokenizer.json").write_bytes(bytes(range(256)))
    age(run / FIRST, 30)
    plain = tmp_path / "plain"
    api.compact(run, plain)
    found = api.compact(run, archive, delete=True, packed=True)
    assert (actions(found)[FIRST], found.exit_code) == ("trashed", 0)
    names = {path.name for path in archive.iterdir() if path.name[0] != "."}
    assert names == {store.name, f"{store.name}.sha256", f"{FIRST}.receipt.json"}
    receipt = receipt_of(archive, FIRST)
    assert (receipt["packed"], receipt["archive_bytes"]) == (True, store.stat().st_size)
    assert all(check["holds"] for check in receipt["checks"])
    assert not differing(entries(store), bits(plain / f"{FIRST}.zarr"))
    status = api.compact_status(run, archive)
    assert [(one.state, one.archive_bytes) for one in status.tags] == [
        ("in the trash", store.stat().st_size)
    ]
    for road, source in (("archived", store), ("direct", plain / f"{FIRST}.zarr")):
        api.repartition(source, tmp_path / road, world_size=4)
    assert not differing(bits(tmp_path / "archived"), bits(tmp_path / "direct"))
    assert actions(api.compact(run, archive, delete=True, now=later(8)))[FIRST] == "purged"
    asked: Any = {"weights_only_older_than": MONTH, "now": later(39)}
    before, api_found = entries(store), api.compact(run, archive, **asked)
    assert actions(api_found)[FIRST] == "weights only"
    weights = archive / f"{FIRST}.weights.zarr.zip"
    assert {path.name for path in archive.glob("global*")} == {
        weights.name, f"{weights.name}.sha256", f"{FIRST}.receipt.json"
    }  # fmt: skip
    kept = entries(weights)
    own = {path for path in kept if path.startswith("meta/") or path == "zarr.json"}
    assert all(kept[path] == before[path] for path in kept.keys() - own)
    assert {p for p in before if p.startswith(("state/fp32", "file/", "module/"))} <= kept.keys()
    assert not [path for path in kept if "exp_avg" in path]
    assert api.verify(weights).is_good
    for sums in archive.glob("*.sha256"):
        assert subprocess.run([*CHECK, sums.name], cwd=archive).returncode == 0
    assert receipt_of(archive, FIRST)["archive_bytes"] == weights.stat().st_size
    assert actions(api.compact(run, archive, **asked))  # and nothing is left to do
    assert not differing(entries(weights), kept)


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """List the files that differ, or that only one side has."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


@pytest.mark.usefixtures("trashed_packed")
def test_one_that_is_damaged_lets_no_tag_go(run: Path, archive: Path, store: Path) -> None:
    before, data = bits(run), bytearray(store.read_bytes())
    data[len(data) // 2] ^= 1
    store.write_bytes(data)
    found = api.compact(run, archive, purge=[FIRST], grace=NO_GRACE)
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 6)
    assert str(store) in found.problems[0].reason
    assert bits(run) == before


def put_another(store: Path) -> None:
    """Put a store in its place that is good, and of another save."""
    api.convert(store.parent.with_name("run") / tag_of(90), store, overwrite=True)


@pytest.mark.usefixtures("archived_packed")
@pytest.mark.parametrize("change", [put_another, damage])
def test_one_that_has_changed_since_lets_no_tag_go(
    run: Path, archive: Path, store: Path, change: Callable[[Path], None]
) -> None:
    change(store)
    found = api.compact(run, archive, delete=True, packed=True)
    assert actions(found)[FIRST] in ("failed", "ambiguous")
    assert found.exit_code
    assert tags_in(run) == ALL


def kill_once(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Interrupt a run where it notes what it has written, or writes a packed file."""
    notes = count()

    def killing(note: Callable[..., Any]) -> Callable[..., Any]:
        def be_killed(*given: Any) -> Any:  # noqa: ANN401
            if next(notes) == at:
                raise KeyboardInterrupt
            return note(*given)

        return be_killed

    monkeypatch.setattr(Journal, "note_all", killing(Journal.note_all))
    monkeypatch.setattr(PackedFiles, "_append", killing(PackedFiles._append))
    monkeypatch.setattr(PackedTarget, "_end", lambda *_: None)


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
def test_what_was_begun_is_finished_in_the_form_that_it_has(
    run: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, first: bool,
    then: bool,
) -> None:  # fmt: skip
    """Packed, or as a directory."""
    api.compact(run, tmp_path / "undisturbed", packed=first)
    kill_once(monkeypatch, 9 if first else 0)
    with pytest.raises(KeyboardInterrupt):
        api.compact(run, archive, packed=first, workers=1)
    assert [*archive.glob("*.partial")] or not first
    assert [one.state for one in api.compact_status(run, archive).tags] == ["begun"]
    monkeypatch.undo()
    assert actions(api.compact(run, archive, packed=then, delete=True))[FIRST] == "trashed"
    assert differing(bits(archive), bits(tmp_path / "undisturbed")) == [f"{FIRST}.receipt.json"]


def test_archives_of_both_forms_lie_side_by_side(
    tmp_path: Path, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", steps=(1, 2, 3, 4))
    api.compact(run, archive)
    for step, packed in ((5, True), (6, False)):
        save(run, step)
        api.compact(run, archive, delete=True, packed=packed)
    forms = [".zarr", ".zarr.zip", ".zarr"]
    stores = [archive / f"{tag_of(step)}{end}" for step, end in zip((1, 2, 3), forms, strict=True)]
    assert all(map(Path.exists, stores))
    assert main(["newest", str(archive)]) == 0
    assert capsys.readouterr().out.strip() == str(stores[2])
    api.merge(archive, tmp_path / "merged.zarr", last=3)
    api.merge(stores, tmp_path / "named.zarr")
    assert not differing(bits(tmp_path / "merged.zarr"), bits(tmp_path / "named.zarr"))
    changed = [one.name for one in api.diff(*stores[:2]).tensors if one.distance.changed]
    assert changed == ["state/fp32/embed.weight"]
    found = api.compact(run, archive, undelete=[tag_of(2)])
    assert (actions(found)[tag_of(2)], found.exit_code) == ("brought back", 0)
    assert api.verify(stores[1], against=run / tag_of(2)).is_good
    found = api.compact(run, archive, delete=True, packed=True, now=later(8))
    assert actions(found)[tag_of(2)] == "trashed"
    assert [actions(found)[tag_of(step)] for step in (1, 3)] == ["purged", "purged"]

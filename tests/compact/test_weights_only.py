"""Archives that lose their optimizer states, and those that keep them."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard as api
from streamshard.errors import SourceError
from streamshard.operations.compact.weights_only import WeightsOnlyStore
from tests.compact.conftest import AfterNights
from tests.compact.runs import (
    CHUNK,
    FIRST,
    MONTH,
    STEPS,
    TRASH,
    actions,
    age,
    bits,
    damage,
    later,
    make_run,
    receipt_of,
    save,
    tag_of,
)
from tests.compact.test_archive import JOBS
from tests.fabricated import edit, wrapped
from tests.job import STATES, Job

JOB = Job(groups=((("embed.weight", (11, 4)),),), frozen=(("old", (3,)),), tied={})


def compact(run: Path, archive: Path, days: float, **options: object) -> api.Compaction:
    """Run it as every time, so many days from now."""
    asked = {"delete": True, "weights_only_older_than": MONTH, "now": later(days), **options}
    return api.compact(run, archive, **asked)  # type: ignore[arg-type]


def purge(run: Path, archive: Path, **options: object) -> None:
    """Have the first tag archived and removed for good, eight days from now."""
    compact(run, archive, 0, **options)
    compact(run, archive, 8, **options)
    assert receipt_of(archive, FIRST)["state"] == "purged"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", JOB)


@pytest.fixture
def full(run: Path, archive: Path, after_nights: AfterNights) -> Path:
    """An archive whose original is gone for good."""
    nights = [{"delete": True, "now": later(days)} for days in (0, 8)]
    after_nights(run.parent, "purged later", nights, JOB)
    return archive / f"{FIRST}.zarr"


@pytest.fixture
def weights(archive: Path) -> Path:
    """What becomes of it."""
    return archive / f"{FIRST}.weights.zarr"


@pytest.fixture
def dropped(run: Path, after_nights: AfterNights) -> None:
    """It has become of it."""
    nights = [{"delete": True, "now": later(days)} for days in (0, 8)]
    nights += [{"weights_only_older_than": MONTH, "now": later(39)}]
    after_nights(run.parent, "dropped", nights, JOB)


@pytest.mark.parametrize("name", ["experts", "muon"])
def test_all_but_the_states_is_left_as_it_was(
    name: str, tmp_path: Path, archive: Path, weights: Path
) -> None:
    run, full = make_run(tmp_path / "run", first=JOBS[name]), archive / f"{FIRST}.zarr"
    (run / FIRST / "tokenizer.json").write_bytes(bytes(range(256)))
    purge(run, archive, min_age=timedelta(0))
    before = bits(full)
    api.convert(full, tmp_path / "kept.zarr")
    found = compact(run, archive, 39)
    assert (actions(found)[FIRST], found.exit_code) == ("weights only", 0)
    assert not full.exists()
    now = bits(weights)
    dropped = ("exp_avg", "momentum_buffer")
    assert [path for path in before if any(state in path for state in dropped)]
    assert not [path for path in now if any(state in path for state in dropped)]
    own = {path for path in now if path.startswith("meta/") or path == "zarr.json"}
    assert {path: now[path] for path in now.keys() - own} == {
        path: content for path, content in before.items() if path in now and path not in own
    }
    assert {p for p in before if p.startswith(("state/fp32", "file/", "module/"))} <= now.keys()
    compared = api.verify(weights, against=tmp_path / "kept.zarr")
    assert compared.problems == ()
    assert {d.kind for d in compared.differences} == {"missing", "value"}
    for difference in compared.differences:
        if difference.kind == "missing":
            assert difference.name.split("state/")[1].split("/")[0] in (*STATES, "momentum_buffer")
        else:
            assert difference.name.endswith(".step")


@pytest.mark.usefixtures("full")
def test_it_says_of_itself_what_it_lacks(
    run: Path, archive: Path, weights: Path, tmp_path: Path
) -> None:
    before = bits(archive)
    assert actions(compact(run, archive, 39, dry_run=True))[FIRST] == "weights only"
    assert bits(archive) == before
    found = {tag.tag: tag for tag in compact(run, archive, 39).tags}[FIRST]
    api.convert(weights, tmp_path / "again.zarr", codec="none")
    for store in (weights, tmp_path / "again.zarr"):
        inspected = api.inspect(store)
        mark = inspected.weights_only
        assert mark is not None
        assert mark.states == (*STATES, "step")
        assert later(38).isoformat() < mark.at < later(39).isoformat()
        assert "no job can resume" in inspected.notes[0].lower()
        told = json.loads((store / "zarr.json").read_text())["attributes"]["streamshard"]
        assert (told["format_version"], told["weights_only"]["states"]) == (1, [*STATES, "step"])
        checked = api.verify(store)
        assert checked.is_good
        assert "Weights only" in checked.notes[0]
    same = api.verify(weights, against=tmp_path / "again.zarr")
    assert (same.is_good, len([n for n in same.notes if "Weights only" in n])) == (True, 2)
    receipt = receipt_of(archive, FIRST)
    assert receipt["dropped"] == told["weights_only"]["at"]
    assert receipt["state"] == "weights only"
    held = sum(len(content) for content in bits(weights).values())
    assert receipt["archive_bytes"] == found.archive_bytes == held
    assert all(check["holds"] for check in receipt["checks"])
    assert {"full_archive_bytes", "content_equal"} <= {c["name"] for c in receipt["checks"]}
    command = ["sha256sum", "--check", "--strict", "--quiet", f"{weights.name}.sha256"]
    assert subprocess.run(command, cwd=archive).returncode == 0
    assert not [path for path in archive.iterdir() if path.name.startswith(f"{FIRST}.zarr")]


def test_its_weights_are_exported_and_nothing_resumes(
    run: Path, archive: Path, full: Path, weights: Path, tmp_path: Path
) -> None:
    for form in ("safetensors", "torch"):
        api.export(full, tmp_path / form, format=form)
    compact(run, archive, 39)
    for form in ("safetensors", "torch"):
        api.export(weights, tmp_path / f"{form} again", format=form)
        assert bits(tmp_path / f"{form} again") == bits(tmp_path / form)
    refused: list[Callable[[], object]] = [
        lambda: api.repartition(weights, tmp_path / "out"),
        lambda: api.repartition(weights, tmp_path / "out", world_size=3, zero_stage=3),
        lambda: api.export(weights, tmp_path / "out", format="universal"),
        lambda: api.export(weights, tmp_path / "out", format="dcp"),
    ]
    for attempt in refused:
        with pytest.raises(api.StreamshardError, match=r"exp_avg.*were dropped on 20.*export") as e:
            attempt()
        assert e.value.exit_code == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("dropped")
def test_a_store_whose_mark_was_taken_off_is_refused(weights: Path) -> None:
    document = weights / "zarr.json"
    document.write_text(document.read_text().replace('"weights_only"', '"weights-only"'))
    with pytest.raises(SourceError, match="whether the store holds weights only"):
        api.inspect(weights)
    assert not api.verify(weights).is_good


@pytest.mark.usefixtures("full")
def test_while_the_original_is_anywhere_nothing_is_dropped(run: Path, archive: Path) -> None:
    before = bits(archive)
    for place in (run / FIRST, run / TRASH / FIRST, run / TRASH / ".streamshard.going" / FIRST):
        place.mkdir(parents=True)
        api.compact(run, archive, now=later(90), weights_only_older_than=MONTH)
        assert bits(archive) == before
        place.rmdir()


@pytest.mark.usefixtures("full")
def test_another_run_directory_takes_nothing_from_archives(archive: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", JOB, steps=STEPS[1:])
    found = compact(other, archive, 90)
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)


def test_what_was_not_written_as_it_should_be_takes_nothing_away(
    run: Path, archive: Path, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write = bits(full), WeightsOnlyStore.write

    def spoil(self: WeightsOnlyStore, target: Path, progress: object) -> None:
        write(self, target)
        content = (target / CHUNK).read_bytes()
        (target / CHUNK).unlink()  # the full archive has it too
        (target / CHUNK).write_bytes(content)
        damage(target / CHUNK)

    monkeypatch.setattr(WeightsOnlyStore, "write", spoil)
    found = compact(run, archive, 39)
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 6)
    assert bits(full) == before
    monkeypatch.undo()
    assert actions(compact(run, archive, 39))[FIRST] == "weights only"


def test_what_is_left_is_looked_at_again_before_the_rest_goes(
    run: Path, archive: Path, full: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == full:
            raise PermissionError(1, "Operation not permitted", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    assert compact(run, archive, 39).exit_code == 4
    assert receipt_of(archive, FIRST)["state"] == "weights only"
    monkeypatch.undo()
    damage(weights / "meta/state/c/0")
    found = compact(run, archive, 39)
    assert (actions(found)[FIRST], found.exit_code, full.is_dir()) == ("failed", 6, True)
    damage(weights / "meta/state/c/0")
    assert actions(compact(run, archive, 39))[FIRST] == "weights only"
    assert not full.exists()


def test_what_somebody_else_made_is_not_touched(
    run: Path, archive: Path, full: Path, weights: Path
) -> None:
    before = bits(full)
    for place in (weights, weights.with_name(f"{weights.name}.partial")):
        place.mkdir()
        found = compact(run, archive, 39)
        assert (actions(found)[FIRST], found.exit_code) == ("failed", 4)
        assert bits(full) == before
        place.rmdir()


def test_without_hard_links_files_are_copied(
    run: Path, archive: Path, full: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = (full / CHUNK).read_bytes()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(os, "link", refuse)
    # What takes the lock does without links too.
    assert actions(compact(run, archive, 39))[FIRST] == "weights only"
    assert (weights / CHUNK).read_bytes() == wanted


def test_what_archives_share_stays_whole(tmp_path: Path, archive: Path) -> None:
    run = make_run(tmp_path / "other", JOB, (1, 2, 3, 4))
    compact(run, archive, 0, keep_last=2)
    compact(run, archive, 8, keep_last=2)
    found = compact(run, archive, 39, keep_last=2, keep_tags=[tag_of(2)])
    assert [t.action for t in found.tags[-2:]] == ["weights only", "kept"]
    first, second = archive / f"{tag_of(1)}.weights.zarr", archive / f"{tag_of(2)}.zarr"
    assert (first / "module/old/c/0").samefile(second / "module/old/c/0")
    assert api.verify(second).is_good
    save(run, 5, JOB)
    compact(run, archive, 39, keep_last=2, weights_only_older_than=None)
    third = archive / f"{tag_of(3)}.zarr"
    assert (first / "module/old/c/0").samefile(third / "module/old/c/0")
    assert receipt_of(archive, tag_of(3))["shared_bytes"] > 0


def test_states_in_the_files_of_the_ranks_are_kept(run: Path, archive: Path) -> None:
    """None of these can be told from the rest of its file."""
    for path in (run / FIRST).glob("*optim_states.pt"):
        edit(path, with_a_list)
    age(run / FIRST, 30)
    for days in (0, 39, 90):
        found = compact(run, archive, days).tags
    reason = "its optimizer has states that are kept in the files of the ranks"
    assert ("kept", reason) in [(tag.action, tag.reason) for tag in found if tag.tag == FIRST]
    assert api.verify(archive / f"{FIRST}.zarr").is_good


def with_a_list(content: dict[str, Any]) -> None:
    wrapped(content["optimizer_state_dict"])["state"][0]["Q"] = [torch.ones(3), None]


@pytest.mark.usefixtures("dropped")
def test_what_has_no_states_keeps_what_it_has(run: Path, archive: Path, weights: Path) -> None:
    receipt = receipt_of(archive, FIRST)
    # As if an archive of the weights alone had been archived as a full one.
    weights.rename(archive / f"{FIRST}.zarr")
    (archive / f"{FIRST}.receipt.json").write_text(json.dumps({**receipt, "state": "purged"}))
    before = bits(archive)
    found = compact(run, archive, 90).tags[-1]
    assert (found.action, found.reason) == ("kept", "its archive holds no optimizer states")
    assert bits(archive) == before


@pytest.mark.usefixtures("dropped")
def test_a_tag_of_that_name_that_is_saved_again_is_ambiguous(run: Path, archive: Path) -> None:
    save(run, 80, replace(JOB, changed=None))
    (run / "latest").write_text(tag_of(1000))
    held = bits(archive)
    for options in ({}, {"undelete": [FIRST]}):
        found = compact(run, archive, 39, **options)
        assert found.exit_code != 0
        assert bits(run / FIRST)
        assert bits(archive) == held

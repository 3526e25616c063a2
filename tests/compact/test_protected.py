"""What keeps a tag from being removed, also when it comes late."""

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard as api
from streamshard.model import Note, NoteKind
from streamshard.operations.compact.proof import intact
from streamshard.operations.compact.receipts import ArchivedTag
from streamshard.operations.compact.run_context import ProofContext
from streamshard.operations.compact.run_directory import scan_run_directory
from tests.compact.runs import (
    ALL,
    FIRST,
    TRASH,
    actions,
    age,
    later,
    make_run,
    tag_of,
    tags_in,
)
from tests.fabricated import load
from tests.fabricated import save as save_file
from tests.job import Job


def flip(run: Path) -> None:
    """Change a byte, and nothing that can be seen without reading."""
    path = run / FIRST / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as stream:
        stream.write(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def add_file(run: Path) -> None:
    (run / FIRST / "notes.txt").write_text("learned a lot")
    age(run / FIRST, 30)


def add_link(run: Path) -> None:
    (run / "best").symlink_to(FIRST)


def add_inner_link(run: Path) -> None:
    (run / tag_of(1000) / "model.pt").symlink_to(f"../{FIRST}/mp_rank_00_model_states.pt")
    age(run / tag_of(1000), 30)


def add_link_far_below(run: Path) -> None:
    place = run / tag_of(1000) / "eval" / "best"
    place.mkdir(parents=True)
    (place / "ckpt").symlink_to(run / FIRST)
    age(run / tag_of(1000), 30)


def name_universal(run: Path) -> None:
    (run / "latest_universal").write_text(FIRST)


def touch(run: Path) -> None:
    os.utime(run / FIRST / "mp_rank_00_model_states.pt")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "bits": (flip, "ambiguous"),
    "a file": (add_file, "ambiguous"),
    "a link": (add_link, "kept"),
    "a link in a tag": (add_inner_link, "kept"),
    "a link far below": (add_link_far_below, "kept"),
    "latest_universal": (name_universal, "kept"),
    "time": (touch, "kept"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_since_it_was_archived_stays(run: Path, archive: Path, what: str) -> None:
    change, action = CHANGES[what]
    api.compact(run, archive)
    change(run)
    found = api.compact(run, archive, delete=True)
    assert actions(found)[FIRST] == action
    assert tags_in(run) == ALL | ({"best"} if what == "a link" else set())


@pytest.mark.parametrize("what", ["a link", "latest_universal", "time"])
def test_what_is_protected_while_it_is_looked_at_stays(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The rules are asked again after everything that takes long."""
    times = 0

    def late(run_dir: Path, *given: Any) -> object:  # noqa: ANN401
        nonlocal times
        times += 1
        if times == 2:
            CHANGES[what][0](run)
        return scan_run_directory(run_dir, *given)

    monkeypatch.setattr("streamshard.operations.compact.policy.scan_run_directory", late)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, "may not be removed any more" in found.tags[0].reason) == (
        "ambiguous", True
    )  # fmt: skip
    assert times == 2
    assert (run / FIRST).is_dir()


def link_to_where_it_was(run: Path) -> None:
    (run / "best").symlink_to(FIRST)


def link_into_the_trash(run: Path) -> None:
    (run / "best").symlink_to(run / TRASH / FIRST)


def lose_newer_ones(run: Path) -> None:
    for step in (90, 100):
        shutil.rmtree(run / tag_of(step))


def leave(run: Path) -> None:
    """Change nothing."""


LATER: dict[str, tuple[Callable[[Path], None], dict[str, object], str]] = {
    "--keep-tag": (leave, {"keep_tags": ["*80"]}, "matches"),
    "--keep-every": (leave, {"keep_every": 80}, "a multiple"),
    "--keep-last": (leave, {"keep_last": 4}, "newest 4"),
    "a link to where it was": (link_to_where_it_was, {}, "link"),
    "a link into the trash": (link_into_the_trash, {}, "link"),
    "latest_universal": (name_universal, {}, "latest_universal"),
    "newer ones are gone": (lose_newer_ones, {}, "newest 3"),
}


@pytest.mark.parametrize("what", LATER)
def test_what_is_wanted_again_stays_in_the_trash(run: Path, archive: Path, what: str) -> None:
    change, options, told = LATER[what]
    api.compact(run, archive, delete=True)
    change(run)
    found = api.compact(run, archive, delete=True, now=later(30), **options)  # type: ignore[arg-type]
    (tag,) = (tag for tag in found.tags if tag.tag == FIRST)
    assert (tag.action, told in tag.reason) == ("in the trash", True)
    assert (run / TRASH / FIRST).is_dir()


def test_what_is_wanted_again_while_the_archive_is_read_stays(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.compact(run, archive, delete=True)

    def late(place: ArchivedTag, proofs: ProofContext) -> str:
        add_link(run)
        return intact(place, proofs)

    monkeypatch.setattr("streamshard.operations.compact.removal.intact", late)
    found = api.compact(run, archive, delete=True, now=later(30))
    assert (actions(found)[FIRST], found.exit_code) == ("ambiguous", 3)
    assert (run / TRASH / FIRST).is_dir()


def tear(run: Path) -> None:
    """Tear a newer tag."""
    os.truncate(run / tag_of(100) / "mp_rank_00_model_states.pt", 100)


def lose_latest(run: Path) -> None:
    (run / "latest").unlink()


def replace_trash(run: Path) -> None:
    (run / TRASH).rename(run / f"{TRASH}.away")
    (run / TRASH).symlink_to(f"{TRASH}.away")


UNCLEAR: dict[str, tuple[Callable[[Path], None], str]] = {
    "a newer one is torn": (tear, "model_states.pt"),
    "latest is gone": (lose_latest, "no 'latest'"),
    "the trash is elsewhere": (replace_trash, "its trash cannot be read"),
}


@pytest.mark.parametrize("what", UNCLEAR)
def test_what_is_not_clear_any_more_is_told_and_keeps_the_trash(
    run: Path, archive: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    api.compact(run, archive, delete=True)
    change, told = UNCLEAR[what]
    scans: list[object] = []

    def late(run_dir: Path, *given: Any) -> object:  # noqa: ANN401
        if scans:
            change(run)
        scans.append(run_dir)
        return scan_run_directory(run_dir, *given)

    monkeypatch.setattr("streamshard.operations.compact.policy.scan_run_directory", late)
    found = api.compact(run, archive, delete=True, now=later(30))
    (tag,) = (tag for tag in found.tags if tag.tag == FIRST)
    assert (tag.action, told in tag.reason, found.exit_code) == ("ambiguous", True, 3)
    assert (run / TRASH / FIRST).is_dir()


@pytest.fixture(params=["as written", "reworded"])
def _notes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes as they are, or with all their words replaced."""
    make = Note.__init__

    def reword(note: Note, text: str, kind: NoteKind = NoteKind.FACT) -> None:
        make(note, f"Ranks differ in {len(text)} words.", kind)

    if request.param == "reworded":
        monkeypatch.setattr(Note, "__init__", reword)


@pytest.mark.usefixtures("_notes")
def test_what_ranks_keep_of_their_own_is_not_given_up(tmp_path: Path, archive: Path) -> None:
    run = make_run(tmp_path / "run", Job(stage=3))
    path = run / FIRST / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    save_file({**load(path), "seed": 5}, path)
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, "differ in" in found.tags[0].reason) == ("ambiguous", True)
    assert tags_in(run) == ALL
    assert (archive / f"{FIRST}.zarr").is_dir()


Held = dict[str, Any]


def other_config(held: Held) -> None:
    held["ds_config"]["train_batch_size"] += 1


def other_version(held: Held) -> None:
    held["ds_version"] += "+own"


def of_its_own(held: Held) -> None:
    held["seed"] = torch.tensor([3.0, 4.0])


def other_frozen(held: Held) -> None:
    fragments = held["frozen_param_fragments"]
    fragments["old.weight"] = fragments["old.weight"] + 1


def other_shape(held: Held) -> None:
    held["frozen_param_shapes"]["old.weight"] = torch.Size((6, 3))


def frozen_elsewhere(held: Held) -> None:
    held["frozen_param_fragments"]["base.weight"] = torch.ones(3)


LAST, MODEL = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (LAST, other_config, "ds_config"),
        (LAST, other_version, "ds_version"),
        (LAST, of_its_own, "seed"),
        (MODEL, other_frozen, "old.weight"),
        (MODEL, other_shape, "frozen_param_shapes"),
        (MODEL, frozen_elsewhere, "base.weight"),
    ],
)
def test_copies_that_are_none_are_not_given_up(
    run: Path, archive: Path, name: str, change: Callable[[Held], None], told: str
) -> None:
    """An archive keeps one of them."""
    held = load(run / FIRST / name)
    change(held)
    save_file(held, run / FIRST / name)
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, told in found.tags[0].reason) == ("ambiguous", True)
    assert tags_in(run) == ALL


def test_shapes_that_ranks_do_not_agree_about_are_not_given_up(
    tmp_path: Path, archive: Path
) -> None:
    run = make_run(tmp_path / "run", Job(stage=3))
    path = run / FIRST / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    held = load(path)
    other_shape(held)
    save_file(held, path)
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, "frozen_param_shapes" in found.tags[0].reason) == (
        "ambiguous", True
    )  # fmt: skip


@pytest.mark.parametrize("record", ["notes.txt", "data/99"])
def test_records_that_nothing_names_are_not_given_up(run: Path, archive: Path, record: str) -> None:
    path = run / FIRST / MODEL
    with zipfile.ZipFile(path, "a") as held:
        root = held.namelist()[0].partition("/")[0]
        held.writestr(f"{root}/{record}", "of somebody")
    assert load(path)["global_steps"] > 0  # which torch does not mind
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, record in found.tags[0].reason) == ("ambiguous", True)
    assert tags_in(run) == ALL


def test_links_in_a_tag_are_not_given_up(run: Path, archive: Path) -> None:
    (run / "vocab.txt").write_text("a b c")
    (run / FIRST / "vocab.txt").symlink_to("../vocab.txt")
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, "vocab.txt" in found.tags[0].reason) == ("ambiguous", True)
    assert tags_in(run) == ALL

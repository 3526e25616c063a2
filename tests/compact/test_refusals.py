"""What speaks against a removal keeps a tag, archived or not and in the trash, and its states."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from re import search
from typing import Any

import pytest
import torch

import streamshard as api
from streamshard.operations.compact.run_directory import scan_run_directory
from tests.compact.runs import (
    ALL,
    CHUNK,
    FIRST,
    MODEL,
    NO_GRACE,
    SHARD,
    SMALL,
    TRASH,
    actions,
    age,
    bits,
    damage,
    later,
    make_run,
    receipt_of,
    tag_of,
)
from tests.fabricated import client_state, edit, load
from tests.job import EXPERTS, MUON, Job
from tests.rewriting import rewrite_array

CODES = {"kept": 0, "in the trash": 0, "ambiguous": 3, "failed": 6}
"""What a run says of a tag that stays → its exit code."""
Change = Callable[[Path, Path], object]
"""Something that happens to a run directory or to its archives."""


def require_kept(found: api.Compaction, action: str, reason: str) -> None:
    (tag,) = (tag for tag in found.tags if tag.tag == FIRST)
    assert (tag.action, found.exit_code) == (action, CODES[action])
    assert search(reason, tag.reason), tag.reason


# What an archive would lack -----------------------------------------------------------------------


def keep_of_its_own(held: dict[str, Any]) -> None:
    held["seed"] = torch.tensor([3.0, 4.0])


def change_the_padding(held: dict[str, Any]) -> None:
    held["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg_sq"][-1] = 1


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda tag: edit(tag / name, change)


def cut_off(tag: Path) -> None:
    os.truncate(tag / MODEL, 1000)


def add_record(tag: Path) -> None:
    with zipfile.ZipFile(tag / MODEL, "a") as held:
        root = held.namelist()[0].partition("/")[0]
        held.writestr(f"{root}/data/99", "of somebody")
    assert load(tag / MODEL)["global_steps"] > 0  # torch does not mind


def add_link_to_a_file(tag: Path) -> None:
    (tag.parent / "vocab.txt").write_text("a b c")
    (tag / "vocab.txt").symlink_to("../vocab.txt")


STAGE_3 = "zero_pp_rank_1_mp_rank_00_model_states.pt"
LACKING: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "a value of one rank": (3, edited(STAGE_3, keep_of_its_own), "differ in"),
    "padding that may be somebody's": (2, edited(SHARD, change_the_padding), SHARD),
    "a file that is cut off": (2, cut_off, MODEL),
    "a record that nothing names": (2, add_record, "data/99"),
    "a link": (2, add_link_to_a_file, "vocab.txt.*put its target there"),
}


@pytest.mark.parametrize("what", LACKING)
def test_a_tag_of_which_an_archive_would_lack_something_stays(tmp_path: Path, what: str) -> None:
    stage, change, reason = LACKING[what]
    run = make_run(tmp_path / "run", first=Job(stage=stage))
    change(run / FIRST)
    age(run / FIRST, 30)
    before = bits(run)
    require_kept(api.compact(run, tmp_path / "archive", delete=True), "ambiguous", reason)
    assert bits(run) == before


def change_the_middle(held: dict[str, Any]) -> None:
    """Change what lies between the ends, which are compared when files are opened."""
    state = held["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    state["momentum_buffer"][3500] += 8


def test_a_tag_whose_ranks_hold_other_momentum_stays(tmp_path: Path) -> None:
    """Each rank holds Muon's momentum of all of a parameter of which it has a part."""
    job = replace(MUON, groups=((("wide", (90, 80)),), (("bias", (7,)),)), muon=(0,))
    run = make_run(tmp_path / "run", first=job)
    edit(run / FIRST / SHARD, change_the_middle)
    age(run / FIRST, 30)
    before = bits(run)
    found = api.compact(run, tmp_path / "archive", delete=True)
    require_kept(found, "ambiguous", f"{SHARD} about the momentum")
    assert bits(run) == before
    (problem,) = api.verify(run / FIRST).problems
    assert f"{SHARD} about the momentum" in problem.message


def freeze_an_expert(model: dict[str, Any]) -> None:
    name = f"{EXPERTS[0][0]}_scale"
    model["frozen_param_shapes"][name] = torch.Size([2])
    model["frozen_param_fragments"][name] = torch.ones(2)


def test_a_tag_that_is_not_written_again_at_its_stage_stays(tmp_path: Path) -> None:
    job = Job(stage=2, experts=EXPERTS, expert_parallel=2, world_size=4)
    run = make_run(tmp_path / "run", first=job)
    for path in run.rglob("mp_rank*model_states.pt"):
        edit(path, freeze_an_expert)
    age(run / FIRST, 30)
    found = api.compact(run, tmp_path / "archive", delete=True)
    require_kept(found, "ambiguous", "is a frozen weight of an expert")


# What happens once a tag is archived --------------------------------------------------------------


def flip(run: Path, _: Path) -> None:
    """Change a byte, and nothing that can be seen without reading."""
    path = run / FIRST / SHARD
    stat = path.stat()
    with path.open("r+b") as stream:
        data = bytearray(stream.read())
        data[len(data) // 2] ^= 1
        stream.seek(0)
        stream.write(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def add_file(run: Path, _: Path) -> None:
    (run / FIRST / "notes.txt").write_text("learned a lot")
    age(run / FIRST, 30)


def add_link(run: Path, _: Path) -> None:
    (run / "best").symlink_to(FIRST)


def add_link_far_below(run: Path, _: Path) -> None:
    place = run / tag_of(1000) / "eval" / "best"
    place.mkdir(parents=True)
    (place / "ckpt").symlink_to(run / FIRST)
    age(run / tag_of(1000), 30)


def tell(fact: str, value: str, _: Path, archive: Path) -> None:
    """Change what the receipt tells."""
    document = receipt_of(archive, FIRST) | {fact: value}
    (archive / f"{FIRST}.receipt.json").write_text(json.dumps(document))


def copy_the_run(run: Path, _: Path) -> None:
    shutil.copytree(run, run.with_name("copy"))
    run.rename(run.with_name("old"))
    run.with_name("copy").rename(run)


def move_the_files(run: Path, _: Path) -> None:
    """Make another run directory of the very same files."""
    other = run.with_name("other directory")
    other.mkdir()
    for path in run.iterdir():
        path.rename(other / path.name)
    run.rmdir()
    other.rename(run)


def remove_the_store(_: Path, archive: Path) -> None:
    shutil.rmtree(archive / f"{FIRST}.zarr")


def shorten_the_list(_: Path, archive: Path) -> None:
    path = archive / f"{FIRST}.zarr.sha256"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def damage_a_chunk(_: Path, archive: Path) -> None:
    damage(archive / f"{FIRST}.zarr" / CHUNK)


def rewrite(_: Path, archive: Path) -> None:
    """Have another tool write an array again: `verify` finds nothing wrong with it."""
    rewrite_array(archive / f"{FIRST}.zarr", "state/exp_avg/embed.weight", chunks=(3, 2))
    assert api.verify(archive / f"{FIRST}.zarr").is_good


def rewrite_and_list(run: Path, archive: Path) -> None:
    rewrite(run, archive)
    store = archive / f"{FIRST}.zarr"
    lines = (f"{sha256(data).hexdigest()}  {store.name}/{p}\n" for p, data in bits(store).items())
    (archive / f"{store.name}.sha256").write_text("".join(lines))


def put_archive_of(run: Path, name: str, archive: Path) -> None:
    """Put the whole archive of another tag in the place of one, and a list that fits it."""
    other = archive.with_name("other archive")
    api.compact(run, other, keep_last=3 if name == FIRST else 2)
    remove_the_store(run, archive)
    (other / f"{name}.zarr").rename(archive / f"{FIRST}.zarr")
    sums = (other / f"{name}.zarr.sha256").read_text().replace(name, FIRST)
    (archive / f"{FIRST}.zarr.sha256").write_text(sums)


def put_other_values(_: Path, archive: Path) -> None:
    """Of the same training state: all but one value is that of the tag."""
    other = make_run(archive.with_name("other"), SMALL)
    edit(other / FIRST / SHARD, change_a_moment)
    age(other / FIRST, 30)
    put_archive_of(other, FIRST, archive)


def change_a_moment(held: dict[str, Any]) -> None:
    held["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][5] += 1


def put_another_state(_: Path, archive: Path) -> None:
    other = replace(SMALL, client_state={**client_state(), "order": "third"})
    put_archive_of(make_run(archive.with_name("other"), first=other), FIRST, archive)


ARCHIVED: dict[str, tuple[Change, str, str]] = {
    "other bytes of the same time": (flip, "ambiguous", "its bytes are not those"),
    "another file": (add_file, "ambiguous", "was not archived"),
    "another time": (
        lambda run, _: os.utime(run / FIRST / MODEL, (1, 1)),
        "ambiguous", "has time of change 1970-01-01 .*another save.*the archive and its receipt",
    ),
    "a link": (add_link, "kept", "symbolic link"),
    "a link far below": (add_link_far_below, "kept", "symbolic link"),
    "a copy of the run directory": (copy_the_run, "ambiguous", "has inode"),
    "another run directory": (move_the_files, "ambiguous", "is another directory"),
    "a receipt that says it is gone": (
        partial(tell, "state", "purged"), "ambiguous", "says 'purged'"
    ),
    "no store": (remove_the_store, "ambiguous", "gone"),
    "no list of checksums": (
        lambda _, archive: (archive / f"{FIRST}.zarr.sha256").unlink(), "ambiguous", "sha256"
    ),
    "a list that lacks a file": (shorten_the_list, "failed", "not listed in"),
    "a damaged chunk": (damage_a_chunk, "failed", CHUNK),
    "an array that another tool wrote and listed": (
        rewrite_and_list, "ambiguous", "rewritten by another tool"
    ),
    "an archive of another state": (put_another_state, "failed", "training state is not that of"),
    "an archive of other values": (put_other_values, "failed", "does not give back its tag"),
}  # fmt: skip


@pytest.mark.usefixtures("archived")
@pytest.mark.parametrize("what", ARCHIVED)
def test_an_archived_tag_stays(run: Path, archive: Path, what: str) -> None:
    change, action, reason = ARCHIVED[what]
    change(run, archive)
    before = bits(run)
    require_kept(api.compact(run, archive, delete=True), action, reason)
    assert bits(run) == before


@pytest.mark.usefixtures("archived")
def test_a_receipt_that_cannot_be_read_is_told(run: Path, archive: Path) -> None:
    receipt = archive / f"{FIRST}.receipt.json"
    for text in ("", "{}", "[]", '{"format": 2}', "receipt", "[" * 10_000):
        receipt.write_text(text)
        require_kept(api.compact(run, archive, delete=True), "ambiguous", str(receipt))
        assert (run / FIRST).is_dir()
        assert receipt.read_text() == text


@pytest.mark.parametrize(
    ("of_whom", "packed"), [("somebody", False), ("a receipt that is gone", True)]
)
def test_a_store_that_no_receipt_tells_of_is_left_alone(
    run: Path, archive: Path, of_whom: str, packed: bool
) -> None:
    if of_whom == "somebody":
        store = archive / f"{FIRST}.zarr{'.zip' if packed else ''}"
        api.convert(run, store, tag=FIRST)
    else:
        api.compact(run, archive, packed=packed)
        (archive / f"{FIRST}.receipt.json").unlink()
    before = bits(archive), bits(run)
    found = api.compact(run, archive, delete=True, packed=packed)
    assert (actions(found)[FIRST], found.exit_code) == ("failed", 4)
    assert "move it away" in found.problems[0].reason
    assert (bits(archive), bits(run)) == before


# What happens while a tag is in the trash ---------------------------------------------------------


def lose_newer_ones(run: Path, _: Path) -> None:
    for step in (90, 100):
        shutil.rmtree(run / tag_of(step))


TRASHED: dict[str, tuple[Change, str, str]] = {
    "a link to where it was": (add_link, "in the trash", "link"),
    "a link into the trash": (
        lambda run, _: (run / "best").symlink_to(run / TRASH / FIRST), "in the trash", "link"
    ),
    "latest_universal": (
        lambda run, _: (run / "latest_universal").write_text(FIRST), "in the trash", "latest_univ"
    ),
    "no newer ones": (lose_newer_ones, "in the trash", "newest 3"),
    "another run directory": (move_the_files, "ambiguous", "is another directory"),
    "another file": (
        lambda run, _: (run / TRASH / FIRST / "notes.txt").write_text("learned"),
        "ambiguous", "was not archived",
    ),
    "a damaged chunk": (damage_a_chunk, "failed", f"{CHUNK}: damaged"),
    "the archive of another tag": (
        lambda run, archive: put_archive_of(run, tag_of(90), archive),
        "ambiguous", "not the list of.*move its archive and receipt away",
    ),
    "the receipt of another tag": (
        partial(tell, "tag", tag_of(90)), "ambiguous", "is the receipt of"
    ),
    "a receipt that says it has no states": (
        partial(tell, "state", "weights only"), "ambiguous", "says 'weights only'"
    ),
    "a receipt of no archive": (partial(tell, "sums_sha256", ""), "ambiguous", "not the list of"),
    "a time out of range": (
        partial(tell, "trashed", "9999-12-31T23:59:59-23:59"), "ambiguous", "since when"
    ),
}  # fmt: skip


@pytest.mark.usefixtures("trashed")
@pytest.mark.parametrize("what", TRASHED)
def test_a_tag_in_the_trash_stays(run: Path, archive: Path, what: str) -> None:
    change, action, reason = TRASHED[what]
    change(run, archive)
    before = bits(run)
    require_kept(api.compact(run, archive, delete=True, now=later(30)), action, reason)
    if action != "in the trash":  # by hand, whatever the rules say
        found = api.compact(run, archive, grace=NO_GRACE, purge=[FIRST])
        require_kept(found, action, reason)
    assert bits(run) == before


# What happens once a tag is removed: its archive keeps the optimizer's states ---------------------


PURGED: dict[str, tuple[Change, str, str]] = {
    "a damaged weight": (damage_a_chunk, "failed", f"{CHUNK}: damaged"),
    "an array that another tool wrote": (rewrite, "ambiguous", "rewritten by another tool"),
    "another list of checksums": (shorten_the_list, "ambiguous", "put that back$"),
    "no time": (partial(tell, "purged", ""), "ambiguous", "since when"),
}  # fmt: skip


@pytest.mark.usefixtures("purged")
@pytest.mark.parametrize("what", PURGED)
def test_the_archive_of_a_removed_tag_keeps_its_states(run: Path, archive: Path, what: str) -> None:
    change, action, reason = PURGED[what]
    change(run, archive)
    before = bits(archive / f"{FIRST}.zarr")
    found = api.compact(run, archive, now=later(39), weights_only_older_than=timedelta(30))
    require_kept(found, action, reason)
    assert bits(archive / f"{FIRST}.zarr") == before


# What happens during a run ------------------------------------------------------------------------


def replace_the_trash(run: Path, _: Path) -> None:
    (run / TRASH).rename(run / f"{TRASH}.away")
    (run / TRASH).symlink_to(f"{TRASH}.away")


LATE: dict[str, tuple[bool, int, Change, str]] = {
    # Whether the tag is in the trash, before which look at the run directory it happens, and what.
    "a link": (False, 2, add_link, "may not be removed any more"),
    "another file": (False, 2, add_file, "changed while it was watched"),
    "another run directory": (False, 2, move_the_files, "is another directory"),
    "a newer one is torn": (
        True,
        2,
        lambda run, _: os.truncate(run / tag_of(100) / MODEL, 100),
        "model_states.pt",
    ),
    "no latest": (True, 2, lambda run, _: (run / "latest").unlink(), "no 'latest'"),
    "another trash": (True, 2, replace_the_trash, "a symbolic link, where tags are moved to"),
    "a link, while the archive is read": (True, 3, add_link, "may not be removed any more"),
}


@pytest.mark.parametrize("what", LATE)
def test_what_speaks_against_it_during_the_night_keeps_a_tag(
    run: Path,
    archive: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    what: str,
) -> None:
    """The rules are asked again after everything that takes long."""
    is_trashed, at, change, reason = LATE[what]
    if is_trashed:
        request.getfixturevalue("trashed")
    looks = 0

    def late(run_dir: Path, *given: Any) -> object:  # noqa: ANN401
        nonlocal looks
        looks += 1
        if looks == at:
            change(run, archive)
        return scan_run_directory(run_dir, *given)

    monkeypatch.setattr("streamshard.operations.compact.compact.scan_run_directory", late)
    found = api.compact(run, archive, delete=True, now=later(30) if is_trashed else None)
    (tag,) = (tag for tag in found.tags if tag.tag == FIRST)
    wanted = ("failed", 4) if what == "another trash" else ("ambiguous", 3)
    assert (tag.action, found.exit_code) == wanted
    assert search(reason, tag.reason), tag.reason
    assert looks == at
    assert (run / (TRASH if is_trashed else "") / FIRST).is_dir()
    assert {path.name for path in run.glob("global_step*")} >= ALL - {FIRST}

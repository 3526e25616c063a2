"""Archives hold all that a tag holds, in less room, and give it back as it was."""

import json
import shutil
import subprocess
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard as api
from streamshard.errors import UnsupportedError
from streamshard.io.place import Disk
from streamshard.source.source import open_source
from tests.compact.runs import (
    CHUNK,
    FIRST,
    MODEL,
    SHARD,
    actions,
    age,
    bits,
    damage,
    make_run,
    receipt_of,
    save,
    tag_of,
)
from tests.comparing import differences
from tests.fabricated import client_state, edit, load, wrapped, write
from tests.job import EXPERTS, Job, buffers

JOBS = {
    "stage 3": Job(stage=3, client_state=client_state(), garbage=False, sub_group_size=20),
    "round robin": Job(round_robin=True, alignment=True, world_size=3),
    "fp32": Job(dtype=torch.float32),
    "parts": Job(parts=2, frozen=()),
    "experts": Job(world_size=4, experts=EXPERTS, expert_parallel=2),
    "muon": Job(world_size=3, muon=(0,), tied={}),
}
FROZEN = "module/old/c/0"
CHECK = ("sha256sum", "--check", "--strict", "--quiet")


@pytest.fixture
def store(archive: Path) -> Path:
    """The archive of the tag that may go."""
    return archive / f"{FIRST}.zarr"


def test_states_that_cannot_be_cut_come_back_in_the_files_of_their_ranks(
    tmp_path: Path, archive: Path, store: Path
) -> None:
    run = make_run(tmp_path / "run", first=Job(stage=3, garbage=False, client_state=client_state()))
    files = sorted((run / FIRST).glob("*optim_states.pt"))
    for rank, path in enumerate(files):
        edit(path, partial(with_a_list, rank=rank))
    age(run / FIRST, 30)
    saved = {path.name: path.read_bytes() for path in files}
    found = api.compact(run, archive)
    assert [tag.action for tag in found.tags] == ["archived", "kept", "kept", "kept"]
    api.repartition(store, tmp_path / "out")
    written = (tmp_path / "out" / FIRST).glob("*optim_states.pt")
    assert {path.name: path.read_bytes() for path in written} == saved
    assert api.verify(tmp_path / "out", against=store).is_good
    with pytest.raises(UnsupportedError, match="'Q' of group 0 is of type list"):
        api.repartition(store, tmp_path / "other", world_size=3)


def with_a_list(content: dict[str, Any], rank: int) -> None:
    """Have a state that no reader can cut, of another length on each rank."""
    wrapped(content["optimizer_state_dict"])["state"][0]["Q"] = [torch.ones(3 + rank), None]


@pytest.mark.parametrize("name", JOBS)
def test_at_the_original_stage_and_world_size_everything_comes_back(
    name: str, tmp_path: Path, archive: Path, store: Path
) -> None:
    run = make_run(tmp_path / "run", first=JOBS[name])
    (run / FIRST / "tokenizer.json").write_bytes(bytes(range(256)))
    (run / FIRST / "tokenizer.json").chmod(0o640)
    age(run / FIRST, 30)
    before = bits(run)
    found = api.compact(run, archive)
    assert [tag.action for tag in found.tags] == ["archived", "kept", "kept", "kept"]
    api.repartition(store, tmp_path / "out")
    assert bits(run) == before
    restored = {path for path in bits(tmp_path / "out") if path != "latest"}
    assert restored == {"zero_to_fp32.py", *(p for p in before if p.startswith(f"{FIRST}/"))}
    assert (tmp_path / "out" / "latest").read_text() == FIRST
    for path in restored:
        one, other = tmp_path / "out" / path, run / path
        if path.endswith(".pt"):
            assert differences(load(one), load(other), path) == []
        else:
            assert one.read_bytes() == other.read_bytes()
            assert one.stat().st_mode == other.stat().st_mode


def test_for_other_ranks_it_gives_the_bytes_that_the_checkpoint_gives(
    tmp_path: Path, archive: Path, store: Path
) -> None:
    run = make_run(tmp_path / "run", first=Job(client_state=client_state()))
    api.compact(run, archive)
    outs = [tmp_path / road for road in ("direct", "archived")]
    for source, out in zip((run, store), outs, strict=True):
        api.repartition(source, out, tag=FIRST, world_size=4, zero_stage=3)
    assert bits(outs[0]) == bits(outs[1])


def stored_weights(store: Path) -> set[str]:
    """List what an archive keeps of the module."""
    return {path.name for path in (store / "module").iterdir() if path.is_dir()}


def test_weights_that_are_casts_are_left_out_and_others_are_not(
    archive: Path, store: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", first=Job())

    def flip(held: dict[str, Any]) -> None:
        held["module"]["block.0.mlp"].view(-1).view(torch.int16)[5] ^= 1

    edit(run / FIRST / MODEL, flip)
    age(run / FIRST, 30)
    api.compact(run, archive)
    assert stored_weights(store) == {*buffers(), "old.weight", "old.bias", "block.0.mlp"}
    derived = {f"module/{name}" for name in {*Job().shapes} - {"block.0.mlp"}}
    assert {*receipt_of(archive, FIRST)["derived"]} == derived
    api.repartition(store, tmp_path / "out")
    found, wanted = (load(root / FIRST / MODEL)["module"] for root in (tmp_path / "out", run))
    assert differences(found, wanted) == []


def test_a_nan_of_other_bits_than_a_casts_is_kept(run: Path, archive: Path, store: Path) -> None:
    def make_nan(held: dict[str, Any]) -> None:
        held["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[0] = torch.nan

    def make_another(held: dict[str, Any]) -> None:
        held["module"]["embed.weight"].view(-1).view(torch.int16)[0] = 0x7FC1

    edit(run / FIRST / SHARD.replace("rank_1", "rank_0"), make_nan)
    edit(run / FIRST / MODEL, make_another)
    age(run / FIRST, 30)
    api.compact(run, archive)
    assert "embed.weight" in stored_weights(store)


@pytest.mark.usefixtures("archived")
def test_sha256sum_checks_it_without_us(run: Path, archive: Path, store: Path) -> None:
    sums = f"{FIRST}.zarr.sha256"
    assert subprocess.run([*CHECK, sums], cwd=archive).returncode == 0
    listed = {line.split("  ")[1] for line in (archive / sums).read_text().splitlines()}
    assert listed == {f"{FIRST}.zarr/{path}" for path in bits(store)}
    damage(store / CHUNK)
    assert subprocess.run([*CHECK, sums], cwd=archive, capture_output=True).returncode == 1


def test_sha256sum_understands_a_name_that_it_has_to_escape(run: Path, archive: Path) -> None:
    name = "a\\b 80"
    (run / FIRST).rename(run / name)
    assert actions(api.compact(run, archive, delete=True))[name] == "trashed"
    assert subprocess.run([*CHECK, f"{name}.zarr.sha256"], cwd=archive).returncode == 0


def test_the_receipt_tells_the_source(run: Path, archive: Path) -> None:
    api.compact(run, archive)
    receipt = receipt_of(archive, FIRST)
    told = {record["path"]: record for record in receipt["source"]}
    paths = [*run.glob(f"{FIRST}/*"), run / "zero_to_fp32.py"]
    assert told.keys() == {path.relative_to(run).as_posix() for path in paths}
    for path in paths:
        record, stat = told[path.relative_to(run).as_posix()], path.stat()
        assert (record["inode"], record["device"]) == (stat.st_ino, stat.st_dev)
        assert (record["nbytes"], record["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)
        assert record["sha256"] == sha256(path.read_bytes()).hexdigest()
    assert all(check["holds"] for check in receipt["checks"])


def test_files_that_an_earlier_archive_holds_are_stored_once(tmp_path: Path, archive: Path) -> None:
    run = make_run(tmp_path / "run", steps=(1, 2, 3, 4, 5))
    found = api.compact(run, archive)
    assert [bool(tag.shared_bytes) for tag in found.tags] == [False, True, False, False, False]
    first, second = (archive / f"{tag_of(step)}.zarr" for step in (1, 2))
    assert (first / FROZEN).samefile(second / FROZEN)
    assert not (first / CHUNK).samefile(second / CHUNK)
    stored = {(first / path).stat().st_ino for path in bits(first)}
    mine = [(second / path).stat() for path in bits(second)]
    again = sum(stat.st_size for stat in mine if stat.st_ino not in stored)
    assert found.tags[1].shared_bytes == found.tags[1].archive_bytes - again
    assert not [path for path in bits(second) if "streamshard" in path]
    shutil.rmtree(first)  # each is whole by itself
    assert api.verify(second, against=run / tag_of(2)).is_good


def test_without_links_everything_is_stored(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(known: Path, path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Disk, "make_link", staticmethod(refuse))
    run = make_run(tmp_path / "run", steps=(1, 2, 3, 4, 5))
    found = api.compact(run, archive, delete=True)
    assert [tag.action for tag in found.tags[:2]] == ["trashed", "trashed"]
    assert found.tags[1].shared_bytes == 0
    assert {path.stat().st_nlink for path in archive.rglob("*") if path.is_file()} == {1}


def test_a_damaged_file_of_an_earlier_archive_is_not_taken(tmp_path: Path, archive: Path) -> None:
    run = make_run(tmp_path / "run", steps=(1, 2, 3, 4))
    api.compact(run, archive)
    first, second = (archive / f"{tag_of(step)}.zarr" for step in (1, 2))
    good = (first / FROZEN).read_bytes()
    damage(first / FROZEN)
    save(run, 5)
    assert actions(api.compact(run, archive))[tag_of(2)] == "archived"
    assert (second / FROZEN).read_bytes() == good
    assert not (first / FROZEN).samefile(second / FROZEN)


@pytest.mark.usefixtures("archived")
def test_it_is_archived_once_and_archiving_again_changes_nothing(run: Path, archive: Path) -> None:
    before = bits(archive)
    assert actions(api.compact(run, archive))[FIRST] == "archived before"
    assert bits(archive) == before


def test_a_log_that_grows_beside_the_tags_is_left_out(
    run: Path, archive: Path, store: Path
) -> None:
    (run / "train.log").write_text("step 1")
    (run / "config.json").write_text("{}")
    age(run / "config.json", 9)
    api.compact(run, archive)
    held = {file.path for file in open_source(store).checkpoint.files}
    assert held == {"zero_to_fp32.py", "config.json"}
    assert receipt_of(archive, FIRST)["left_out"] == ["train.log"]
    (run / "train.log").write_text("step 2")
    assert actions(api.compact(run, archive, delete=True))[FIRST] == "trashed"


# An archive of November 2026 that must be readable for ever. It was made of `OF_2026` by `compact`;
# then only the run directory's path in its receipt was replaced.
GOLDEN = Path(__file__).parent / "golden"
OF_2026 = Job(groups=((("embed.weight", (11, 4)),),), frozen=(("old", (3,)),))


def test_an_archive_of_2026_gives_back_what_was_saved(tmp_path: Path) -> None:
    """Also where a tool laid its documents out anew: no array counts as rewritten.

    They have Blosc's settings of that time.
    """
    store, saved, out = tmp_path / f"{FIRST}.zarr", tmp_path / "saved", tmp_path / "out"
    shutil.copytree(GOLDEN / store.name, store)
    for document in store.rglob("zarr.json"):
        document.write_text(json.dumps(json.loads(document.read_text()), indent=4))
    found = api.verify(store)
    assert (found.problems, found.tag) == ((), FIRST)
    assert not any("with other chunks" in note for note in found.notes)
    api.repartition(store, out)
    write(OF_2026, saved, FIRST)
    assert bits(saved / FIRST).keys() == bits(out / FIRST).keys()
    for name in bits(saved / FIRST):
        assert differences(load(out / FIRST / name), load(saved / FIRST / name), name) == []

"""What keeps a tag from being removed, also when it comes late."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import streamshard as api
from streamshard.operations.choosing import Run
from streamshard.operations.run_directory import look_at
from tests.compact.runs import ALL, FIRST, actions, age, make_run, tag_of, tags_in
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


def name_universal(run: Path) -> None:
    (run / "latest_universal").write_text(FIRST)


def touch(run: Path) -> None:
    os.utime(run / FIRST / "mp_rank_00_model_states.pt")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "bits": (flip, "ambiguous"),
    "a file": (add_file, "ambiguous"),
    "a link": (add_link, "kept"),
    "a link in a tag": (add_inner_link, "kept"),
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

    def late(run_dir: Path, *before: Run) -> object:
        nonlocal times
        times += 1
        if times == 2:
            CHANGES[what][0](run)
        return look_at(run_dir, *before)

    monkeypatch.setattr("streamshard.operations.compacting.look_at", late)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, "may not go any more" in found.tags[0].reason) == (
        "ambiguous", True
    )  # fmt: skip
    assert times == 2
    assert (run / FIRST).is_dir()


def test_what_ranks_keep_of_their_own_is_not_given_up(tmp_path: Path, archive: Path) -> None:
    run = make_run(tmp_path / "run", Job(stage=3))
    path = run / FIRST / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    save_file({**load(path), "seed": 5}, path)
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, "differ in" in found.tags[0].reason) == ("ambiguous", True)
    assert tags_in(run) == ALL
    assert (archive / f"{FIRST}.zarr").is_dir()


def test_links_in_a_tag_are_not_given_up(run: Path, archive: Path) -> None:
    (run / "vocab.txt").write_text("a b c")
    (run / FIRST / "vocab.txt").symlink_to("../vocab.txt")
    age(run / FIRST, 30)
    found = api.compact(run, archive, delete=True)
    assert (found.tags[0].action, "vocab.txt" in found.tags[0].reason) == ("ambiguous", True)
    assert tags_in(run) == ALL

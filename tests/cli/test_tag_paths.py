"""Tags that are paths, as `save_checkpoint(dir, tag="epoch/1")` makes them, in every verb."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import streamshard as api
from tests.compact.runs import NO_GRACE, actions, age, bits, later, receipt_of
from tests.fabricated import client_state, write
from tests.forked import Finished
from tests.job import Job

Streamshard = Callable[..., Finished]

JOB = Job(stage=2, client_state=client_state())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two such tags, and files of its own beside them."""
    (tmp_path / "run").mkdir()
    write(JOB, tmp_path / "run", "epoch/1")
    write(Job(stage=2, changed=("fp32", "embed.weight", 3)), tmp_path / "run", "epoch/2")
    (tmp_path / "run/config.json").write_text("{}")
    return tmp_path / "run"


def test_every_verb_takes_it(run: Path, tmp_path: Path, in_process: Streamshard) -> None:
    flat = tmp_path / "flat"
    shutil.copytree(run / "epoch/1", flat / "one")
    for name in ("zero_to_fp32.py", "config.json"):
        shutil.copy(run / name, flat)
    (flat / "latest").write_text("one")
    out, store, plan = tmp_path / "out", tmp_path / "x.zarr", tmp_path / "plan.json"
    tag = ("--tag", "epoch/1")
    for command in (
        ("inspect", run),
        ("inspect", run, "--pickles"),
        ("verify", run),
        ("repartition", run, out, *tag, "--world-size", 3),
        ("repartition", flat, tmp_path / "wanted", "--world-size", 3),
        ("verify", out, "--against", run / "epoch/1"),
        ("convert", run, store, *tag),
        ("verify", store, "--against", run / "epoch/1"),
        ("repartition", store, tmp_path / "back", "--world-size", 3),
        ("export", run, tmp_path / "hf", *tag),
        ("export", run, tmp_path / "universal", *tag, "--format", "universal"),
        ("repartition", run, tmp_path / "planned", *tag, "--world-size", 3, "--dry-run",
         "--plan-out", plan),
        ("apply", plan),
        ("diff", run, store, *tag),
        ("repartition", run, out, *tag, "--world-size", 3, "--overwrite"),
        ("export", run, tmp_path / "universal", *tag, "--format", "universal", "--overwrite"),
    ):  # fmt: skip
        done = in_process(*command)
        assert done.code == 0, (command, done.err)
    wanted = bits(tmp_path / "wanted")
    assert wanted.pop("latest") == b"one"
    for place in (out, tmp_path / "back", tmp_path / "planned"):
        found = bits(place)
        assert found.pop("latest") == b"epoch/1"
        assert found == {name.replace("one/", "epoch/1/"): data for name, data in wanted.items()}
    assert (tmp_path / "universal/latest_universal").read_text() == "epoch/1"
    assert (tmp_path / "universal/epoch/1/zero").is_dir()


def test_a_tag_directory_knows_its_run_directory(run: Path, tmp_path: Path) -> None:
    api.repartition(run / "epoch/1", tmp_path / "out", world_size=3)
    assert (tmp_path / "out/latest").read_text() == "epoch/1"
    assert (tmp_path / "out/config.json").exists()
    # Put away by hand, it is one by itself.
    shutil.copytree(run / "epoch/1", run / "old/epoch/1")
    assert api.inspect(run / "old/epoch/1").tag == "1"
    (run / "latest").write_text("global_step7")
    assert api.inspect(run / "epoch/1").tag == "1"


@pytest.mark.parametrize(
    "tag",
    ["../run/epoch/1", "/epoch/1", "epoch/../epoch/1", "epoch//1", "epoch/1/", "epoch/away/1",
     ".streamshard.trash/1", "latest/1"],
)  # fmt: skip
def test_what_leads_out_is_refused(
    run: Path, tmp_path: Path, tag: str, in_process: Streamshard
) -> None:
    shutil.copytree(run / "epoch", tmp_path / "elsewhere")
    (run / "epoch/away").symlink_to(tmp_path / "elsewhere")
    shutil.copytree(run / "epoch/1", run / ".streamshard.trash/1")
    given = in_process("inspect", run, "--tag", tag)
    (run / "latest").unlink()
    (run / "latest").write_text(tag)
    named = in_process("inspect", run)
    assert (given.code, named.code) == (3, 3), given.out + named.out
    assert str(run) in given.err
    assert str(run) in named.err
    compacted = in_process("compact", run, tmp_path / "archive", "--delete", "--min-age", "0s")
    assert compacted.code == 3


def test_the_message_names_the_tags_there_are(run: Path, in_process: Streamshard) -> None:
    (run / "latest").write_text("epoch/9")
    done = in_process("inspect", run)
    assert done.code == 3
    assert "which is not there. Give one of the 2 checkpoints in it" in done.err
    for tag in ("epoch/1", "epoch/2"):
        assert tag in done.err
        assert in_process("inspect", run / tag).code == 0


def test_a_target_with_more_in_it_is_not_replaced(
    run: Path, tmp_path: Path, in_process: Streamshard
) -> None:
    out = tmp_path / "out"
    api.repartition(run, out, world_size=3)
    (out / "epoch/notes.txt").write_text("mine")
    assert in_process("repartition", run, out, "--world-size", 3, "--overwrite").code == 4
    assert (out / "epoch/notes.txt").read_text() == "mine"


def make_epochs(run: Path) -> Path:
    for epoch in (1, 2, 3, 9, 10):
        write(Job(changed=("fp32", "embed.weight", epoch)), run, f"epoch/{epoch}")
    write(Job(), run, "epoch%2F1")
    write(Job(), run, "other_epoch/1")
    write(Job(), run, "global_step1")
    (run / "latest").write_text("epoch/10")
    age(run, 30)
    return run


def test_compact_archives_and_removes_them(tmp_path: Path) -> None:
    run, archive = make_epochs(tmp_path / "run"), tmp_path / "archive"
    before = {f"epoch/{n}": bits(run / f"epoch/{n}") for n in (1, 2, 3, 9, 10)}
    found = actions(api.compact(run, archive, delete=True))
    kept = ("epoch/3", "epoch/9", "epoch/10", "epoch%2F1", "other_epoch/1", "global_step1")
    assert found == {**dict.fromkeys(kept, "kept"), "epoch/1": "deleted", "epoch/2": "deleted"}
    assert sorted(path.name for path in (run / "epoch").iterdir()) == ["10", "3", "9"]
    assert receipt_of(archive, "epoch%2F1")["tag"] == "epoch/1"
    api.compact(run, archive, undelete=["epoch/1"])
    assert bits(run / "epoch/1") == before["epoch/1"]
    api.compact(run, archive, delete=True)
    found = actions(api.compact(run, archive, delete=True, grace=NO_GRACE, now=later(1)))
    assert {found["epoch/1"], found["epoch/2"]} == {"purged"}
    assert not [*(run / ".streamshard.trash").rglob("*.pt")]
    assert {p.name for p in archive.glob("*.zarr")} == {"epoch%2F1.zarr", "epoch%2F2.zarr"}
    api.repartition(archive / "epoch%2F1.zarr", tmp_path / "o", world_size=2)
    assert (tmp_path / "o/latest").read_text() == "epoch/1"


def test_steps_of_several_directories_are_not_compared(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for tag in ("1/5", "1/9", "2/1", "2/2", "2/3"):
        write(Job(), run, tag)
    shutil.copytree(run, run / "another_run/of_somebody")
    age(run, 30)
    done = api.compact(run, tmp_path / "archive", keep_last=2, dry_run=True)
    found = {tag.tag: (tag.action, tag.reason) for tag in done.tags}
    why = "lies in another directory than 2/3, so their steps are not compared"
    assert found["1/5"] == found["1/9"] == ("kept", why)
    assert (found["2/1"][0], found["2/2"][0], len(found)) == ("archived", "kept", 5)

"""Names and links in a checkpoint: they lead nowhere but into it; tags may be paths."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from tests.cli.conftest import in_process, passed, refused
from tests.cli.hostile import MODEL, OPTIMIZER, elsewhere, optimizer_files
from tests.compact.runs import NO_GRACE, actions, age, bits, later, receipt_of
from tests.fabricated import client_state, edit, write, write_dumps
from tests.forked import Finished
from tests.job import EXPERTS, TAG, Job


@pytest.mark.parametrize(
    "tag",
    [
        "..", ".", "/etc", "../run", f"{TAG}/..", f"{TAG}\nmore", f"{TAG}\0", "a" * 5000,
        "\x1b[2J", "\udcff", f"./{TAG}/..", f"./../{TAG}",
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("how", ["latest", "--tag"])
def test_tags_that_are_no_tags(tag: str, how: str, run: Path) -> None:
    if how == "latest":
        (run / "latest").write_bytes(tag.encode(errors="surrogateescape"))
    done = in_process("inspect", run, *([] if how == "latest" else [f"--tag={tag}"]))
    assert done.code == 3, done.err
    # The tag that is there is listed, where none was asked for.
    assert (f"\n{TAG} " in done.out) == (how == "latest"), done.out
    assert "\x1b" not in done.out + done.err
    assert len(done.err.strip().splitlines()) == 1
    assert how != "latest" or len(done.err) < 500
    assert len(done.out) < 3000


def test_a_name_that_gives_orders_to_a_terminal_or_a_log_is_no_tag_s(run: Path) -> None:
    evil = "global_step9\nrun: all is well\x1b[2J"
    shutil.copytree(run / TAG, run / evil)
    shutil.copytree(run, run.parent / "runs" / "a\nb")
    shown = r"global_step9\nrun: all is well\x1b[2J: its name has characters that cannot be shown"
    done = in_process("newest", run)
    assert (done.code, done.out) == (0, f"{run / TAG}\n")
    assert shown in done.err
    (run / "latest").unlink()
    done = in_process("inspect", run)
    assert (done.code, shown in done.out) == (3, True)
    done = in_process("inspect", run.parent / "runs")
    assert r"a\nb: its name has" in done.out
    assert "None of them is whole" in done.out


@pytest.mark.parametrize(
    "name", ["a\nb", "\x1b[2J", "\udcff", "logs/\udcff", "logs/a\nb/c"], ids=repr
)
def test_files_next_to_a_tag_have_names_that_are_text(name: str, run: Path) -> None:
    (run / "trainer_state.json").write_text("{}")  # so that files in subdirectories belong to it
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text("")
    out = run.parent / "out"
    done = in_process("repartition", run, out, "--world-size", "2")
    assert (done.code, out.exists()) == (3, False)
    assert f"file {name!r} has a name that is not text; rename or move it" in done.err


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "latest"])
def test_links_that_lead_out_are_refused(name: str, run: Path) -> None:
    if name == "latest":
        (run / name).write_text("root:x:0:0")
    place = elsewhere(run / name)
    done = in_process("inspect", run)
    assert done.code == 3, done.err
    assert "root:x" not in done.out + done.err
    assert f"{run / name}: a symbolic link that leads out of {run}, to {place}" in done.err
    assert "cp -rL" in done.err


def test_a_tag_that_leads_out_is_refused_unless_it_is_what_the_user_gave(run: Path) -> None:
    place = run.parent / "elsewhere"
    (run / TAG).rename(place)
    (run / TAG).symlink_to(place)
    refused(3, "leads out", "inspect", run)
    assert in_process("inspect", run / TAG).code == 0


def test_links_inside_and_links_to_the_whole_are_followed(run: Path) -> None:
    link = run.parent / "link"
    link.symlink_to(run)
    assert in_process("inspect", link).code == 0
    (run / OPTIMIZER).rename(run / TAG / "kept.pt")
    (run / OPTIMIZER).symlink_to("kept.pt")
    assert in_process("inspect", link).code == 0
    assert in_process("inspect", run / TAG).code == 0


def test_a_tag_and_latest_may_be_links_within_the_run(run: Path) -> None:
    (run / TAG).rename(run / "first")
    (run / TAG).symlink_to("first")
    (run / "latest").rename(run / "newest")
    (run / "latest").symlink_to("newest")
    passed("repartition", run, run.parent / "out", "--world-size", 3)
    assert (run.parent / "out" / TAG).is_dir()


def test_files_of_experts_and_dumps_may_not_lead_out(tmp_path: Path) -> None:
    run = write(Job(world_size=4, experts=EXPERTS, expert_parallel=2), tmp_path / "run")
    (expert, *_) = sorted((run / TAG).glob("layer_*_expert_*_model_states.pt"))
    elsewhere(expert)
    refused(3, f"{expert}: a symbolic link that leads out", "inspect", run)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    (dumps / "0.pt").symlink_to(run / OPTIMIZER)
    refused(3, f"{dumps / '0.pt'}: a symbolic link that", "inspect", dumps / "{rank}.pt")


def test_a_ring_of_links(run: Path) -> None:
    (run / OPTIMIZER).unlink()
    (run / OPTIMIZER).symlink_to(run / OPTIMIZER)
    assert in_process("inspect", run).code == 3


def test_files_of_another_kind_are_looked_at_without_waiting_for_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "optimizer.0.pt")
    assert in_process("inspect", tmp_path).code == 3
    assert in_process("inspect", tmp_path / "optimizer.0.pt").code == 3


def _exported(run: Path, place: Path, format: str, **options: Any) -> Path:  # noqa: ANN401
    """Export it, with a config next to its files."""
    api.export(run, place, format=format, **options)
    (place / "config.json").write_text("{}")
    return place


def _with_another(run: Path, place: Path) -> Path:
    """Take a run, and put a DCP checkpoint next to its tags."""
    _exported(run, place, "dcp").rename(run / "other")
    return run.rename(place)


def _stored(run: Path, place: Path) -> Path:
    api.convert(run, place.with_suffix(".zarr"))
    return place.with_suffix(".zarr")


SOURCES: dict[str, Callable[[Path, Path], Path]] = {
    "a run": _with_another,
    "dumps": write_dumps,
    "a store": _stored,
    "DCP": lambda run, place: _exported(run, place, "dcp"),
    "universal": lambda run, place: _exported(run, place, "universal"),
    "safetensors": lambda run, place: _exported(run, place, "safetensors", max_shard_size=999),
    "torch": lambda run, place: _exported(run, place, "torch", max_shard_size=999),
}
COMMANDS = (
    "inspect SRC", "verify SRC", "newest SRC", "diff SRC SRC", "export SRC OUT",
    "export SRC OUT --format dcp", "repartition SRC OUT --world-size 3",
    "convert SRC OUT", "compact SRC OUT --min-age 0s",
)  # fmt: skip


def in_time(pipe: Path, *words: object) -> Finished:
    """Run a command; if it waits for someone who writes to a pipe, let it go, and fail."""
    done, waited = threading.Event(), list[object]()

    def watch() -> None:
        while not done.wait(0.05 if waited else 30):
            waited.append(words)
            os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        finished = in_process(*words)
    finally:
        done.set()
        watching.join()
    assert not waited
    return finished


@pytest.mark.parametrize("kind", SOURCES)
def test_no_verb_waits_for_a_pipe_in_the_place_of_a_file(
    run: Path, tmp_path: Path, kind: str
) -> None:
    (run / "config.json").write_text("{}")
    source = SOURCES[kind](run, tmp_path / "source")
    root = source.parent if kind == "dumps" else source
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    of_each_kind = {(len(path.parts), re.sub(r"\d", "", path.name)): path for path in paths}
    for file, path in enumerate(of_each_kind.values()):
        kept = path.rename(tmp_path / "kept")
        os.mkfifo(path)
        for number, command in enumerate(COMMANDS):
            if (file + number) % 3:
                continue  # this verb reads it in place of another file of the same source
            places = {"SRC": source, "OUT": tmp_path / f"out-{file}-{number}"}
            done = in_time(path, *(places.get(word, word) for word in command.split()))
            assert done.code in (0, 3, 6), (path, command, done.err)
        path.unlink()
        kept.rename(path)


@pytest.mark.parametrize("option", ["--ds-config", "--facts"])
def test_a_pipe_is_no_file_of_an_option_s(run: Path, tmp_path: Path, option: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = in_time(pipe, "repartition", run, tmp_path / "out", "--world-size", 3, option, pipe)
    assert done.code == 2
    assert f"{pipe}: cannot be read (it is a pipe (FIFO); put a regular file there)" in done.err


def test_names_in_files_give_no_orders_to_the_terminal(run: Path) -> None:
    evil = "\x1b]0;owned\x07\u202e"
    edit(run / MODEL, lambda c: c.update(ds_version=evil))
    for path in optimizer_files(run):
        edit(path, lambda c: c.update(ds_version=evil))
    done = passed("inspect", run, "-v")
    assert r"\x1b]0;owned\x07\u202e" in done.out
    assert not set(evil) & set("\x1b\x07\u202e") & set(done.out)


# Symbolic links beside the tags -------------------------------------------------------------------


def test_a_link_within_the_run_directory_is_carried_as_a_file(run: Path, tmp_path: Path) -> None:
    (run / "old").mkdir()
    (run / "old" / "tokenizer.json").write_text("kept")
    (run / "tokenizer.json").symlink_to("old/tokenizer.json")
    for source in (run, run / TAG):
        out = tmp_path / f"out-{source.name}"
        done = passed("repartition", source, out, "--world-size", 3, "--verify", "--json")
        assert (out / "tokenizer.json").read_text() == "kept"
        assert not (out / "tokenizer.json").is_symlink()
        assert "ymbolic" not in " ".join(json.loads(done.out)["notes"])
    assert api.verify(run).is_good


def test_links_that_are_not_carried_are_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("hidden words")
    (run / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    (run / "gone.json").symlink_to("nowhere")
    (run / "ring.json").symlink_to("ring.json")
    (run / "best.pt").symlink_to(OPTIMIZER)
    (run / "data").symlink_to(tmp_path)
    (run / "newest").symlink_to(TAG)  # another name of what is carried anyway
    for number, verb in enumerate((("inspect",), ("verify",), ("convert",), ("repartition",))):
        target = [tmp_path / f"{number}.zarr"] if number > 1 else []
        more = ["--world-size", 3] if number == 3 else []
        done = passed(*verb, run, *target, *more, "--json")
        (note,) = [note for note in json.loads(done.out)["notes"] if "not carried" in note]
        for name in ("tokenizer.json", "gone.json", "ring.json", "best.pt", "data"):
            assert f"{name} to " in note
        assert "newest" not in note
    names = {path.name for path in (tmp_path / "3.zarr").iterdir()}
    assert names == {TAG, "latest", "zero_to_fp32.py"}
    assert b"hidden words" not in b"".join(
        path.read_bytes() for path in (tmp_path / "2.zarr").rglob("*") if path.is_file()
    )


# Tags that are paths, as `save_checkpoint(dir, tag="epoch/1")` makes them -------------------------

JOB = Job(stage=2, client_state=client_state())


@pytest.fixture
def epochs(tmp_path: Path) -> Path:
    """A run directory with two such tags, and files of its own beside them."""
    (tmp_path / "run").mkdir()
    write(JOB, tmp_path / "run", "epoch/1")
    write(Job(stage=2, changed=("fp32", "embed.weight", 3)), tmp_path / "run", "epoch/2")
    (tmp_path / "run/config.json").write_text("{}")
    return tmp_path / "run"


def test_every_verb_takes_it(epochs: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    shutil.copytree(epochs / "epoch/1", flat / "one")
    for name in ("zero_to_fp32.py", "config.json"):
        shutil.copy(epochs / name, flat)
    (flat / "latest").write_text("one")
    out, store = tmp_path / "out", tmp_path / "x.zarr"
    tag = ("--tag", "epoch/1")
    for command in (
        ("inspect", epochs),
        ("verify", epochs),
        ("repartition", epochs, out, *tag, "--world-size", 3),
        ("repartition", flat, tmp_path / "wanted", "--world-size", 3),
        ("verify", out, "--against", epochs / "epoch/1"),
        ("convert", epochs, store, *tag),
        ("verify", store, "--against", epochs / "epoch/1"),
        ("repartition", store, tmp_path / "back", "--world-size", 3),
        ("export", epochs, tmp_path / "hf", *tag),
        ("export", epochs, tmp_path / "universal", *tag, "--format", "universal"),
        ("repartition", epochs, tmp_path / "planned", *tag, "--world-size", 3),
        ("diff", epochs, store, *tag),
        ("repartition", epochs, out, *tag, "--world-size", 3, "--overwrite"),
        ("export", epochs, tmp_path / "universal", *tag, "--format", "universal", "--overwrite"),
    ):  # fmt: skip
        passed(*command)
    wanted = bits(tmp_path / "wanted")
    assert wanted.pop("latest") == b"one"
    for place in (out, tmp_path / "back", tmp_path / "planned"):
        found = bits(place)
        assert found.pop("latest") == b"epoch/1"
        assert found == {name.replace("one/", "epoch/1/"): data for name, data in wanted.items()}
    assert (tmp_path / "universal/latest_universal").read_text() == "epoch/1"
    assert (tmp_path / "universal/epoch/1/zero").is_dir()


def test_a_tag_directory_knows_its_run_directory(epochs: Path, tmp_path: Path) -> None:
    api.repartition(epochs / "epoch/1", tmp_path / "out", world_size=3)
    assert (tmp_path / "out/latest").read_text() == "epoch/1"
    assert (tmp_path / "out/config.json").exists()
    # Put away by hand, it is one by itself.
    shutil.copytree(epochs / "epoch/1", epochs / "old/epoch/1")
    assert api.inspect(epochs / "old/epoch/1").tag == "1"
    (epochs / "latest").write_text("global_step7")
    assert api.inspect(epochs / "epoch/1").tag == "1"


@pytest.mark.parametrize(
    "tag",
    ["../run/epoch/1", "/epoch/1", "//epoch/1", "epoch/../epoch/1", "epoch/away/1",
     ".streamshard.trash/1", "./.streamshard.trash/1", "latest/1"],
)  # fmt: skip
def test_what_leads_out_is_refused(epochs: Path, tmp_path: Path, tag: str) -> None:
    shutil.copytree(epochs / "epoch", tmp_path / "elsewhere")
    (epochs / "epoch/away").symlink_to(tmp_path / "elsewhere")
    shutil.copytree(epochs / "epoch/1", epochs / ".streamshard.trash/1")
    given = in_process("inspect", epochs, "--tag", tag)
    (epochs / "latest").unlink()
    (epochs / "latest").write_text(tag)
    named = in_process("inspect", epochs)
    assert (given.code, named.code) == (3, 3), given.out + named.out
    assert str(epochs) in given.err
    assert str(epochs) in named.err
    compacted = in_process("compact", epochs, tmp_path / "archive", "--delete", "--min-age", "0s")
    assert compacted.code == 3


@pytest.mark.parametrize("tag", ["./epoch/1", "epoch//1", "epoch/1/"])
def test_a_tag_is_the_path_that_a_job_would_open(epochs: Path, tmp_path: Path, tag: str) -> None:
    (epochs / "latest").write_text(tag)
    for words in ([], ["--tag", tag]):
        found = json.loads(passed("inspect", epochs, *words, "--json").out)
        assert found["tag"] == "epoch/1"
    how = ("--delete", "--min-age", "0s", "--json")
    told = json.loads(in_process("compact", epochs, tmp_path / "archive", *how).out)
    kept = {one["tag"]: one["reason"] for one in told["tags"] if one["action"] == "kept"}
    assert kept["epoch/1"] == "'latest' names it"


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
    assert found == {**dict.fromkeys(kept, "kept"), "epoch/1": "trashed", "epoch/2": "trashed"}
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


@pytest.mark.parametrize("place", [".", ".."])
def test_the_source_is_where_the_command_runs(
    place: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have no directory in their paths, or lead upwards."""
    monkeypatch.chdir(run if place == "." else run / TAG)
    api.repartition(place, tmp_path / "out", world_size=3)
    api.repartition(run, tmp_path / "wanted", world_size=3)
    for path in (tmp_path / "wanted" / TAG).iterdir():
        assert (tmp_path / "out" / TAG / path.name).read_bytes() == path.read_bytes()

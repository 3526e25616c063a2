"""`inspect --pickles`: what a checkpoint would import, told before anyone loads it."""

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard as library
from streamshard.cli import main
from tests.cli.conftest import flip, in_process, passed, streamshard, tree
from tests.cli.hostile import MIB, MODEL, OPTIMIZER, Payload, elsewhere, with_pickle
from tests.fabricated import client_state, edit, load, write, write_dumps
from tests.job import TAG, Job

SYSTEM = f"{os.system.__module__}.system"
KEEPSAKE = "training_script_of_somebody.Keepsake"
LIBRARIES = {
    "collections.OrderedDict",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "torch.BFloat16Storage",
    "torch.BoolStorage",
    "torch.FloatStorage",
    "torch.LongStorage",
    "torch.Size",
    "torch._utils._rebuild_tensor_v2",
}
"""What a checkpoint of stage 2 names without any client state."""


def listed(source: object, *options: object, code: int = 0) -> dict[str, Any]:
    """Run the verb, and return what it prints."""
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        found = main.main(["inspect", str(source), "--pickles", "--json", *map(str, options)])
    document: dict[str, Any] = json.loads(stdout.getvalue())
    dangers = [one["name"] for one in document["names"] if one["is_dangerous"]]
    assert found == (6 if dangers else code), stderr.getvalue()
    assert bool(dangers) == ("runs what the file says" in stderr.getvalue())
    return document


def unknown(report: dict[str, Any]) -> set[str]:
    return {one["name"] for one in report["names"] if not one["is_known"]}


def known(report: dict[str, Any]) -> set[str]:
    return {one["name"] for one in report["names"] if one["is_known"]}


def problems(report: dict[str, Any]) -> dict[str, str]:
    return {one["path"]: one["problem"] for one in report["files"] if one["problem"]}


# Sources ------------------------------------------------------------------------------------------


def test_a_checkpoint_that_names_only_what_libraries_write(run: Path) -> None:
    before = tree(run)
    report = listed(run)
    assert tree(run) == before
    assert (known(report), unknown(report)) == (LIBRARIES, set())
    assert {one["path"] for one in report["files"]} == {
        str(path.relative_to(run)) for path in run.rglob("*.pt")
    }
    assert all(one["pickles"] == 1 for one in report["files"])


def test_what_a_script_adds_is_marked(tmp_path: Path) -> None:
    run = write(Job(client_state=client_state()), tmp_path / "run")
    report = listed(run)
    assert KEEPSAKE in unknown(report)
    assert known(report) >= LIBRARIES
    (keepsake,) = [one for one in report["names"] if one["name"] == KEEPSAKE]
    assert keepsake["files"] == [MODEL]
    done = in_process("inspect", run, "--pickles")
    (line,) = [line for line in done.out.splitlines() if KEEPSAKE in line]
    assert line.split() == [KEEPSAKE, "NO", str(keepsake["count"]), MODEL]
    (line,) = [line for line in done.out.splitlines() if "torch.Size" in line]
    assert line.split()[1] == "yes"


@pytest.mark.parametrize("protocol", range(6))
def test_a_payload_is_listed_and_not_run(run: Path, tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    with_pickle(run / MODEL, pickle.dumps({"x": [Payload(marker)]}, protocol))
    assert SYSTEM in unknown(listed(run))
    assert SYSTEM in unknown(listed(run / TAG))
    assert SYSTEM in unknown(listed(run / MODEL))
    assert not marker.exists()
    load(run / MODEL)
    assert marker.exists()


def test_a_single_file_wherever_a_link_leads(run: Path) -> None:
    assert listed(run / OPTIMIZER)["files"][0]["pickles"] == 1
    elsewhere(run / OPTIMIZER)
    assert known(listed(run / OPTIMIZER)) < LIBRARIES


def test_a_legacy_file_has_five_pickles(run: Path, tmp_path: Path) -> None:
    content = {"x": Payload(tmp_path / "marker"), "y": torch.zeros(1000)}
    torch.save(content, run / MODEL, _use_new_zipfile_serialization=False)
    report = listed(run / MODEL)
    assert unknown(report) == {SYSTEM}
    assert report["files"][0]["pickles"] == 5


def test_pickles_that_follow_one_another(tmp_path: Path) -> None:
    path = tmp_path / "two.pkl"
    path.write_bytes(pickle.dumps("harmless") + pickle.dumps(Payload(tmp_path / "marker")))
    assert unknown(listed(path)) == {SYSTEM}


def test_dumps(run: Path, tmp_path: Path) -> None:
    template = write_dumps(run, tmp_path / "dumps")
    first, second = sorted(template.parent.iterdir())
    edit(second, lambda content: content.update(x=Payload(tmp_path / "marker")))
    report = listed(template)
    assert {one["path"] for one in report["files"]} == {first.name, second.name}
    (system,) = [one for one in report["names"] if one["name"] == SYSTEM]
    assert (system["files"], system["count"]) == ([second.name], 1)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_store_s_state_and_the_files_that_it_keeps(run: Path, tmp_path: Path, codec: str) -> None:
    edit(run / MODEL, lambda content: content.update(x=Payload(tmp_path / "marker")))
    (run / "scheduler.pt").write_bytes(pickle.dumps(print) + b"N." * MIB)
    (run / TAG / "README.md").write_text("Nothing to see.")
    store = tmp_path / "x.zarr"
    library.convert(run, store, codec=codec, chunk_size=100_000)
    report = listed(store)
    assert unknown(report) == {SYSTEM, "builtins.print"}
    assert [one["path"] for one in report["files"]] == ["meta/state/c/0", "scheduler.pt"]
    assert report["files"][1]["pickles"] == 1 + MIB
    assert "torch._utils._rebuild_tensor_v2" in known(report)


def test_other_tags_have_their_own_names(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / TAG, run / "global_step9")
    path = run / MODEL.replace(TAG, "global_step9")
    edit(path, lambda content: content.update(x=Payload(tmp_path / "marker")))
    assert unknown(listed(run)) == set()
    assert unknown(listed(run, "--tag", "global_step9")) == {SYSTEM}


def test_a_directory_without_a_tag_is_listed_whole(run: Path, tmp_path: Path) -> None:
    edit(run / MODEL, lambda content: content.update(x=Payload(tmp_path / "marker")))
    (run / "latest").write_text("../elsewhere")
    report = listed(run)
    assert unknown(report) == {SYSTEM}
    assert "no tag could be chosen" in report["notes"][0]


def test_files_without_pickles_are_no_matter(run: Path) -> None:
    before = listed(run)
    (run / "model.safetensors").write_bytes(struct.pack("<Q", 0x80) + b'{"x": 1}' + b" " * 120)
    (run / "config.json").write_text("{}")
    with zipfile.ZipFile(run / "code.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.py", "pass")
    assert listed(run) == before


# Names that hide ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pickled", "name"),
    [
        pytest.param(b"cos\nsystem\n.", "os.system", id="GLOBAL"),
        pytest.param(b"\x8c\x02os\x8c\x06system\x93.", "os.system", id="STACK_GLOBAL"),
        pytest.param(b"(Vx\nios\nsystem\n.", "os.system", id="INST"),
        pytest.param(b"cos\nsystem\n0N.", "os.system", id="dropped at once"),
        pytest.param(b"(cos\nsystem\n1N.", "os.system", id="dropped with its mark"),
        pytest.param(b"N0cos\nsystem\np3\n0g3\nVx\n\x85R.", "os.system", id="from the memo"),
        pytest.param(b"cos\nsystem\nQ0N.", "os.system", id="in a persistent id"),
        pytest.param(
            b"cbuiltins\ngetattr\ncos\npath\nVjoin\n\x86R.", "os.path.join", id="as an attribute"
        ),
        pytest.param(b"(cbuiltins\ngetattr\ncos\npath\nVjoin\no.", "os.path.join", id="by OBJ"),
        pytest.param(b"(cos\npath\nVjoin\nibuiltins\ngetattr\n.", "os.path.join", id="by INST"),
    ],
)
def test_however_it_is_asked_for(pickled: bytes, name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(pickled)
    assert name in unknown(listed(path))


def test_names_in_what_breaks_off_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(b"cos\nsystem\n\x82\x01.")
    report = listed(path, code=3)
    assert unknown(report) == {"os.system"}
    assert "not accepted" in problems(report)["x.pkl"]


# Hostile files ------------------------------------------------------------------------------------


def compress(path: Path) -> None:
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in records.items():
            target.writestr(name, data)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def ring(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "compressed": (compress, "is compressed"),
    "empty": (lambda path: path.write_bytes(b""), "no end"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "no end record"),
    "no pickle": (lambda path: path.write_bytes(b"<html></html>"), "pickle"),
    "an extension": (lambda path: with_pickle(path, b"\x82\x01."), "not accepted"),
    "no end": (lambda path: with_pickle(path, b"}" * MIB), "no end"),
    "nested": (lambda path: with_pickle(path, b")" + b"\x85" * MIB + b"."), "tuples in each other"),
    "a pipe": (pipe, "not a regular file"),
    "leads out": (elsewhere, "leads out"),
    "a ring": (ring, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_hostile_file_is_named_and_the_others_are_listed(name: str, run: Path) -> None:
    change, says = DAMAGE[name]
    change(run / OPTIMIZER)
    done = streamshard("inspect", run, "--pickles", "--json")
    assert done.code == 3, done.err
    report = json.loads(done.out)
    assert list(problems(report)) == [OPTIMIZER]
    assert says in problems(report)[OPTIMIZER]
    assert known(report) == LIBRARIES
    assert "1 of 3 files" in done.err
    assert OPTIMIZER in done.err
    assert done.own_bytes < 150 * MIB
    text = in_process("inspect", run, "--pickles")
    assert (text.code, f"{OPTIMIZER}: " in text.out) == (3, True)


def test_a_damaged_store_is_listed_as_far_as_it_goes(run: Path, tmp_path: Path) -> None:
    edit(run / MODEL, lambda content: content.update(x=Payload(tmp_path / "marker")))
    store = tmp_path / "x.zarr"
    library.convert(run, store)
    state = store / "meta/state/c/0"
    flip(state, 0.99)
    report = listed(store, code=3)
    assert unknown(report) == {SYSTEM}
    assert {*problems(report)} == {"meta/state/c/0", "file"}
    state.unlink()
    assert "not a regular" in problems(listed(store, code=3))["meta/state/c/0"]


def test_a_store_s_state_may_not_lead_out(run: Path, tmp_path: Path) -> None:
    store = tmp_path / "x.zarr"
    library.convert(run, store)
    (store / "meta").rename(tmp_path / "meta")
    (store / "meta").symlink_to(tmp_path / "meta")
    report = listed(store, code=3)
    assert (report["names"], {*problems(report)}) == ([], {"meta/state/c/0", "file"})
    assert "leads out" in problems(report)["meta/state/c/0"]


def test_names_give_no_orders_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(b"c\x1b]0;owned\x07\nx\n.")
    done = passed("inspect", path, "--pickles")
    assert r"\x1b]0;owned\x07.x" in done.out
    assert "\x1b" not in done.out


@pytest.mark.parametrize(
    ("source", "code"), [("nothing", 3), ("{rank}.pt", 3), ("{rank}{rank}.pt", 2), (".", 3)]
)
def test_a_place_without_pickles_is_no_answer(
    source: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("none here")
    done = in_process("inspect", source, "--pickles")
    assert (done.code, done.out) == (code, ""), done.err
    assert done.err.startswith("streamshard: ")
    assert source != "." or ".: nothing in it holds a pickle" in done.err

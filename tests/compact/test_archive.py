"""Archives hold all that a tag holds, in less room, and give it back as it was."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import tensorstore
import torch
import zarr

import streamshard as api
from streamshard.errors import IntegrityError
from streamshard.io.disk import Disk
from streamshard.operations.compact.proof import state_equal
from streamshard.operations.source.source import open_source
from tests.compact.runs import STEPS, age, bits, make_run, save, tag_of
from tests.comparing import differences
from tests.fabricated import client_state, load, write
from tests.fabricated import save as save_file
from tests.job import EXPERTS, Job, buffers

FIRST = tag_of(STEPS[0])
JOBS = {
    "stage 1": Job(stage=1, client_state=client_state(), world_size=3),
    "stage 2": Job(stage=2, client_state=client_state()),
    "stage 3": Job(stage=3, client_state=client_state(), garbage=False, sub_group_size=20),
    "round robin": Job(round_robin=True, alignment=True, world_size=3),
    "fp16": Job(dtype=torch.float16),
    "fp32": Job(dtype=torch.float32),
    "parts": Job(parts=2, frozen=()),
    "experts": Job(world_size=4, experts=EXPERTS, expert_parallel=2),
    "muon": Job(world_size=3, muon=(0,), tied={}),
}


@pytest.mark.parametrize("name", JOBS)
def test_at_the_original_stage_and_world_size_everything_comes_back(
    name: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", JOBS[name])
    (run / FIRST / "tokenizer.json").write_bytes(bytes(range(256)))
    (run / FIRST / "tokenizer.json").chmod(0o640)
    age(run / FIRST, 30)
    before = bits(run)
    found = api.compact(run, tmp_path / "archive")
    assert [tag.action for tag in found.tags] == ["archived", "kept", "kept", "kept"]
    api.repartition(tmp_path / "archive" / f"{FIRST}.zarr", tmp_path / "out")
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


def test_a_state_of_the_same_length_is_another(tmp_path: Path) -> None:
    jobs = {name: Job(client_state={"order": name}) for name in ("first", "third")}
    runs = {name: write(job, tmp_path / name) for name, job in jobs.items()}
    api.convert(runs["first"], tmp_path / "archive.zarr")
    archive = open_source(tmp_path / "archive.zarr")
    state_equal(archive, open_source(runs["first"]))
    with pytest.raises(IntegrityError, match="its training state is not that of"):
        state_equal(archive, open_source(runs["third"]))


@pytest.mark.parametrize("stage", [2, 3])
def test_for_other_ranks_it_gives_the_bytes_that_the_checkpoint_gives(
    tmp_path: Path, stage: int
) -> None:
    run = make_run(tmp_path / "run", Job(stage=stage, world_size=2, client_state=client_state()))
    api.compact(run, tmp_path / "archive")
    archive = tmp_path / "archive" / f"{FIRST}.zarr"
    for world_size, zero_stage in ((3, stage), (4, 5 - stage)):
        outs = [tmp_path / f"{road}-{world_size}" for road in ("direct", "archived")]
        for source, out in ((run, outs[0]), (archive, outs[1])):
            api.repartition(source, out, tag=FIRST, world_size=world_size, zero_stage=zero_stage)
        assert bits(outs[0]) == bits(outs[1])


def test_of_a_store_alone_the_world_size_is_known(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(api.StreamshardError, match="world_size=") as caught:
        api.repartition(run, tmp_path / "out")
    assert caught.value.exit_code == 2


def stored_weights(archive: Path) -> set[str]:
    """List what an archive keeps of the module."""
    return {path.name for path in (archive / "module").iterdir() if path.is_dir()}


def test_weights_that_are_casts_are_left_out_and_others_are_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = run / FIRST / "mp_rank_00_model_states.pt"
    state = load(path)
    weight = state["module"]["block.0.mlp"]
    weight.view(-1).view(torch.int16)[5] ^= 1
    save_file(state, path)
    age(run / FIRST, 30)
    api.compact(run, tmp_path / "archive")
    archive = tmp_path / "archive" / f"{FIRST}.zarr"
    assert stored_weights(archive) == {*buffers(), "old.weight", "old.bias", "block.0.mlp"}
    receipt = json.loads((tmp_path / "archive" / f"{FIRST}.receipt.json").read_text())
    assert {*receipt["derived"]} == {f"module/{name}" for name in {*Job().shapes} - {"block.0.mlp"}}
    api.repartition(archive, tmp_path / "out")
    restored = load(tmp_path / "out" / FIRST / path.name)["module"]["block.0.mlp"]
    assert torch.equal(restored.view(torch.int16), weight.view(torch.int16))


def test_a_nan_of_other_bits_than_a_casts_is_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for path, key in (
        (run / FIRST / "mp_rank_00_model_states.pt", None),
        (run / FIRST / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "fp32"),
    ):
        state = load(path)
        if key is None:
            state["module"]["embed.weight"].view(-1).view(torch.int16)[0] = 0x7FC1
        else:
            state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[0] = torch.nan
        save_file(state, path)
    age(run / FIRST, 30)
    api.compact(run, tmp_path / "archive")
    assert "embed.weight" in stored_weights(tmp_path / "archive" / f"{FIRST}.zarr")


def test_sha256sum_checks_it_without_us(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    api.compact(run, tmp_path / "archive")
    archive = tmp_path / "archive"
    command = ["sha256sum", "--check", "--strict", "--quiet", f"{FIRST}.zarr.sha256"]
    assert subprocess.run(command, cwd=archive).returncode == 0
    listed = {line.split("  ")[1] for line in (archive / command[-1]).read_text().splitlines()}
    assert listed == {f"{FIRST}.zarr/{path}" for path in bits(archive / f"{FIRST}.zarr")}
    victim = archive / f"{FIRST}.zarr" / "state/fp32/embed.weight/c/0/0"
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    done = subprocess.run(command, cwd=archive, capture_output=True)
    assert done.returncode == 1


def test_sha256sum_understands_a_name_that_it_has_to_escape(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / FIRST).rename(run / "a\\b 80")
    found = api.compact(run, tmp_path / "archive", delete=True)
    assert (found.tags[0].tag, found.tags[0].action) == ("a\\b 80", "deleted")
    command = ["sha256sum", "--check", "--strict", "--quiet", "a\\b 80.zarr.sha256"]
    assert subprocess.run(command, cwd=tmp_path / "archive").returncode == 0


def test_the_receipt_tells_the_source(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    api.compact(run, tmp_path / "archive")
    receipt = json.loads((tmp_path / "archive" / f"{FIRST}.receipt.json").read_text())
    told = {record["path"]: record for record in receipt["source"]}
    paths = [*(path for path in run.glob(f"{FIRST}/*")), run / "zero_to_fp32.py"]
    assert told.keys() == {path.relative_to(run).as_posix() for path in paths}
    for path in paths:
        record, stat = told[path.relative_to(run).as_posix()], path.stat()
        assert (record["inode"], record["device"]) == (stat.st_ino, stat.st_dev)
        assert (record["nbytes"], record["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)
        digest = subprocess.run(["sha256sum", path], capture_output=True, text=True).stdout
        assert record["sha256"] == digest.split()[0]
    assert all(check["holds"] for check in receipt["checks"])


def test_files_that_an_earlier_archive_holds_are_stored_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(1, 2, 3, 4, 5))
    found = api.compact(run, tmp_path / "archive")
    assert [bool(tag.shared_bytes) for tag in found.tags] == [False, True, False, False, False]
    first, second = (tmp_path / "archive" / f"{tag_of(step)}.zarr" for step in (1, 2))
    frozen = "module/old.weight/c/0/0"
    assert (first / frozen).samefile(second / frozen)
    changed = "state/fp32/embed.weight/c/0/0"
    assert not (first / changed).samefile(second / changed)
    stored = {(first / path).stat().st_ino for path in bits(first)}
    mine = [(second / path).stat() for path in bits(second)]
    again = sum(stat.st_size for stat in mine if stat.st_ino not in stored)
    assert found.tags[1].shared_bytes == found.tags[1].archive_bytes - again
    assert not [path for path in bits(second) if "streamshard" in path]
    # Each stays whole by itself.
    subprocess.run(["rm", "-r", first], check=True)
    assert api.verify(second).is_good
    assert api.verify(second, against=run / tag_of(2)).is_good


def test_without_links_everything_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(known: Path, path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Disk, "make_link", staticmethod(refuse))
    run = make_run(tmp_path / "run", steps=(1, 2, 3, 4, 5))
    found = api.compact(run, tmp_path / "archive", delete=True)
    assert [tag.action for tag in found.tags[:2]] == ["deleted", "deleted"]
    assert found.tags[1].shared_bytes == 0
    files = [path for path in (tmp_path / "archive").rglob("*") if path.is_file()]
    assert {path.stat().st_nlink for path in files} == {1}


def test_a_damaged_file_of_an_earlier_archive_is_not_taken(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(1, 2, 3, 4))
    assert api.compact(run, tmp_path / "archive").tags[0].action == "archived"
    first, second = (tmp_path / "archive" / f"{tag_of(step)}.zarr" for step in (1, 2))
    frozen = "module/old.weight/c/0/0"
    good = (first / frozen).read_bytes()
    (first / frozen).write_bytes(bytes([good[0] ^ 1]) + good[1:])
    save(run, 5)
    assert api.compact(run, tmp_path / "archive").tags[1].action == "archived"
    assert (second / frozen).read_bytes() == good
    assert not (first / frozen).samefile(second / frozen)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', "receipt", "[" * 10_000])
def test_a_receipt_that_cannot_be_read_is_told(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "run")
    api.compact(run, tmp_path / "archive")
    receipt = tmp_path / "archive" / f"{FIRST}.receipt.json"
    receipt.write_text(text)
    found = api.compact(run, tmp_path / "archive", delete=True)
    assert (found.tags[0].action, found.exit_code) == ("ambiguous", 3)
    assert str(receipt) in found.tags[0].reason
    assert (run / FIRST).is_dir()
    assert receipt.read_text() == text


def test_it_is_archived_once_and_archiving_again_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    api.compact(run, tmp_path / "archive")
    before = bits(tmp_path / "archive"), [p.stat().st_mtime_ns for p in tmp_path.rglob("*")]
    found = api.compact(run, tmp_path / "archive")
    assert found.tags[0].action == "archived before"
    after = bits(tmp_path / "archive"), [p.stat().st_mtime_ns for p in tmp_path.rglob("*")]
    assert before[0] == after[0]


def test_another_save_of_an_archived_tag_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    api.compact(run, tmp_path / "archive")
    before = bits(tmp_path / "archive")
    os.utime(run / FIRST / "mp_rank_00_model_states.pt", (1, 1))
    found = api.compact(run, tmp_path / "archive", delete=True)
    assert (found.tags[0].action, found.exit_code) == ("ambiguous", 3)
    assert "another save" in found.tags[0].reason
    assert "has time of change 1970-01-01 00:00:01.000000000 UTC" in found.tags[0].reason
    assert (run / FIRST).is_dir()
    assert bits(tmp_path / "archive") == before


def test_a_store_that_compact_did_not_make_is_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    store = tmp_path / "archive" / f"{FIRST}.zarr"
    api.convert(run, store, tag=FIRST)
    before = bits(store)
    found = api.compact(run, tmp_path / "archive", delete=True)
    assert (found.tags[0].action, found.exit_code) == ("failed", 4)
    assert "move it away" in found.tags[0].reason
    assert bits(store) == before


def test_a_log_that_grows_beside_the_tags_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "train.log").write_text("step 1")
    (run / "config.json").write_text("{}")
    age(run / "config.json", 9)
    api.compact(run, tmp_path / "archive")
    archive = tmp_path / "archive" / f"{FIRST}.zarr"
    held = {file.path for file in open_source(archive).checkpoint.files}
    assert held == {"zero_to_fp32.py", "config.json"}
    receipt = json.loads((tmp_path / "archive" / f"{FIRST}.receipt.json").read_text())
    assert receipt["left_out"] == ["train.log"]
    (run / "train.log").write_text("step 2")
    assert api.compact(run, tmp_path / "archive", delete=True).tags[0].action == "deleted"


def test_plain_zarr_tools_read_it(tmp_path: Path) -> None:
    job = replace(Job(), changed=("fp32", "embed.weight", STEPS[0] % 44))
    run = make_run(tmp_path / "run")
    api.compact(run, tmp_path / "archive")
    archive = tmp_path / "archive" / f"{FIRST}.zarr"
    group = zarr.open_group(archive, mode="r")
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        for name in job.shapes:
            wanted = job.values(state, name).numpy()
            path = f"state/{state}/{name}"
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(archive / path)}}
            for found in (group[path][...], tensorstore.open(spec).result().read().result()):  # type: ignore[index]
                assert found.tobytes() == wanted.tobytes()  # type: ignore[union-attr]

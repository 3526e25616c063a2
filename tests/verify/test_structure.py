"""What is wrong with a set of files that are each whole, and with sets that cannot be opened."""

import base64
import json
import shutil
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import SourceNotFoundError
from tests.cli.conftest import flip
from tests.cli.conftest import model_file as model
from tests.fabricated import DUMPS, edit, save, without_zero, write, write_dumps
from tests.fabricated import optimizer_file as shard
from tests.job import TAG, Job
from tests.verify.conftest import SMALL, Edit, Of, edit_manifest, kinds_of


def swap(one: Path, other: Path) -> None:
    data = one.read_bytes(), other.read_bytes()
    one.write_bytes(data[1])
    other.write_bytes(data[0])


# Shards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_where_all_are_missing_they_are_named_as_the_job_names_them(
    stage: int, tmp_path: Path
) -> None:
    """Their prefix is known by the config that the model files keep."""
    run = write(Job(stage=stage), tmp_path / "run")
    lost = list((run / TAG).glob("*_optim_states.pt"))
    for path in lost:
        path.unlink()
    told = " ".join(problem.message for problem in streamshard.verify(run).problems)
    assert all(str(path) in told for path in lost), told


def test_torn_files_and_missing_ones_are_listed_together(fresh: Of) -> None:
    run = fresh("native-3")
    shard(run, 1).unlink()
    model(run, 0).unlink()
    for path in (shard(run, 0), model(run, 2)):
        path.write_bytes(path.read_bytes()[:-100])
    assert kinds_of(streamshard.verify(run)) == [
        *(("malformed", path.name) for path in (shard(run, 0), model(run, 2))),
        *(("missing", path.name) for path in (shard(run, 1), model(run, 0))),
    ]


@pytest.mark.parametrize("kind", ["native-1", "native-2", "native-3"])
def test_swapped_ranks_are_noticed(fresh: Of, kind: str) -> None:
    run = fresh(kind)
    swap(shard(run, 0), shard(run, 1))
    found = streamshard.verify(run)
    names = {Path(problem.file).name for problem in found.problems}
    assert names >= {shard(run, 0).name, shard(run, 1).name}
    assert {problem.kind for problem in found.problems} <= {"disagreement", "malformed"}


def test_swapped_model_files_are_noticed(fresh: Of) -> None:
    run = fresh("native-3")
    swap(model(run, 1), model(run, 2))
    found = kinds_of(streamshard.verify(run))
    assert found == [("disagreement", model(run, rank).name) for rank in (1, 2)]


def other_step(path: Path) -> None:
    """Make a file one of the step before."""

    def change(content: dict[str, Any]) -> None:
        if "optimizer_state_dict" not in content:
            content["global_steps"] = 6
            return
        inner = content["optimizer_state_dict"]
        inner = inner.get("base_optimizer_state") or inner["optimizer_state_dict"]
        for state in inner["state"].values():
            state["step"] = torch.tensor(6.0)

    edit(path, change)


@pytest.mark.parametrize(
    ("kind", "rank"), [("native-2", 0), ("native-2", 2), ("native-3", 0), ("native-3", 1)]
)
def test_a_rank_of_another_step_is_the_odd_one_out(fresh: Of, kind: str, rank: int) -> None:
    run = fresh(kind)
    other_step(shard(run, rank))
    (problem,) = streamshard.verify(run).problems
    assert (problem.kind, problem.file) == ("disagreement", str(shard(run, rank)))
    assert "'step' of group 0" in problem.message
    if kind == "native-3":
        other_step(model(run, rank))
        found = kinds_of(streamshard.verify(run))
        assert ("disagreement", model(run, rank).name) in found
        assert ("disagreement", shard(run, rank).name) in found


def test_a_rank_of_another_world_size(fresh: Of, tmp_path: Path) -> None:
    run = fresh("native-2")
    other = write(replace(SMALL, world_size=5), tmp_path / "other")
    shutil.copy(shard(other, 4), shard(run, 4))
    found = kinds_of(streamshard.verify(run))
    assert found == [
        ("disagreement", shard(run, 4).name),
        ("missing", shard(run, 3).name),
    ]


def test_parts_of_a_model_may_have_other_parameters(tmp_path: Path) -> None:
    """As with pipelines. A rank that is missing is then the only problem."""
    run = write(replace(SMALL, parts=2), tmp_path / "run")
    edit(
        run / TAG / "mp_rank_01_model_states.pt",
        lambda model: model["param_shapes"][0].update(other=torch.Size([3])),
    )
    shard(run, 1).unlink()
    assert kinds_of(streamshard.verify(run)) == [("missing", shard(run, 1).name)]


def test_all_files_of_a_part_of_another_step(tmp_path: Path) -> None:
    run = write(replace(SMALL, parts=2), tmp_path / "run")
    gone, *part = sorted((run / TAG).glob("*_mp_rank_01_optim_states.pt"))
    gone.unlink()
    for path in part:
        other_step(path)
    wanted = [*(("disagreement", path.name) for path in part), ("missing", gone.name)]
    assert kinds_of(streamshard.verify(run)) == wanted


def test_two_sets_of_files_in_one_place(fresh: Of) -> None:
    run = fresh("native-2")
    twice = shard(run, 1)
    shutil.copy(twice, twice.with_name(twice.name.removeprefix("bf16_")))
    twice.write_bytes(twice.read_bytes()[:-100])
    found = streamshard.verify(run)
    assert ("malformed", twice.name) in kinds_of(found)
    assert any("claims to be of one rank with" in problem.message for problem in found.problems)


def test_without_zero_no_optimizer_file_is_missing(tmp_path: Path) -> None:
    run = without_zero(write(Job(stage=1, world_size=4), tmp_path / "run"))
    path = run / TAG / "mp_rank_00_model_states.pt"
    edit(path, lambda model: model.update(dp_world_size="many"))
    assert kinds_of(streamshard.verify(run)) == [("disagreement", path.name)]


def test_of_experts_without_zero_only_that_is_said(fresh: Of) -> None:
    run = fresh("native-2")
    for path in (run / TAG).glob("*_optim_states.pt"):
        path.unlink()
    save({"optimizer": {}}, run / TAG / "expp_rank_0_mp_rank_00_optim_states.pt")
    (problem,) = streamshard.verify(run).problems
    assert problem.kind == "unsupported"
    assert "without ZeRO" in problem.message


def test_other_files_of_a_tag_are_no_problem(fresh: Of) -> None:
    run = fresh("native-2")
    (run / TAG / "notes.txt").write_text("mine")
    found = streamshard.verify(run)
    assert found.is_good
    assert any("notes.txt" in note for note in found.notes)


def test_torch_files_that_are_not_deepspeed_s_are_checked_too(
    fresh: Of,
) -> None:
    run = fresh("native-2")
    extra = run / "training_args.bin"
    torch.save({"seed": torch.arange(50)}, extra)
    assert streamshard.verify(run).is_good
    data = bytearray(extra.read_bytes())
    data[data.index(bytes([9, 0, 0, 0, 0, 0, 0, 0, 10]))] ^= 1
    extra.write_bytes(data)
    assert kinds_of(streamshard.verify(run)) == [("damaged", "training_args.bin")]


def test_checksums_that_a_writer_left_out_are_a_note(fresh: Of) -> None:
    run = fresh("native-2")
    path = shard(run, 1)
    without_checksums(path)
    found = streamshard.verify(run)
    assert found.is_good
    (note,) = [note for note in found.notes if "checksums of tensor data out" in note]
    assert path.name in note


def without_checksums(path: Path) -> None:
    """Set the CRC-32 of every storage to 0, as streamshard's first version and `skip_data` do."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        storages = [info for info in archive.infolist() if "/data/" in info.filename]
    assert storages
    for info in storages:
        # So it stands in the data descriptor and in the directory.
        size = info.file_size.to_bytes(4, "little")
        data = data.replace(info.CRC.to_bytes(4, "little") + size, bytes(4) + size)
    path.write_bytes(data)


def test_latest_that_names_nothing(fresh: Of) -> None:
    run = fresh("native-2")
    for text in ("", "global_step8", "../run"):
        (run / "latest").write_text(text)
        (problem,) = streamshard.verify(run).problems
        assert problem.file == str(run / "latest")
    assert streamshard.verify(run, tag=TAG).is_good
    assert streamshard.verify(run / TAG).is_good


def test_a_config_in_the_files_that_cannot_be(fresh: Of) -> None:
    run = fresh("native-2")
    for path in (run / TAG).glob("*.pt"):
        edit(path, lambda c: c["ds_config"]["zero_optimization"].update(sub_group_size="many"))
    (problem,) = streamshard.verify(run).problems
    assert problem.kind == "malformed"
    assert "sub_group_size is 'many'" in problem.message


# Dumps --------------------------------------------------------------------------------------------


def test_missing_and_swapped_dumps(fresh: Of) -> None:
    template = fresh("dumps-2")
    first, second, _ = (template.parent / DUMPS.format(rank=rank) for rank in range(3))
    swap(first, second)
    found = kinds_of(streamshard.verify(template))
    assert {("disagreement", first.name), ("disagreement", second.name)} <= set(found)
    swap(first, second)
    first.unlink()
    assert kinds_of(streamshard.verify(template)) == [("missing", first.name)]


def test_dumps_of_stage_3_need_another_checkpoint(tmp_path: Path) -> None:
    run = write(replace(SMALL, stage=3), tmp_path / "run")
    template = write_dumps(run, tmp_path / "dumps")
    (problem,) = streamshard.verify(template).problems
    assert problem.kind == "unsupported"
    assert "like=" in problem.message
    assert streamshard.verify(template, like=run).is_good
    assert streamshard.verify(template, like=run, against=run).is_good


# Stores -------------------------------------------------------------------------------------------

CHUNK = "state/exp_avg/w/c/1/0"


@pytest.mark.parametrize("kind", ["store-none", "store-zstd"])
def test_chunks_swapped_replaced_missing_and_extra(fresh: Of, kind: str) -> None:
    store = fresh(kind)
    swap(store / CHUNK, store / CHUNK.replace("c/1/0", "c/0/0"))
    found = streamshard.verify(store)
    sizes = {(store / CHUNK.replace("c/1", f"c/{number}")).stat().st_size for number in (0, 1)}
    assert {problem.kind for problem in found.problems} == {"damaged"}
    assert len(found.problems) == 2
    assert kind != "store-none" or len(sizes) == 1
    shutil.copy(store / "state/exp_avg_sq/w/c/1/0", store / CHUNK)
    assert str(store / CHUNK) in {problem.file for problem in streamshard.verify(store).problems}
    (store / CHUNK).unlink()
    (store / "state/exp_avg/w/c/9/0").parent.mkdir()
    (store / "state/exp_avg/w/c/9/0").write_bytes(b"more")
    (store / "README").write_text("mine")
    found = streamshard.verify(store)
    assert {(p.kind, p.file) for p in found.problems} >= {
        ("missing", str(store / CHUNK)),
        ("extra", str(store / "README")),
        ("extra", str(store / "state/exp_avg/w/c/9/0")),
    }


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda m: m["files"].pop(CHUNK), CHUNK),
        (lambda m: m["files"].update(other=[3, "AAAAAA=="]), "other"),
        (lambda m: m["files"][CHUNK].__setitem__(0, 1), CHUNK),
        (lambda m: m["files"][CHUNK].__setitem__(1, "AAAAAA=="), CHUNK),
        (lambda m: m["files"][CHUNK].__setitem__(1, ""), CHUNK),
        (lambda m: m["digests"].update({"state/fp32/w": "0" * 16}), "state/fp32/w"),
        (lambda m: m["digests"].pop("state/fp32/w"), "state/fp32/w"),
        (lambda m: m["digests"].update(other="0" * 16), "other"),
        (lambda m: m.update(codec="gzip"), "gzip"),
        (lambda m: m.pop("files"), "files"),
        (lambda m: m.pop("digests"), "manifest is not as streamshard writes it: 'digests'"),
    ],
)
def test_an_edited_manifest_is_noticed(fresh: Of, edit: Edit, named: str) -> None:
    store = fresh("store-zstd")
    edit_manifest(store, edit)
    found = streamshard.verify(store)
    assert any(named in problem.message for problem in found.problems), found.problems


def test_a_document_that_tells_another_shape(fresh: Of) -> None:
    store = fresh("store-none")
    path = store / "state/exp_avg/w/zarr.json"
    document = json.loads(path.read_bytes())
    document["shape"] = [15, 1]
    path.write_text(json.dumps(document))
    data = path.read_bytes()

    def edit(manifest: dict[str, Any]) -> None:
        record = manifest["files"]["state/exp_avg/w/zarr.json"]
        record[:] = [len(data), base64.b64encode(zlib.crc32(data).to_bytes(4, "little")).decode()]

    edit_manifest(store, edit)
    (problem,) = streamshard.verify(store).problems
    assert (problem.kind, problem.file) == ("damaged", str(path))
    assert "another array" in problem.message


@pytest.mark.parametrize("which", ["meta/manifest/c/0", "meta/state/c/0", "zarr.json"])
def test_damaged_metadata_does_not_hide_damaged_chunks(fresh: Of, which: str) -> None:
    store = fresh("store-none")
    flip(store / which)
    flip(store / CHUNK)
    files = {problem.file for problem in streamshard.verify(store).problems}
    assert files >= {str(store / which), str(store / CHUNK)}


# What is not a checkpoint -----------------------------------------------------------------------


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path, fresh: Of) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    for place in ("empty", "zarr", "nowhere", "empty/x.{rank}.pt"):
        with pytest.raises(SourceNotFoundError):
            streamshard.verify(tmp_path / place)


def test_a_store_of_a_later_version_is_left_alone(fresh: Of) -> None:
    store = fresh("store-none")
    document = json.loads((store / "zarr.json").read_bytes())
    document["attributes"]["streamshard"]["format_version"] = 999
    (store / "zarr.json").write_text(json.dumps(document))
    (problem,) = streamshard.verify(store).problems
    assert (problem.kind, problem.file) == ("unsupported", str(store))

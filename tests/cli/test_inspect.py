"""What `inspect` shows: exact texts, exact keys, and numbers held against files."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import UsageError
from streamshard.operations.inspect.inspect_report import ParameterDetail
from tests.cli.conftest import RANKS, Saved, in_process, on_terminal, passed
from tests.cli.conftest import streamshard as command
from tests.fabricated import optimizer_file, write
from tests.job import EXPERTS, TAG, Job

SMALL = Job(stage=2, world_size=3)

KEYS = {
    "": "path kind tag zero_stage world_size data_parallel model_parallel "
    "tensor_parallel pipeline_parallel expert_parallel "
    "module_dtype optimizer deepspeed_version global_steps skipped_steps global_samples groups "
    "parameters frozen buffers tied state_bytes files file_bytes file_groups file_list tensors "
    "codec problems notes weights_only health details rank weights pictures checkpoints",
    "checkpoints": "path kind step zero_stage world_size nbytes changed is_whole is_newest "
    "is_latest problem is_healthy warnings",
    "groups": "model_part expert_rank parameters numel master_dtype states hyper_parameters",
    "parameters": "name shape numel group pieces first_rank last_rank",
    "file_groups": "pattern files nbytes smallest largest",
    "file_list": "path nbytes",
    "details": "name model_part kind alias_of shape numel group states pieces",
    "details.pieces": "state rank file start stop offset",
    "rank": "rank files partitions",
    "rank.files": "path nbytes",
    "rank.partitions": "group sub_group numel padding file offsets ranges",
    "rank.partitions.ranges": "name numel start stop at",
}


def golden(name: str) -> str:
    """Read what is to be printed, with masked digits."""
    return (Path(__file__).parent / "golden" / f"inspect-{name}.txt").read_text()


def masked(text: str) -> str:
    """Mask the digits of what is torch's affair: sizes of its files, and offsets in them."""
    text = re.sub(r"[0-9](?=[0-9.]* KiB)|(?<=[0-9.])[0-9](?= KiB)", "#", text)
    return re.sub(r"[0-9],[0-9]{3}", "#,###", text)


@pytest.mark.parametrize(
    ("name", "job", "options"),
    [
        ("summary", SMALL, ()),
        ("parameter", SMALL, ("--param", "embed.*", "--param", "head.weight")),
        ("rank", replace(SMALL, stage=3, sub_group_size=20), ("--rank", 1)),
    ],
)
def test_the_text(
    name: str,
    job: Job,
    options: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(job, Path("run"))
    assert masked(passed("inspect", "run", *options).out) == golden(name)


JOBS = {
    "1": Job(stage=1, world_size=3),
    "2-round-robin": Job(world_size=3, round_robin=True, alignment=True),
    "3": Job(stage=3, world_size=3, sub_group_size=20),
    "fp16": Job(dtype=torch.float16),
    "tensor-parallel": Job(world_size=3, parts=2),
    "experts": Job(world_size=4, experts=EXPERTS, expert_parallel=2),
    "muon": Job(world_size=3, muon=(0,)),
}


@pytest.mark.parametrize("is_store", [False, True], ids=["shards", "store"])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_element_lies_where_it_is_said_to(tmp_path: Path, job: Job, is_store: bool) -> None:
    run = write(job, tmp_path / "run")
    if is_store:
        streamshard.convert(run, tmp_path / "run.zarr", chunk_size=50)
        run = tmp_path / "run.zarr"
    details = streamshard.inspect(run, params=["*"]).details
    trained = [detail for detail in details if detail.kind == "param"]
    held = len(job.shapes) + (job.expert_parallel - 1) * len(job.experts)
    assert len(trained) == job.parts * held
    for detail in trained:
        for state in ("fp32", *(s for s in detail.states if s not in ("fp32", "module"))):
            found = read(run, detail, state)
            assert torch.equal(found, wanted(job, detail, state)), (detail.name, state)


def read(run: Path, detail: ParameterDetail, state: str) -> torch.Tensor:
    """Read a state of a parameter from where its pieces are said to be."""
    dtype = getattr(torch, detail.states[state])
    pieces = [piece for piece in detail.pieces if piece.state == state]
    assert [p.start for p in pieces[1:]] == [p.stop for p in pieces[:-1]]
    parts = []
    for piece in pieces:
        data = bytearray((run / piece.file).read_bytes())
        count = piece.stop - piece.start
        parts.append(torch.frombuffer(data, dtype=dtype, count=count, offset=piece.offset))
    return torch.cat(parts).reshape(detail.shape)


def wanted(job: Job, detail: ParameterDetail, state: str) -> torch.Tensor:
    """Say what a state of a parameter holds."""
    part = int(detail.model_part.removeprefix("mp_rank_") or 0)
    mine = replace(job, part=part)
    for expert_rank in range(job.expert_parallel):
        for name in job.shapes:
            if mine.in_model(name, expert_rank) == detail.name:
                made = mine.values(state, name, expert_rank)
                return made.to(getattr(torch, detail.states[state]))
    raise LookupError(detail.name)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_ranks_hold_what_is_said_of_the_parameters(tmp_path: Path, job: Job) -> None:
    run = write(job, tmp_path / "run")
    details = {(d.model_part, d.name): d for d in streamshard.inspect(run, params=["*"]).details}
    from_ranks, from_details = set(), set()
    for rank in range(job.world_size):
        found = streamshard.inspect(run, rank=rank)
        assert found.rank is not None
        for part in found.rank.partitions:
            held = sum(h.stop - h.start for h in part.ranges)
            assert held + part.padding == part.numel
            model_part = found.groups[part.group].model_part
            for one in part.ranges:
                offset = part.offsets["fp32"] + 4 * one.at
                from_ranks.add((model_part, one.name, rank, one.start, one.stop, part.file, offset))
    for (model_part, name), detail in details.items():
        for p in detail.pieces:
            if p.state == "fp32" and p.stop > p.start:
                from_details.add((model_part, name, p.rank, p.start, p.stop, p.file, p.offset))
    assert from_ranks == from_details
    for summary in streamshard.inspect(run).parameters:
        ranks = [r for _, name, r, *_ in from_details if name == summary.name and r is not None]
        assert (summary.first_rank, summary.last_rank) == (min(ranks), max(ranks))


def test_a_store_has_no_ranks(tmp_path: Path) -> None:
    streamshard.convert(write(SMALL, tmp_path / "run"), tmp_path / "run.zarr", codec="zstd")
    with pytest.raises(UsageError, match=r"a store is not cut among ranks.*params="):
        streamshard.inspect(tmp_path / "run.zarr", rank=0)
    found = streamshard.inspect(tmp_path / "run.zarr")
    assert (found.codec, found.parameters[0].first_rank) == ("zstd", None)
    assert "state/fp32/**" in {group.pattern for group in found.file_groups}


def test_the_json_is_complete(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    found = json.loads(passed("inspect", run, "--json", "--param", "*", "--rank", 0).out)
    assert found["checkpoints"] == []  # one is asked for, and not the others
    found["checkpoints"] = json.loads(passed("inspect", run, "--json").out)["checkpoints"]
    for place, keys in KEYS.items():
        node: Any = found
        for key in filter(None, place.split(".")):
            node = node[key]
            node = node[0] if isinstance(node, list) else node
        assert " ".join(node) == keys, place


def test_a_store_is_inspected_like_its_source(saved: Saved, tmp_path: Path) -> None:
    streamshard.convert(saved(3), tmp_path / "run.zarr")
    of_shards, of_store = (
        json.loads(in_process("inspect", path, "--json").out)
        for path in (saved(3), tmp_path / "run.zarr")
    )
    assert (of_shards["zero_stage"], of_shards["world_size"]) == (3, RANKS)
    assert [group["states"]["step"] for group in of_shards["groups"]] == [7.0, 7.0]
    assert of_shards["groups"][0]["hyper_parameters"]["betas"] == [0.9, 0.999]
    numel = sum(parameter["numel"] for parameter in of_shards["parameters"])
    assert of_shards["state_bytes"]["fp32"] == 4 * numel
    assert of_shards["tied"] == {"head.weight": "embed.weight"}
    for own in ("path", "kind", "files", "file_bytes", "file_groups", "file_list", "checkpoints"):
        assert of_shards.pop(own) != of_store.pop(own)
    for parameter in (*of_shards["parameters"], *of_store["parameters"]):
        for cut in ("pieces", "first_rank", "last_rank"):
            parameter.pop(cut)
    assert of_shards == of_store


def test_a_pipe_gets_whole_lines_and_a_terminal_folds_them(tmp_path: Path) -> None:
    name = "a." + "very_" * 60 + "long[bold]\x1b[2Jname"
    run = write(Job(groups=(((name, (3, 2)),),), tied={}), tmp_path / "run")
    piped = command("inspect", run)
    assert name.replace("\x1b", "\\x1b") in piped.out
    assert "\x1b" not in piped.out
    for colour, variables in (
        (True, {}), (False, {"NO_COLOR": "1"}), (False, {"TERM": "dumb"})
    ):  # fmt: skip
        line = ("-m", "streamshard", "inspect", run)
        done = on_terminal(*line, stream="stdout", columns=90, variables=variables)
        assert done.code == 0
        shown = done.out.replace("\r\n", "\n")
        assert ("\x1b[1m" in shown) == colour
        assert "\x1b[2J" not in shown
        table = shown[shown.index("parameter ") :]
        if colour:
            assert max(len(re.sub("\x1b\\[[0-9;]*m", "", ln)) for ln in table.splitlines()) <= 90
            assert "very_very_" in table


def test_many_parameters_are_not_all_listed(tmp_path: Path) -> None:
    group = tuple((f"layers.{n}.weight", (2,)) for n in range(60))
    run = write(Job(groups=(group,), tied={}), tmp_path / "run")
    brief = in_process("inspect", run).out
    assert brief.count("layers.") == 20
    assert "40 more: -v lists all, --param PATTERN" in brief
    assert in_process("inspect", run, "-v").out.count("layers.") == 60


def test_a_save_that_was_cut_off_is_noticed(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    later = run / "global_step8"
    shutil.copytree(run / TAG, later)
    assert "a later step than the one shown here" in in_process("inspect", run).out
    more = [run / f"global_step{step}" for step in (9, 10)]
    for place in more:
        shutil.copytree(later, place)
    (told,) = streamshard.inspect(run).problems
    assert told.startswith(f"{more[1]} (and 2 more): a later step than the one shown here; ")
    for place in more:
        shutil.rmtree(place)
    lost = [later / optimizer_file(run, rank).name for rank in (0, 1)]
    lost[1].unlink()
    done = passed("inspect", run)
    shown = " ".join(done.out.split())
    assert re.search(r"PROBLEM A later save is not whole: .*rank_1_mp_rank_00_optim", shown)
    lost[0].unlink()
    shutil.copytree(run / TAG, run / TAG / "copy")
    assert "looks like a shard, lies in a directory of its own" in in_process("inspect", run).out
    shutil.rmtree(run / TAG / "copy")
    (run / "latest").unlink()
    problem, _ = streamshard.inspect(run / TAG).problems
    assert problem.endswith(
        "latest: not there, so load_checkpoint() finds no tag unless it is given one."
    )

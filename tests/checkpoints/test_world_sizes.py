"""Fabricated checkpoints, repartitioned, against the same job fabricated for the other world.

Real engines are asked the same in `tests/oracle`; this asks it often, in seconds.
"""

import json
import pickletools
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamshard
from tests.comparing import both_roads, compare
from tests.fabricated import client_state, edit, edit_all, load, write
from tests.job import EXPERTS, JOBS, MUON, TAG, Job, ds_config, values

SIZES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), min_size=1, max_size=5)
_MORE_THAN_RANKS = tuple((f"p{number}", (number + 2, 3)) for number in range(7))
_ALIGNED = Job(world_size=4, groups=(_MORE_THAN_RANKS,), tied={}, round_robin=True, alignment=True)
ALL_JOBS = {
    **{f"stage-{stage}": Job(stage=stage, world_size=3, client_state=client_state(),
                             sub_group_size=20) for stage in (1, 2, 3)},
    "aligned": replace(_ALIGNED, dtype=torch.float16),
    **{f"paused-{stage}": Job(stage=stage, paused=("block.0.mlp", "embed.bias"))
       for stage in (2, 3)},
    **{name: JOBS[name] for name in ("tensor-3", "tensor-round-robin", "expert-1",
                                     "expert-data-first", "expert-tensor")},
    "muon-aligned": replace(MUON, round_robin=True, alignment=True),
    "muon of 32 bits": replace(MUON, dtype=torch.float32, alignment=True),
    "muon-tensor": replace(MUON, parts=2),
    "muon-experts": replace(MUON, experts=EXPERTS, expert_parallel=2, muon=(0, 1, 3),
                            round_robin=True, data_before_experts=True),
}  # fmt: skip
"""Each layout once: engines save and load each of them, with more settings, in `tests/oracle`."""


@pytest.mark.parametrize("job", ALL_JOBS.values(), ids=ALL_JOBS)
def test_both_roads_lead_to_the_files_of_the_other_world(tmp_path: Path, job: Job) -> None:
    run, store = write(job, tmp_path / "run"), tmp_path / "run.zarr"
    streamshard.convert(run, store, chunk_size=100)
    for copies, source in ((5, run), (1, store)):
        other = replace(job, world_size=copies * job.expert_parallel, garbage=False)
        wanted, out = write(other, tmp_path / f"wanted-{copies}"), tmp_path / f"on-{copies}"
        streamshard.repartition(source, out, world_size=copies * job.unit)
        compare(out / TAG, wanted / TAG)
        assert (out / "latest").read_text() == TAG
        script = out / "zero_to_fp32.py"
        assert script.stat().st_mode & 0o777 == 0o755
        assert script.read_bytes() == (run / "zero_to_fp32.py").read_bytes()


@settings(max_examples=15)
@given(SIZES, st.data())
def test_any_job(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], data: st.DataObject
) -> None:
    params = [(f"p{number}", tuple(shape)) for number, shape in enumerate(sizes)]
    cut = data.draw(st.integers(0, len(params) - 1))
    stage = data.draw(st.integers(1, 3))
    job = Job(
        stage=stage,
        world_size=data.draw(st.integers(1, 6)),
        groups=tuple(tuple(part) for part in (params[:cut], params[cut:]) if part),
        tied={},
        round_robin=stage < 3 and data.draw(st.booleans()),
        alignment=stage < 3 and data.draw(st.booleans()),
        sub_group_size=data.draw(st.sampled_from([1, 4, 9, 10**9])),
        muon=data.draw(st.sampled_from([(), (0,), (1,), (0, 1)])),
        offload=data.draw(st.booleans()),
    )
    place, ranks = tmp_path_factory.mktemp("job"), data.draw(st.integers(1, 6))
    wanted = write(replace(job, world_size=ranks, garbage=False), place / "wanted")
    streamshard.repartition(write(job, place / "run"), place / "out", world_size=ranks)
    compare(place / "out" / TAG, wanted / TAG)


def names_in(run: Path) -> set[str]:
    """List the names that the pickles of a checkpoint would have imported."""
    found: set[str] = set()
    for path in sorted((run / TAG).glob("*.pt")):
        with zipfile.ZipFile(path) as archive:
            pickled = archive.read(f"{path.stem}/data.pkl")
        operations = pickletools.genops(pickled)
        found |= {str(arg) for operation, arg, _ in operations if operation.name == "GLOBAL"}
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_no_name_is_asked_for_that_the_source_does_not_ask_for(tmp_path: Path, stage: int) -> None:
    run = write(Job(stage=stage, client_state=client_state()), tmp_path / "run")
    streamshard.repartition(run, tmp_path / "out", world_size=3)
    assert names_in(tmp_path / "out") <= names_in(run)
    assert "collections OrderedDict" in names_in(run)


@pytest.mark.parametrize(
    ("stage", "dtypes"),
    [(2, (torch.float32, torch.bfloat16)), (3, (torch.bfloat16, torch.float32))],
)
def test_in_another_precision_weights_are_those_of_the_masters(
    tmp_path: Path, stage: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    job = Job(stage=stage, dtype=dtypes[0], frozen=())  # of frozen weights there are no masters
    target = replace(job, world_size=3, dtype=dtypes[1], garbage=False)
    run, wanted = write(job, tmp_path / "run"), write(target, tmp_path / "wanted")
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(ds_config(target)))
    streamshard.repartition(run, tmp_path / "out", world_size=3, ds_config_file=config)
    compare(tmp_path / "out" / TAG, wanted / TAG)


def test_the_size_is_known_beforehand(tmp_path: Path) -> None:
    """Also where ranks have two digits, which makes names longer, and so the files."""
    write(Job(stage=3, world_size=3), tmp_path / "run")
    plan = streamshard.plan_repartition(tmp_path / "run", tmp_path / "out", world_size=12)
    plan.run()
    sizes = [path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert (plan.report.files, plan.report.bytes_written) == (len(sizes), sum(sizes))


@pytest.mark.parametrize("other", ["old.weight", "embed.weight"])
def test_weights_of_one_storage_stay_so_though_no_tie_is_recorded(
    tmp_path: Path, other: str
) -> None:
    run = write(Job(), tmp_path / "run")
    file = Path(TAG) / "mp_rank_00_model_states.pt"
    edit(run / file, lambda held: held["module"].update(twin=held["module"][other]))
    streamshard.repartition(run, tmp_path / "out", world_size=3)
    module = load(tmp_path / "out" / file)["module"]
    assert module["twin"].data_ptr() == module[other].data_ptr()


@pytest.mark.parametrize(("stage", "target"), [(1, 2), (2, 1), (2, 3)])
def test_a_buffer_in_the_memory_of_a_frozen_weight_keeps_its_values(
    stage: int, target: int, tmp_path: Path
) -> None:
    def add(held: dict[str, Any]) -> None:
        held["module"]["copy"] = held["module"]["old.weight"]
        held["buffer_names"].append("copy")

    run = write(Job(stage=stage, dtype=torch.float32), tmp_path / "run")
    edit_all(run, "*model_states.pt", add)
    for out in both_roads(run, zero_stage=target, world_size=3):
        for path in (out / TAG).glob("*model_states.pt"):
            assert torch.equal(load(path)["module"]["copy"], values("frozen", "old.weight", (5, 3)))

"""What DeepSpeed's rarer features save resumes on other ranks, or is refused by name."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import SourceError, UnsupportedError, UsageError
from tests.oracle.cases import BF16
from tests.oracle.features import (
    Config,
    Feature,
    HalfFrozen,
    LowRank,
    a_device_beside_the_cpu,
    a_group_more,
    cases,
    gathers_without_coalescing,
    quantizer,
    zero,
)
from tests.oracle.jobs import Consolidate, Resume, Train
from tests.oracle.laws import *  # noqa: F403
from tests.oracle.models import Case
from tests.oracle.optimizers import deepspeed_cpu_adam, missing_extension
from tests.oracle.ranks import older_deepspeed, require_success, run_jobs
from tests.oracle.reshardings import Places, carry
from tests.oracle.values import value_differences

RESHARDINGS = cases(Path())
RANKS = 2


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Every case trained, taken to its target by both roads, resumed and saved again."""
    root = tmp_path_factory.mktemp("features")
    with pytest.MonkeyPatch.context() as patch:
        # As DeepSpeed's launcher sets them on one machine; its checkpoint writers look at them.
        patch.setenv("CROSS_RANK", "0")
        patch.setenv("CROSS_SIZE", "1")
        return carry(cases(root / "clusters"), root)


@pytest.mark.parametrize("key", ["data_sampler", "random_ltd"])
def test_the_states_of_data_efficiency_come_along(key: str, places: Places) -> None:
    found = 0
    for one in RESHARDINGS:
        source, out = places.source(one), places.out(one)
        before, after = (
            torch.load(min(run_dir.glob("*/*model_states.pt")), weights_only=False)[key]
            for run_dir in (source, out)
        )
        assert list(value_differences(before, after, one.name)) == []
        found += before is not None
    assert found == 2


def test_parameters_of_two_dtypes_are_not_aligned_for_a_job_that_casts_them(
    places: Places, tmp_path: Path
) -> None:
    [one] = (one for one in RESHARDINGS if "two-dtypes" in one.name)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**one.case.ds_config(), "bf16": {"enabled": True}}))
    with pytest.raises(UnsupportedError, match=r"bfloat16 and float32, .* set parameter_alignment"):
        streamshard.repartition(
            places.source(one), tmp_path / "out", world_size=2, ds_config_file=config
        )


def test_a_run_of_which_no_save_was_committed_is_named(places: Places, tmp_path: Path) -> None:
    """A decoupled writer writes `latest` at the next step: not at all after the last save."""
    [one] = (one for one in RESHARDINGS if "decoupled" in one.case.name)
    run_dir = places.source(one)
    tag = (run_dir / "latest").read_text()
    shutil.copytree(run_dir / tag, tmp_path / tag)
    with pytest.raises(SourceError, match=r"no 'latest' file .* Give the one in it: ") as refused:
        streamshard.inspect(tmp_path)
    given = str(refused.value).rpartition("Give the one in it: ")[2]
    assert streamshard.inspect(given).world_size == 4


@pytest.fixture(scope="module")
def mics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 4 ranks saved with MiCS, in shards of 2 and of 4, and the weights of the former."""
    root = tmp_path_factory.mktemp("mics")
    stand_in = gathers_without_coalescing
    sizes = {size: odd("mics", 3, zero(mics_shard_size=size), stand_in) for size in (2, 4)}
    jobs = [Train(case, root / str(size), None) for size, case in sizes.items()]
    at = older_deepspeed("0.16.9")
    require_success(run_jobs(4, jobs, root / "ranks", deepspeed_at=at))
    require_success(run_jobs(1, [Consolidate(root / "2", root / "weights.pt")], root / "ranks"))
    return root


def test_mics_is_refused_by_name(mics: Path, tmp_path: Path) -> None:
    message = r"2 of 4 ranks saved: trained with MiCS .*zero_to_fp32.py writes the weights"
    with pytest.raises(UnsupportedError, match=message):
        streamshard.repartition(mics / "2", tmp_path / "out", world_size=3)
    weights = torch.load(mics / "weights.pt", weights_only=False)
    assert weights["embed.weight"].shape == (37, 13)
    # Among all ranks it is plain stage 3, and what resumes may not have less.
    with pytest.raises(UsageError, match=r"has mics_shard_size 4.*leave it out"):
        streamshard.repartition(mics / "4", tmp_path / "out", world_size=3)
    assert streamshard.verify(mics / "4").problems == ()


def odd(name: str, stage: int, overrides: Config, stand_in: Any = nullcontext, **more: Any) -> Case:  # noqa: ANN401
    """Make a case that cannot be resharded."""
    feature = Feature(overrides, stand_in, more.pop("saving", nullcontext))
    return Case(f"z{stage}-{name}", stage, "bf16", topology=feature, warms_up=False, **more)


ON_CPU = {"device": "cpu", "pin_memory": False}
TOP_K = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 2, "update_interval": 2}
ZENFLOW = {
    "zero_optimization": {"offload_optimizer": ON_CPU, "zenflow": TOP_K},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
TWIN_FLOW = odd(
    "twin-flow", 3, zero(offload_optimizer={**ON_CPU, "ratio": 0.4}, sub_group_size=400),
    a_device_beside_the_cpu, optimizer=deepspeed_cpu_adam,
)  # fmt: skip
QUANTISED = odd(
    "quantised", 3, zero(zero_quantized_nontrainable_weights=True), quantizer, model=HalfFrozen,
    one_group=True,
)  # fmt: skip
LATE_GROUP = {stage: odd("late-group", stage, {}, saving=a_group_more) for stage in (2, 3)}
REFUSED = {
    TWIN_FLOW: r"no optimizer state of sub-groups \[0, 1\]: trained with offload_optimizer\.ratio",
    QUANTISED: r"weight of 'middle\.weight' is kept as int8 .*zero_quantized_nontrainable_weights",
}
for stage in (1, 2):
    REFUSED[odd("zenflow", stage, ZENFLOW, optimizer=None)] = "trained with ZenFlow"
for stage, advice in ((2, "load_module_only=True"), (3, "save_16bit_model")):
    REFUSED[LATE_GROUP[stage]] = (
        rf"param groups \[3\] of 4 .* added to the wrapped optimizer after .*{advice}"
    )
    REFUSED[odd("low-rank", stage, {}, model=LowRank, one_group=True)] = (
        r"'q_proj\.weight' has 192 of 384 elements: trained with .*'s base_weight_sharding"
    )
STAGE_0 = Case("z0-bf16", 0, "bf16")


def _extension(case: Case) -> str:
    """Say why an engine cannot run here; empty where it can."""
    offloads = "offload_optimizer" in case.ds_config()["zero_optimization"]
    return missing_extension("cpu_adam" if offloads else None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every engine that can run here has saved, under its case's name."""
    root = tmp_path_factory.mktemp("refused")
    cases = [STAGE_0, *(case for case in REFUSED if not _extension(case))]
    trains = [Train(case, root / case.name, None) for case in cases]
    require_success(run_jobs(RANKS, trains, root / "ranks"))
    _drop_optimizer(root / STAGE_0.name, root / "no-optimizer")
    again = [
        Resume(
            STAGE_0, root / "no-optimizer", root / "anew.pt", root / "anew",
            load_options=(("load_optimizer_states", False),),
        ),
        Resume(
            BF16[1], root / "z2-late-group", root / "late.pt", root / "z2-all-groups",
            load_options=(("load_module_only", True),),
        ),
    ]  # fmt: skip
    require_success(run_jobs(3, again, root / "ranks"))
    return root


def _model_file(run_dir: Path) -> Path:
    return run_dir / (run_dir / "latest").read_text() / "mp_rank_00_model_states.pt"


def _drop_optimizer(run_dir: Path, to: Path) -> None:
    """Copy a checkpoint of stage 0 as DeepSpeed 0.18.4 would have saved it in bf16."""
    tag = (run_dir / "latest").read_text()
    (to / tag).mkdir(parents=True)
    (to / "latest").write_text(tag)
    model = torch.load(_model_file(run_dir), weights_only=False)
    torch.save({**model, "optimizer": None, "ds_version": "0.18.4"}, _model_file(to))


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_cannot_be_resharded_is_refused_by_name(
    case: Case, saved: Path, tmp_path: Path
) -> None:
    if reason := _extension(case):
        pytest.skip(reason)
    for target in (1, 4):
        with pytest.raises(UnsupportedError, match=REFUSED[case]):
            streamshard.repartition(saved / case.name, tmp_path / "out", world_size=target)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lost", "loaded"), [("no-optimizer", "anew"), ("z2-late-group", "z2-all-groups")]
)
def test_the_weights_load_as_the_message_says(lost: str, loaded: str, saved: Path) -> None:
    """On any ranks."""
    if lost == "no-optimizer":
        with pytest.raises(UnsupportedError, match="load_optimizer_states=False"):
            streamshard.inspect(saved / lost)
    before, after = (
        torch.load(_model_file(saved / name), weights_only=False)["module"]
        for name in (lost, loaded)
    )
    assert list(value_differences(before, after, "module")) == []

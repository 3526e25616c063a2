"""Real engines save what cannot be resharded, and it is refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import streamshard
from streamshard.errors import UnsupportedError
from tests.oracle.models import Case
from tests.oracle.odd_engines import (
    HalfFrozen,
    LowRank,
    Odd,
    a_device_beside_the_cpu,
    a_group_more,
    experts,
    quantizer,
    run,
    without_recorders,
)
from tests.oracle.optimizers import Trial, deepspeed_cpu_adam
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.values import value_differences

RANKS, OTHER_RANKS = 2, 3
OFFLOAD = {"device": "cpu", "pin_memory": False}
ZENFLOW = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 2, "update_interval": 2}
AUTO_EXPERTS = {
    "expert_parallel": {
        "enabled": True,
        "autoep_size": RANKS,
        "preset_model": "mixtral",
        "use_grouped_mm": False,
    },
    "zero_optimization": {"reduce_bucket_size": 5000, "allgather_bucket_size": 5000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}

PLACE = Path()
STAGE_0 = Case("z0-bf16", 0, "bf16")
TWIN_FLOW = Case(
    "z3-twin-flow",
    3,
    "bf16",
    {"zero_optimization": {"offload_optimizer": {**OFFLOAD, "ratio": 0.4}, "sub_group_size": 400}},
    optimizer=deepspeed_cpu_adam,
)
KINDS = [
    (
        Odd(TWIN_FLOW, PLACE, stand_in=a_device_beside_the_cpu),
        r"no optimizer state of sub-groups \[0, 1\]: offload_optimizer\.ratio 0\.4",
    ),
    *(
        (
            Odd(
                Case(
                    f"z{stage}-zenflow",
                    stage,
                    "bf16",
                    {
                        "zero_optimization": {"offload_optimizer": OFFLOAD, "zenflow": ZENFLOW},
                        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                    },
                    optimizer=None,
                ),
                PLACE,
            ),
            "trained with ZenFlow",
        )
        for stage in (1, 2)
    ),
    *(
        (
            Odd(Case(f"z{stage}-late-group", stage, "bf16"), PLACE, saving=a_group_more),
            rf"param groups \[3\] of 4 were added to the wrapped optimizer after .*{advice}",
        )
        for stage, advice in ((2, "load_module_only=True"), (3, "save_16bit_model"))
    ),
    *(
        (
            Odd(Case(f"z{stage}-low-rank", stage, "bf16"), PLACE, model=LowRank),
            r"'q_proj\.weight' has 192 of 384 elements: OptimizedLinear's base_weight_sharding",
        )
        for stage in (2, 3)
    ),
    (
        Odd(
            Case(
                "z3-quantised",
                3,
                "bf16",
                {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
            ),
            PLACE,
            model=HalfFrozen,
            stand_in=quantizer,
        ),
        r"weight of 'middle\.weight' is kept as int8 .*zero_quantized_nontrainable_weights",
    ),
    *(
        (
            Odd(
                Case(f"z{stage}-autoep", stage, "bf16", AUTO_EXPERTS, optimizer=None),
                PLACE,
                model=experts,
                stand_in=without_recorders,
                steps=1,
            ),
            "trained with AutoEP",
        )
        for stage in (2, 3)
    ),
]


def _extension(case: Case) -> str:
    """Say why an engine cannot run here; empty where it can."""
    needs = "zero_optimization" in case.ds_overrides and case.zero_stage
    offloads = needs and "offload_optimizer" in case.ds_overrides["zero_optimization"]
    return Trial(case, frozenset(), extension="cpu_adam" if offloads else None).missing_extension


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every engine that can run here has saved, under its case's name."""
    root = tmp_path_factory.mktemp("refused")
    jobs = [Odd(STAGE_0, root / STAGE_0.name)]
    jobs += [
        replace(job, save_dir=root / job.case.name) for job, _ in KINDS if not _extension(job.case)
    ]
    require_success(run_jobs(RANKS, jobs, root / "ranks", run))
    _drop_optimizer(root / STAGE_0.name, root / "no-optimizer")
    unopened = (("load_optimizer_states", False),)
    lost, late = root / "no-optimizer", root / "z2-late-group"
    grouped, only = Case("z2-all-groups", 2, "bf16"), (("load_module_only", True),)
    again = [
        Odd(STAGE_0, root / "anew", steps=0, load_dir=lost, load_options=unopened),
        Odd(grouped, root / "z2-all-groups", steps=0, load_dir=late, load_options=only),
    ]
    require_success(run_jobs(OTHER_RANKS, again, root / "ranks", run))
    return root


def _model_file(run_dir: Path) -> Path:
    tag = (run_dir / "latest").read_text()
    return run_dir / tag / "mp_rank_00_model_states.pt"


def _drop_optimizer(run_dir: Path, to: Path) -> None:
    """Copy a checkpoint of stage 0 as DeepSpeed 0.18.4 would have saved it in bf16."""
    tag = (run_dir / "latest").read_text()
    (to / tag).mkdir(parents=True)
    (to / "latest").write_text(tag)
    model = torch.load(_model_file(run_dir), weights_only=False)
    torch.save({**model, "optimizer": None, "ds_version": "0.18.4"}, _model_file(to))


@pytest.mark.parametrize(("job", "message"), KINDS, ids=[job.case.name for job, _ in KINDS])
def test_what_cannot_be_resharded_is_refused_by_name(
    job: Odd, message: str, saved: Path, tmp_path: Path
) -> None:
    if reason := _extension(job.case):
        pytest.skip(reason)
    for target in (1, 4):
        with pytest.raises(UnsupportedError, match=message):
            streamshard.repartition(saved / job.case.name, tmp_path / "out", world_size=target)
    assert list(tmp_path.iterdir()) == []


def test_stage_0_that_lost_its_optimizer_loads_as_the_message_says(saved: Path) -> None:
    with pytest.raises(UnsupportedError, match="load_optimizer_states=False"):
        streamshard.inspect(saved / "no-optimizer")
    before, after = (
        torch.load(_model_file(saved / name), weights_only=False)["module"]
        for name in ("no-optimizer", "anew")
    )
    assert list(value_differences(before, after, "module")) == []


def test_weights_saved_with_a_late_param_group_load_as_the_message_says(saved: Path) -> None:
    """On any ranks; this engine's own were others."""
    before, after = (
        torch.load(next((saved / name).glob("*/mp_rank_00_model_states.pt")), weights_only=False)
        for name in ("z2-late-group", "z2-all-groups")
    )
    assert list(value_differences(before["module"], after["module"], "module")) == []

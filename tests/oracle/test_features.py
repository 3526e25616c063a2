"""What DeepSpeed's rarer features save resumes on other ranks, or is refused by name."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import SourceError, UnsupportedError
from tests.oracle.cases import BF16
from tests.oracle.features import (
    Config,
    Feature,
    HalfFrozen,
    LowRank,
    a_group_more,
    cases,
    quantizer,
    zero,
)
from tests.oracle.jobs import Resume, Train
from tests.oracle.laws import *  # noqa: F403
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
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
    assert found == 1


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


def odd(name: str, stage: int, overrides: Config, stand_in: Any = nullcontext, **more: Any) -> Case:  # noqa: ANN401
    """Make a case that cannot be resharded."""
    feature = Feature(overrides, stand_in, more.pop("saving", nullcontext))
    return Case(f"z{stage}-{name}", stage, "bf16", topology=feature, warms_up=False, **more)


QUANTISED = odd(
    "quantised", 3, zero(zero_quantized_nontrainable_weights=True), quantizer, model=HalfFrozen,
    one_group=True,
)  # fmt: skip
LATE_GROUP = {stage: odd("late-group", stage, {}, saving=a_group_more) for stage in (2, 3)}
REFUSED = {
    QUANTISED: r"weight of 'middle\.weight' is kept as int8 .*zero_quantized_nontrainable_weights",
}
for stage, advice in ((2, "load_module_only=True"), (3, "save_16bit_model")):
    REFUSED[LATE_GROUP[stage]] = (
        rf"param groups \[3\] of 4 .* added to the wrapped optimizer after .*{advice}"
    )
    REFUSED[odd("low-rank", stage, {}, model=LowRank, one_group=True)] = (
        r"'q_proj\.weight' has 192 of 384 elements: trained with .*'s base_weight_sharding"
    )
STAGE_0 = Case("z0-bf16", 0, "bf16")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every engine has saved, under its case's name."""
    root = tmp_path_factory.mktemp("refused")
    cases = [STAGE_0, *REFUSED]
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

"""Which job each value of a grafted training is of."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from streamshard.formats.pickle.inert import Call, Node
from streamshard.grafting.job_state import GraftedState, grafted_state
from tests.grafting.model_parts import inert, model_part, settings

OLD = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
NEW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01, "params": [0]}
ENGINE: dict[str, Any] = {
    "module": None,
    "buffer_names": ["b"],
    "optimizer": None,
    "param_shapes": [],
    "frozen_param_shapes": None,
    "shared_params": {},
    "frozen_param_fragments": None,
    "lr_scheduler": None,
    "data_sampler": None,
    "random_ltd": None,
    "skipped_steps": 0,
    "global_steps": 0,
    "global_samples": 0,
    "dp_world_size": 2,
    "mp_world_size": 1,
    "checkpoint_parallel_dimensions": {"pp_degree": 1},
    "ds_config": {"of": "START"},
    "ds_version": "0.19.8",
}
"""What an engine saves in its model file before the first step."""


def graft(
    source: Node,
    start: Node,
    origins: tuple[int | None, ...] = (0,),
    *,
    fresh: bool = False,
    scheduler_of_start: bool = False,
) -> GraftedState:
    return grafted_state(
        source,
        start,
        origins,
        fresh=fresh,
        scheduler_of_start=scheduler_of_start,
        config={},
    )


def model_state(source: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    one, other = (model_part([OLD], {**ENGINE, **state}) for state in (source, start))
    state = graft(one, other)
    assert state.notes == ()
    return state.model_state


OF_SOURCE = {
    "global_steps": 100,
    "global_samples": 800,
    "skipped_steps": 3,
    "data_sampler": {"consumed_samples": 800},
    "random_ltd": {"current_value": 64},
    "iteration": 100,
    "args": Call("Namespace", ()),
    "mine": None,
    "epoch": 2,
    "loops": {"fit_loop": {}},
    "pytorch-lightning_version": "2.6",
}
OF_START = {
    "module": {"of": "START"},
    "buffer_names": ["of START"],
    "param_shapes": ["of START"],
    "frozen_param_shapes": {"of": "START"},
    "frozen_param_fragments": {"of": "START"},
    "shared_params": {"of": "START"},
    "dp_world_size": 5,
    "mp_world_size": 2,
    "checkpoint_parallel_dimensions": {"of": "START"},
    "universal_checkpoint_info": {"of": "START"},
    "num_experts": [4],
    "ds_autoep_layers": ["of START"],
    "folding": {"of": "START"},
    "ds_config": {"of": "the new job"},
    "ds_version": "0.20.0",
    "sparse_tensor_module_names": {"of START"},
    "hparams_name": "of START",
    "hyper_parameters": {"layers": 3},
}


@pytest.mark.parametrize("key", OF_SOURCE)
def test_progress_and_client_state_are_those_of_the_source(key: str) -> None:
    for start in ({}, {key: "of START"}):
        assert model_state({key: OF_SOURCE[key]}, start)[key] is OF_SOURCE[key]


@pytest.mark.parametrize("key", OF_START)
def test_the_job_and_the_layout_are_those_of_start(key: str) -> None:
    for source in ({}, {key: "of the source"}):
        assert model_state(source, {key: OF_START[key]})[key] is OF_START[key]


@pytest.mark.parametrize("key", ["data_sampler", "random_ltd", "global_samples", "epoch"])
def test_what_the_source_lacks_is_that_of_start(key: str) -> None:
    source = {**ENGINE, "global_steps": 100}
    source.pop(key, None)
    for lacking in (source, {**source, key: None} if key != "epoch" else source):
        parts = model_part([OLD], lacking), model_part([OLD], {**ENGINE, key: "of START"})
        assert graft(*parts).model_state[key] == "of START"


@pytest.mark.parametrize("own", [[], [{"last_epoch": 7}]])
def test_lightning_finds_the_list_that_an_engine_does_not_save(own: list[Any]) -> None:
    """Without its param groups' base rates, the scheduler of such a job begins again."""
    parts = model_part([OLD], {**ENGINE, "lr_schedulers": own}), model_part([NEW], ENGINE)
    assert graft(*parts).model_state["lr_schedulers"] == []


def test_lightning_describes_no_model_where_start_does_not() -> None:
    assert "hyper_parameters" not in model_state({"hyper_parameters": {"layers": 2}}, {})


def test_dumps_have_no_counters() -> None:
    state = graft(model_part([OLD]), model_part([NEW], ENGINE))
    assert state.model_state == ENGINE
    assert state.notes == ("The source tells no counters and no client state: they are START's.",)


def test_nothing_that_was_read_is_changed() -> None:
    scheduler = {"last_epoch": 5, "base_lrs": [1e-3], "_last_lr": [5e-4]}
    before = model_part([{**OLD, "step": 5}], {**ENGINE, "lr_scheduler": scheduler})
    starting = model_part([NEW], {**ENGINE, "lr_scheduler": {**scheduler, "last_epoch": 0}})
    shown = repr((before, starting))
    state = graft(before, starting)
    assert repr((before, starting)) == shown
    assert state.model_state["lr_scheduler"] == scheduler


def dynamic(scale: float) -> DynamicLossScaler:
    scaler = DynamicLossScaler(scale, 1000, 1, 2, consecutive_hysteresis=False)
    scaler.cur_iter = int(scale)
    return scaler


def scaling(scaler: object, *, overflow: bool = False) -> dict[str, Any]:
    """Return what the ZeRO optimizers of the stages 1 to 3 save with a scaler."""
    is_dynamic = isinstance(scaler, DynamicLossScaler)
    return {"loss_scaler": scaler, "dynamic_loss_scale": is_dynamic, "overflow": overflow}


OTHER_SCALER = "The loss scaler is START's ({}): the source has another class ({})."
SCALERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool, str]] = {
    "dynamic": (scaling(dynamic(64), overflow=True), scaling(dynamic(2**16)), True, ""),
    "static": (scaling(LossScaler(1.0)), scaling(LossScaler(1.0)), True, ""),
    "fp16 to bf16": (
        scaling(dynamic(64)), scaling(LossScaler(1.0)), False,
        OTHER_SCALER.format("LossScaler", "DynamicLossScaler"),
    ),
    "bf16 to fp16": (
        scaling(LossScaler(1.0)), scaling(dynamic(64)), False,
        OTHER_SCALER.format("DynamicLossScaler", "LossScaler"),
    ),
    "BF16_Optimizer to stage 2": ({}, scaling(LossScaler(1.0)), False, ""),
    "stage 2 to BF16_Optimizer": (scaling(LossScaler(1.0)), {}, False, ""),
    "fp16 to BF16_Optimizer": (
        scaling(dynamic(64)), {}, False,
        OTHER_SCALER.format("none", "DynamicLossScaler"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALERS)
def test_scalers_of_one_class_are_those_of_the_source(tmp_path: Path, case: str) -> None:
    one, other, is_of_source, note = SCALERS[case]
    mine, starting = inert((one, other), tmp_path)
    parts = model_part([OLD], ENGINE, **mine), model_part([NEW], ENGINE, **starting)
    state = graft(*parts)
    assert state.notes == ((note,) if note else ())
    found = state.optimizer_file["optimizer_state_dict"]
    wanted = mine if is_of_source else starting
    assert {key: found[key] for key in found if key != "base_optimizer_state"} == wanted


def test_what_describes_the_layout_of_an_optimizer_file_is_that_of_start() -> None:
    layout = {"clip_grad": 0.5, "zero_stage": 2, "group_paddings": [1], "partition_count": [3]}
    mine = model_part([OLD], ENGINE, **dict.fromkeys(layout, "of the source"), extra=1)
    state = graft(mine, model_part([NEW], ENGINE, **layout))
    found = state.optimizer_file["optimizer_state_dict"]
    assert {key: found[key] for key in found if key != "base_optimizer_state"} == layout


def groups_of(
    old: list[dict[str, Any]],
    new: list[dict[str, Any]],
    origins: tuple[int | None, ...],
    **given: bool,
) -> list[dict[str, Any]]:
    state = graft(model_part(old, ENGINE), model_part(new, ENGINE), origins, **given)
    return settings(state.optimizer_file)


def test_settings_of_param_groups_are_those_of_start() -> None:
    mine = {**OLD, "bias_correction": True}
    assert groups_of([mine], [NEW], (0,)) == [NEW]


CHANGED: dict[str, dict[str, tuple[Any, Any]]] = {
    "FusedAdam": {"step": (40, None)},
    "Prodigy": {
        "d": (2e-4, 1e-6), "d_max": (3e-4, 1e-6), "d_numerator": (0.5, 0.0), "k": (40, 0),
        "d_hat": (1e-4, None), "d_denom": (2.0, None),
    },
    "D-Adaptation": {
        "d": (2e-4, 1e-6), "k": (40, 0), "gsq_weighted": (0.5, 0.0), "sksq_weighted": (0.5, 0.0),
        "skl1": (0.5, 0.0), "numerator_weighted": (0.5, 0.0), "g0_norm": (3.0, None),
    },
    "schedule-free": {
        "k": (40, 0), "weight_sum": (2.5, 0.0), "lr_max": (2e-3, -1.0), "train_mode": (True, False),
        "scheduled_lr": (1e-3, 0.0),
    },
}  # fmt: skip
"""Settings → what the source has, and START before its first step (None: it lacks the setting)."""


@pytest.mark.parametrize("optimizer", CHANGED)
def test_settings_that_an_optimizer_changes_come_from_the_group(optimizer: str) -> None:
    changed = CHANGED[optimizer]
    trained = {key: value for key, (value, _) in changed.items()}
    begun = {key: value for key, (_, value) in changed.items() if value is not None}
    old = [OLD, {**OLD, **trained, "d0": 1e-5}]
    new = [{**NEW, **begun, "d0": 1e-6}] * 2
    kept, made = groups_of(old, new, (1, None))
    assert kept == {**NEW, **trained, "d0": 1e-6}
    assert made == new[1]
    assert groups_of(old, new, (1, None), fresh=True) == new


def test_a_fresh_optimizer_goes_on_with_the_schedule() -> None:
    old, new = {**OLD, "lr": 2e-4, "initial_lr": 1e-3, "step": 9}, {**NEW, "initial_lr": 2e-3}
    (group,) = groups_of([old], [new], (0,), fresh=True)
    assert group == {**new, "lr": 4e-4}


ANEW = (
    "No scheduler goes on. The learning rate of param group 0 (now {}) is START's: if the source "
    "had a scheduler, in the same proportion to its base as there."
)
UNKNOWN = (
    "No file tells how far the learning rate of param group 0 (now 0.0) has come. Until START's "
    "scheduler sets another, it is the source's, or START's if the group's parameters are all new. "
    "The rule 'scheduler start' takes START's rates."
)
RATES: dict[str, tuple[dict[str, float], dict[str, float], dict[str, float], str]] = {
    "both have bases": (
        {"lr": 2e-4, "initial_lr": 1e-3}, {"lr": 0.0, "initial_lr": 2e-3}, {"lr": 4e-4}, ""
    ),
    "equal bases": (
        {"lr": 0.1 / 3, "initial_lr": 0.7}, {"lr": 0.0, "initial_lr": 0.7}, {"lr": 0.1 / 3}, ""
    ),
    "START has no scheduler yet": (
        {"lr": 2e-4, "initial_lr": 1e-3}, {"lr": 2e-3}, {"lr": 4e-4, "initial_lr": 2e-3},
        ANEW.format(0.0004),
    ),
    "neither has one": ({"lr": 1e-3}, {"lr": 2e-3}, {}, ANEW.format(0.002)),
    "neither has one, and the rates are equal": ({"lr": 1e-3}, {"lr": 1e-3}, {}, ""),
    "the source has none": (
        {"lr": 1e-3}, {"lr": 0.0, "initial_lr": 2e-3}, {}, ANEW.format(0.0)
    ),
    "a base of 0": (
        {"lr": 0.0, "initial_lr": 0.0}, {"lr": 1e-3, "initial_lr": 2e-3}, {"lr": 0.0}, UNKNOWN
    ),
}  # fmt: skip
"""Settings of the source's group and START's; what OUT's has in place of START's; the note."""


@pytest.mark.parametrize("case", RATES)
def test_rates_are_in_proportion_to_the_bases(case: str) -> None:
    mine, starting, wanted, note = RATES[case]
    parts = model_part([{**OLD, **mine}], ENGINE), model_part([{**NEW, **starting}], ENGINE)
    state = graft(*parts)
    assert settings(state.optimizer_file) == [{**NEW, **starting, **wanted}]
    assert state.notes == ((note,) if note else ())
    of_start = graft(*parts, scheduler_of_start=True)
    assert (settings(of_start.optimizer_file), of_start.notes) == ([{**NEW, **starting}], ())


def test_a_rate_in_a_tensor_is_that_of_the_source(tmp_path: Path) -> None:
    """Its elements are in no header, so nobody looks at them."""
    rate, base = inert((torch.tensor(2e-4), torch.tensor(1e-3)), tmp_path)
    old = {**OLD, "lr": rate, "initial_lr": base}
    state = graft(model_part([old], ENGINE), model_part([{**NEW, "initial_lr": base}], ENGINE))
    assert settings(state.optimizer_file)[0]["lr"] is rate
    assert "param group 0 (now <torch._utils._rebuild_tensor_v2>)" in state.notes[0]


def test_stage_0_has_no_optimizer_file() -> None:
    """Its model file holds the optimizer's state, as the engine has it."""
    source, start = (
        replace(model_part([], {**ENGINE, "optimizer": which}), optimizer_file={})
        for which in ("of the source", "of START")
    )
    state = graft(source, start, origins=())
    assert (state.model_state, state.optimizer_file) == (start.model_state, {})


def test_a_scheduler_that_only_one_job_has_is_that_of_start() -> None:
    scheduler = {"last_epoch": 5, "base_lrs": [1e-3], "_last_lr": [5e-4]}
    one, other = (
        model_part([{**group, "lr": rate, "initial_lr": 1e-3}], {**ENGINE, "lr_scheduler": state})
        for group, rate, state in ((OLD, 5e-4, scheduler), (NEW, 2e-3, None))
    )
    for source, start, which in ((one, other, "START"), (other, one, "the source")):
        state = graft(source, start)
        assert state.model_state["lr_scheduler"] is start.model_state["lr_scheduler"]
        assert settings(state.optimizer_file)[0]["lr"] == start.hyper_parameters[0]["lr"]
        (note,) = state.notes
        assert note.startswith(f"The scheduler: {which} has no state of one. So it begins again")

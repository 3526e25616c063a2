"""Decides which job each value of the training state is of, where a training goes on in another.

All that describes a job, or how its checkpoint is laid out, is START's; how far the training has
come is the source's. DeepSpeed 0.19.8 saves the model file in `runtime/engine.py`
(`_common_checkpoint_state`, and `_save_checkpoint` for client state), the optimizer file in
`runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py` and `runtime/bf16_optimizer.py`
(`state_dict` in each).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from streamshard.formats.checkpoint import ModelPart
from streamshard.formats.deepspeed import names, rare_states
from streamshard.formats.pickle.inert import Call, Node
from streamshard.grafting.schedules import (
    BASE,
    RATE,
    Origins,
    Parts,
    SchedulePlace,
    States,
    objection,
    starting_state,
)

_PROGRESS: Final = (
    "data_sampler", names.RANDOM_LTD, "skipped_steps", "global_steps", "global_samples"
)  # fmt: skip
"""Entries of DeepSpeed's in a model file that count what the training has done."""
_LIGHTNING_SCHEDULERS: Final = "lr_schedulers"
"""Client state of Lightning, which keeps the scheduler from the engine: a list of its state. A
START that the engine has saved lacks it."""
_OTHERS: Final = names.CUT_IN_MODEL | {
    names.BUFFER_NAMES, names.WHOLE_OPTIMIZER, names.SCHEDULER, names.MP_WORLD_SIZE,
    names.PARALLEL_DEGREES, names.DS_CONFIG, names.DS_VERSION, names.UNIVERSAL_INFO,
    names.EXPERT_COUNTS, names.AUTO_EXPERTS, names.OLD_AUTO_EXPERTS, names.FOLDED_EXPERTS,
    "sparse_tensor_module_names", "csr_tensor_module_names", _LIGHTNING_SCHEDULERS,
}  # fmt: skip
"""Other entries, of all versions since 0.4. What is not listed is client state."""
_OF_MODEL: Final = ("hparams_", "hyper_parameters", "datamodule_h")
"""Beginnings of keys by which Lightning's client state describes the model and the data."""
_SCALER: Final = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""Entries of an optimizer file that belong together. `BF16_Optimizer` has none of them."""
_NO_SCALING: Final = {"", "deepspeed.runtime.fp16.loss_scaler.LossScaler"}
"""Without fp16, a job has no loss scaler or one of 1 (`CreateLossScaler`)."""
COUNTED_SETTINGS: Final = rare_states.CHANGED_SETTINGS | {
    rare_states.STEP_SETTING, "d_denom", "numerator_weighted", "gsq_weighted", "sksq_weighted",
    "skl1", "g0_norm", "scheduled_lr", "train_mode",
}  # fmt: skip
"""Settings that optimizers change: FusedAdam, prodigyopt 1.1.2, dadaptation 3.2, schedulefree
1.4.1."""

OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)
"""Settings that torch's schedulers put into param groups."""
_CYCLED: Final = ("max_momentum", "base_momentum")
"""Ends between which OneCycleLR and CyclicLR take the momentum, and Adam's first beta."""


@dataclass(frozen=True)
class GraftedState:
    """The training state of OUT."""

    model_state: dict[str, Node]
    optimizer_file: dict[str, Node]
    notes: tuple[str, ...]


def grafted_state(
    source: ModelPart,
    start: ModelPart,
    origins: Origins,
    *,
    fresh: bool,
    scheduler_of_start: bool,
    config: Mapping[str, Node],
    scheduler_file: States | None = None,
) -> GraftedState:
    """Merge the dicts of a model part's files. Nodes of both are used as they are, not copied.

    `config`: START's `ds_config`.
    `scheduler_file`: what both have in `scheduler.pt` or `scheduler.bin`, if either has one.
    """
    notes: list[str] = []
    if not source.model_state:
        notes.append("The source tells no counters and no client state: they are START's.")
    states, place = _schedulers((source, start)) or scheduler_file, None
    why = None if states is None or scheduler_of_start else objection(*states)
    if why is not None:
        notes.append(f"The scheduler: {why}. So it begins again, with START's learning rates.")
    elif not scheduler_of_start:
        place = SchedulePlace((source, start), origins, states)
        notes += place.notes(config)
    model = _model_state(source.model_state, start.model_state, place)
    optimizer = dict(start.optimizer_file)
    if start.groups:
        groups = list(_param_groups((source, start), origins, place, fresh=fresh))
        scaler, remarks = _scaler(source.optimizer_file, start.optimizer_file)
        notes += remarks
        optimizer = dict(start.with_hyper_parameters(groups).optimizer_file)
        optimizer[names.OPTIMIZER] = {**optimizer[names.OPTIMIZER], **scaler}
    return GraftedState(model, optimizer, tuple(notes))


def _schedulers(parts: Parts) -> States | None:
    """Return the states of the schedulers in model files; None if there is none in either."""
    for key in (names.SCHEDULER, _LIGHTNING_SCHEDULERS):
        source, start = (part.model_state.get(key) for part in parts)
        if key == _LIGHTNING_SCHEDULERS:
            source, start = (s[0] if isinstance(s, list) and s else None for s in (source, start))
            if key not in parts[1].model_state:
                start = starting_state(source, parts[1].hyper_parameters)
        if source is not None or start is not None:
            return source, start
    return None


def _model_state(
    source: Mapping[str, Node], start: Mapping[str, Node], place: SchedulePlace | None
) -> dict[str, Node]:
    merged = dict(start)
    for key, value in source.items():
        if key in _PROGRESS:
            merged[key] = start.get(key) if value is None else value
        elif key not in _OTHERS and not key.startswith(_OF_MODEL):
            merged[key] = value
    if _LIGHTNING_SCHEDULERS in source:
        merged.setdefault(_LIGHTNING_SCHEDULERS, [])  # Lightning loads no checkpoint without it
    if place is not None and place.state is not None:
        if merged.get(names.SCHEDULER) is not None:
            merged[names.SCHEDULER] = place.state
        elif source.get(_LIGHTNING_SCHEDULERS):
            merged[_LIGHTNING_SCHEDULERS] = [place.state]
    return merged


def _param_groups(
    parts: Parts, origins: Origins, place: SchedulePlace | None, *, fresh: bool
) -> Iterator[dict[str, Node]]:
    old, starting = (part.hyper_parameters for part in parts)
    for number, (group, origin) in enumerate(zip(starting, origins, strict=True)):
        merged = dict(group)
        if place is not None:
            merged[RATE] = place.rates[number]
            # Without it, a scheduler that the job makes later takes the rate for its base.
            if any(BASE in settings for settings in old):
                merged.setdefault(BASE, place.bases[number])
            if origin is not None:
                merged |= _momentum(old[origin], group)
        if origin is not None and not fresh:
            merged |= {key: value for key, value in old[origin].items() if key in COUNTED_SETTINGS}
        yield merged


def _momentum(source: Mapping[str, Node], start: Mapping[str, Node]) -> dict[str, Node]:
    """Return the momentum that a scheduler has reached, if START's takes it the same way."""
    if any(source.get(key) is None or source[key] != start.get(key) for key in _CYCLED):
        return {}
    momentum = {"momentum": source["momentum"]} if "momentum" in source else {}
    first, betas = source.get("betas"), start.get("betas")
    if isinstance(first, list | tuple) and isinstance(betas, list | tuple):
        momentum["betas"] = (*first[:1], *betas[1:])
    return momentum


def _scaler(
    source: Mapping[str, Node], start: Mapping[str, Node]
) -> tuple[dict[str, Node], list[str]]:
    """Return the source's loss scaler if START has one of its class; else a note, if it matters."""
    states = [file.get(names.OPTIMIZER) or {} for file in (source, start)]
    nodes = [state.get(_SCALER[0]) for state in states]
    kinds = [node.name if isinstance(node, Call) else "" for node in nodes]
    if kinds[0] and kinds[0] == kinds[1]:
        return {key: states[0][key] for key in _SCALER if key in states[0]}, []
    if {*kinds} <= _NO_SCALING:
        return {}, []
    one, other = (kind.rpartition(".")[2] or "none" for kind in kinds)
    return {}, [f"The loss scaler is START's ({other}): the source has another class ({one})."]

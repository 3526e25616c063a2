"""Puts a training state into a fresh engine by hand, without a checkpoint, and trains on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.oracle.compare import differences
from tests.oracle.jobs import (
    Resume,
    _further,
    _restore_the_rest,
    finish,
    fit_for_the_next,
    start_engine,
    write_truth,
)
from tests.oracle.models import Case
from tests.oracle.places import Place, global_names
from tests.oracle.truth import Engine, Tensors, Truth, _flats, _wrapped, gather_truth, named_params


@dataclass(frozen=True)
class ByHand:
    """Start the engine of a case, hold in it what a truth says, and take steps."""

    case: Case
    wanted: Path
    """The truth to be put into the engine."""
    truth_path: Path
    further_steps: int


@dataclass(frozen=True)
class Done:
    """What the engines held."""

    old: Truth
    wanted: Truth
    """What the resumed one is to hold."""
    resumed: Truth
    after: Truth
    """The resumed one after three steps."""
    hand: Truth | None = None
    """An engine of the new job into which all that was put by hand."""
    hand_after: Truth | None = None

    def require_the_same(self) -> None:
        """Require that the resumed engine holds what it is to hold, and trains on so."""
        assert decisive_differences(self.wanted, self.resumed) == []
        assert self.resumed.client_state.keys() == self.old.client_state.keys()
        if self.hand is not None and self.hand_after is not None:
            assert decisive_differences(self.resumed, self.hand) == []
            assert decisive_differences(self.after, self.hand_after) == []
        assert self.after.counters["global_steps"] == self.resumed.counters["global_steps"] + 3
        before, after = self.resumed.states["fp32"], self.after.states["fp32"]
        assert any(not torch.equal(value, before[name]) for name, value in after.items())


def decisive_differences(one: Truth, other: Truth) -> list[str]:
    """Compare what decides the next step; client state is not put in by hand."""
    return differences(replace(one, client_state={}), replace(other, client_state={}))


def by_hand(job: ByHand) -> None:
    """Do it in this rank."""
    with fit_for_the_next():
        _by_hand(job)


def _by_hand(job: ByHand) -> None:
    engine = start_engine(job.case, 31)
    wanted = Truth.load(job.wanted)
    _restore_the_rest(engine, wanted)
    _put_states(engine, wanted)
    if hasattr(engine.optimizer, "loss_scaler"):
        scaler = vars(engine.optimizer.loss_scaler)
        scaler.update({key: wanted.scaler[key] for key in scaler.keys() & wanted.scaler.keys()})
    write_truth(gather_truth(engine, {}), job.truth_path)
    resume = Resume(job.case, job.wanted, job.truth_path, further_steps=job.further_steps)
    _further(engine, resume, job.truth_path, {})
    finish(engine, job.case)


def _put_states(engine: Engine, wanted: Truth) -> None:
    """Fill this rank's partitions, and the optimizer's states of them."""
    optimizer, named = engine.optimizer, global_names(engine)
    names = {id(param): named(name) for name, param in named_params(engine)}
    for flat in _flats(optimizer):
        places = [
            Place.of(names[id(param)], param, offset)
            for param, offset in zip(flat.params, flat.offsets, strict=True)
        ]
        held = {names[id(param)] for param in flat.params}
        group = next(one for one in wanted.groups if held <= {*one["params"]})
        sharers = _sharers(optimizer, flat.group)
        states = {
            state: _partition(tensors, places, flat.master, sharers)
            for state, tensors in wanted.states.items()
            if held <= tensors.keys()
        }
        flat.master.data.copy_(states.pop("fp32"))
        if states:
            # What only the states of other elements have, such as the step, is of the group.
            scalars = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group["scalars"].items()
            }
            _wrapped(optimizer).state[flat.master] = {**states, **scalars}
        _wrapped(optimizer).param_groups[flat.group].update(group["hyper_parameters"])


def _sharers(optimizer: Any, group: int) -> Any:  # noqa: ANN401
    """Return the group of ranks that share the partitions of a param group."""
    if hasattr(optimizer, "real_dp_process_group"):  # experts are shared by fewer
        return optimizer.real_dp_process_group[group]
    return optimizer.dp_process_group


def _partition(
    tensors: Tensors,
    places: Sequence[Place],
    master: torch.Tensor,
    sharers: Any,  # noqa: ANN401
) -> torch.Tensor:
    """Return this rank's part of a state, with zeros for padding."""
    numel, rank = master.numel(), distributed.get_rank(sharers)
    whole = torch.zeros(numel * distributed.get_world_size(sharers), dtype=master.dtype)
    mine = whole[rank * numel : (rank + 1) * numel]
    for place in places:
        value = tensors[place.name].flatten()
        if place.shard is None:
            whole[place.start : place.start + value.numel()] = value
        else:
            part = value[rank * place.shard : (rank + 1) * place.shard]
            mine[place.start : place.start + part.numel()] = part
    return mine.view_as(master)

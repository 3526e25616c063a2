"""Reads optimizer states saved with `elastic_checkpoint` as if saved without it.

With it, `DeepSpeedZeroOptimizer.state_dict` (0.19.8) saves a list of the groups' states, without
padding, in place of the wrapped optimizer's state dict. It saves no hyper-parameters.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamshard.errors import DisagreementError, Option, UnsupportedError
from streamshard.formats.checkpoint import LIKE, ModelPart
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.rank_files import require
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.torch_tensor import storages_in


def is_elastic(states: Sequence[Mapping[str, Node]]) -> bool:
    """Tell whether the ranks' optimizer states were saved with `elastic_checkpoint`."""
    return any(isinstance(state.get(names.BASE_OPTIMIZER), list) for state in states)


def expand_elastic_state(
    states: Sequence[dict[str, Node]], paths: Sequence[Path], like: ModelPart | None
) -> None:
    """Replace the list that `elastic_checkpoint` saved by the wrapped optimizer's state dict.

    `like`: the same part of the model in a reference checkpoint of the same job. It supplies the
    hyper-parameters.
    """
    if like is None:
        message = (
            f"saved with elastic_checkpoint, which keeps no hyper-parameters of the "
            "optimizer (learning rate, betas, weight decay): give another checkpoint of the same "
            f"job with {Option('like')}, saved without elastic_checkpoint, before or after; theirs "
            "are taken"
        )
        raise UnsupportedError(message, path=paths[0])
    groups = like.wrapped_optimizer["param_groups"]
    if next(storages_in(groups), None) is not None:
        message = "saved with elastic_checkpoint, and the hyper-parameters of"
        raise UnsupportedError(f"{message} {LIKE} are tensors; not supported", path=paths[0])
    for state, path in zip(states, paths, strict=True):
        state[names.BASE_OPTIMIZER] = _expanded(state, path, groups)


def _expanded(state: dict[str, Node], path: Path, groups: Sequence[Mapping[str, Any]]) -> Node:
    wrapped = require(state, names.BASE_OPTIMIZER, path)
    if not isinstance(wrapped, list) or len(wrapped) != len(groups):
        count = f"{len(wrapped)} groups" if isinstance(wrapped, list) else "no elastic_checkpoint"
        message = f"{count}, {LIKE} has {len(groups)} groups"
        raise DisagreementError(message, path=path)
    counted = names.ELASTIC_STEP in state
    step = state.pop(names.ELASTIC_STEP, None)
    serialized = []
    for number, group in enumerate(groups):
        if ("step" in group) != counted:
            message = f"of another optimizer than {LIKE}: one of the two counts steps in its param"
            raise DisagreementError(f"{message} groups", path=path)
        own = {"step": step} if counted else {}
        serialized.append({**group, **own, "params": [number]})
    return {"state": {k: v for k, v in enumerate(wrapped) if v}, "param_groups": serialized}


def require_same_groups(params: Sequence[Sequence[str]], like: ModelPart, path: Path) -> None:
    """Refuse a reference checkpoint whose param groups hold other parameters.

    `params`: names of each group's parameters, as in the files.
    """
    theirs = {g.number: g.params for g in like.groups if g.expert_rank == 0}
    for number, own in enumerate(params):
        other = set(own) ^ set(theirs[number])
        if other:
            message = (
                f"parameter '{min(other)}' is in param group {number} either here or in "
                f"{LIKE}, but not in both: not of the same job"
            )
            raise DisagreementError(message, path=path)

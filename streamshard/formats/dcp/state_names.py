"""Sorts the keys of a distributed checkpoint: weights, optimizer states, param groups, the rest.

The keys are those of a flattened state dict, and each program nests it in its own way::

    model.<name>   optimizer.state.<name>.exp_avg          torch's get_state_dict; Accelerate
                   optimizer.param_groups.0.lr
    <name>         optimizer.state.<name>.exp_avg          torchtitan, and
                   optimizer.param_groups.<name>.lr        flatten_optimizer_state_dict=True
    app.model.<name>   app.optim.state.<name>.exp_avg      torch's tutorials

Where the value stood in the state dict before it was flattened, torch's planner records. So a key
is not taken apart at its dots, unless the program itself had joined the parts.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.dcp.dcp_names import PARAM_GROUPS, PARAM_OPTIONS, STATE
from streamshard.formats.dcp.metadata_reader import Index
from streamshard.formats.pickle.inert import show, show_few

_MODELS: Final = ("model", "module", "state_dict", "model_state_dict", "")
"""Last part of where a model's own state dict stands, the usual ones first."""
_OPTIMIZERS: Final = ("optimizer", "optim", "optimizers", "optimizer_0", "optimizer_state_dict")
_BESIDE: Final = ("train_state", "lr_scheduler", "dataloader", "scheduler", "rng_state", "client")
"""What stands next to a model's own tensors at the top of a state dict (torchtitan)."""
_NUMBERED: Final = (
    "The optimizer's states are not read, as they are numbered, and numbers name no parameters: "
    "save what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns, in place "
    "of optimizer.state_dict()."
)
_WRAPPERS: Final = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile give to all names of a model."""


@dataclass(slots=True)
class StateKeys:
    """The keys of a state dict, by what they are."""

    weights: dict[str, str] = field(default_factory=dict)
    """Name of a parameter or a buffer → its key."""
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    """Parameter → state → its key."""
    groups: dict[str, dict[str, str]] = field(default_factory=dict)
    """Param group, by number or, of flattened ones, by parameter → option → its key."""
    by_parameter: bool = False
    """Whether each parameter has options of its own, as in a flattened optimizer."""
    copies: dict[str, dict[str, str]] = field(default_factory=dict)
    """Parameter → option → its key, where options are kept by parameter too."""
    wrapper: str = ""
    """What was taken off the names of all parameters."""
    extras: list[str] = field(default_factory=list)
    """Everything else."""
    unread: str = ""
    """Why the optimizer's states are not among these, although they are there."""


def sort_keys(index: Index, param_names: Set[str] = frozenset()) -> StateKeys:
    """Sort the keys of a distributed checkpoint.

    `param_names`: those of the model's parameters, if they are known. Without them, a prefix that
    all names have and that wrappers give is taken for a wrapper's.
    """
    keys, paths = StateKeys(), {}
    optimizers: set[tuple[str, ...]] = set()
    for key in (*index.tensors, *index.values):
        path = index.paths.get(key) or _split(key)
        known_path = _of_optimizer(path)
        if known_path is None:
            paths[key] = path
            continue
        container, kind, owner, option = known_path
        optimizers.add(container)
        if kind == STATE:
            by_owner = keys.states
        else:
            is_of_group = owner.isdecimal() and (len(path) > len(container) + 1 or not index.paths)
            by_owner = keys.groups if is_of_group else keys.copies
        if by_owner.setdefault(owner, {}).setdefault(option, key) != key:
            raise CorruptFileError(f"{show(key)} and {show(by_owner[owner][option])} mean the same")
    if not keys.groups:
        keys.groups, keys.copies, keys.by_parameter = keys.copies, {}, True
    if len(optimizers) > 1:
        listed = show_few([".".join(path) for path in sorted(optimizers)])
        message = f"{len(optimizers)} optimizers ({listed}): only checkpoints of one are read"
        raise UnsupportedError(message)
    _sort_weights(paths, index, keys)
    if not param_names or not keys.weights.keys() & param_names:
        _unwrap(keys)
    return keys


def _split(key: str) -> tuple[str, ...]:
    """Guess the path of a key that no planner recorded, from the usual roots."""
    root, _, name = key.partition(".")
    if name and root in (*_MODELS, *_OPTIMIZERS, *_BESIDE):
        return root, name
    return (key,)


def _of_optimizer(path: tuple[str, ...]) -> tuple[tuple[str, ...], str, str, str] | None:
    """Take an optimizer's path apart: container, kind, owner and option; None for another path.

    Titan's path is (optimizer, state.<name>.exp_avg), torch's (optimizer, state, <name>, exp_avg).
    """
    for at in range(1, len(path)):
        kind, _, tail = path[at].partition(".")
        if kind not in (STATE, PARAM_GROUPS, PARAM_OPTIONS) or path[at - 1] not in _OPTIMIZERS:
            continue
        if tail:
            owner, _, option = ".".join([tail, *path[at + 1 :]]).rpartition(".")
        elif len(path) > at + 2:
            owner, option = path[at + 1], ".".join(path[at + 2 :])
        else:
            continue
        if owner and option:
            return path[:at], kind, owner, option
    return None


def _sort_weights(paths: Mapping[str, tuple[str, ...]], index: Index, keys: StateKeys) -> None:
    """Find the state dict that is the model's own among those that are not the optimizer's."""
    containers: dict[tuple[str, ...], dict[str, str]] = {}
    for key, path in paths.items():
        if key in index.tensors and path[0] not in _BESIDE:
            containers.setdefault(path[:-1], {})[path[-1]] = key
    trained = keys.states.keys() | (keys.groups.keys() if keys.by_parameter else set())
    usual = [c for c in containers if (c[-1] if c else "") in _MODELS]
    fits = any(_has_all(names, trained) for names in containers.values())
    if trained and containers and not fits and all(map(str.isdecimal, trained)):
        keys.states, keys.groups, keys.copies, keys.unread = {}, {}, {}, _NUMBERED
    elif trained:
        fit = [c for c in containers if _has_all(containers[c], trained)]
        usual = [c for c in fit if c in usual] or fit
    if len(usual) > 1:
        listed = show_few([".".join(path) or "the top" for path in usual])
        raise UnsupportedError(f"{len(usual)} state dicts that may be the model's: {listed}")
    if trained and not usual and containers and not keys.unread:
        example = sorted(trained)[0]
        message = f"the optimizer has states of {show(example)}, which no model in it has"
        raise UnsupportedError(message)
    for container in usual:
        keys.weights = containers[container]
    taken = set(keys.weights.values())
    keys.extras = [key for key in paths if key not in taken]


def _has_all(names: Mapping[str, str], trained: Iterable[str]) -> bool:
    return all(
        name in names or any(wrapper + name in names for wrapper in _WRAPPERS) for name in trained
    )


def _unwrap(keys: StateKeys) -> None:
    """Take prefixes off that a wrapper gave to all names."""
    while True:
        wrapper = next(
            (w for w in _WRAPPERS if keys.weights and all(n.startswith(w) for n in keys.weights)),
            None,
        )
        if wrapper is None:
            return
        keys.wrapper += wrapper
        keys.weights = {n.removeprefix(wrapper): key for n, key in keys.weights.items()}
        keys.states = {n.removeprefix(wrapper): entry for n, entry in keys.states.items()}
        keys.copies = {n.removeprefix(wrapper): entry for n, entry in keys.copies.items()}
        if keys.by_parameter:
            keys.groups = {n.removeprefix(wrapper): entry for n, entry in keys.groups.items()}

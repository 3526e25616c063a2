"""The optimizer of a distributed checkpoint: as it is saved, and as torch (2.13) needs it."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.dcp.dcp_names import PARAMS
from streamshard.formats.dcp.item_reader import ItemFiles, TensorPlaces
from streamshard.formats.dcp.metadata_reader import Index
from streamshard.formats.dcp.state_names import StateKeys
from streamshard.formats.deepspeed.read.state_of_ranks import CODES
from streamshard.formats.deepspeed.states import Elementwise, Plain, Scalar, State
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.torch.torch_tensor import tensor_of

STEP: Final = "step"
OF_TORCH: Final = "foreach"
"""Hyper-parameter that only torch's own optimizers have: they count steps in a tensor."""
DECOUPLED: Final = "decoupled_weight_decay"
"""Hyper-parameter that tells torch's AdamW from Adam, since torch 2.7."""
OF_DEEPSPEED: Final = "bias_correction"
"""Hyper-parameter that only DeepSpeed's own Adams have: they count steps in a number."""
_SWITCHES: Final = {"maximize": False, "foreach": None, "differentiable": False}
_DEFAULTS: Final[tuple[tuple[frozenset[str], Mapping[str, Node]], ...]] = (
    (
        frozenset({"betas", "eps", "weight_decay"}),
        {"amsgrad": False, **_SWITCHES, "capturable": False, "fused": None, DECOUPLED: None},
    ),
    (frozenset({"momentum", "nesterov"}), {**_SWITCHES, "fused": None}),
    (frozenset({"lr_decay", "initial_accumulator_value"}), {**_SWITCHES, "fused": None}),
    (frozenset({"alpha", "centered"}), {**_SWITCHES, "capturable": False}),
)
"""Hyper-parameters that tell Adam, SGD, Adagrad and RMSprop → other keys, with their defaults."""
_ANEW: Final = "Resume as it was saved, or save the model alone for a start without optimizer state"
_EXACT: Final = 1 << 24
"""Counts up to this are exact in float32."""


def missing_keys(group: Mapping[str, Node], *, decouples: bool | None) -> dict[str, Node]:
    """Return the keys, with torch's defaults, that a param group lacks of torch's optimizer.

    torch loads a distributed checkpoint only if it has every key of the optimizer that loads.
    `decouples`: Adam's weight decay; None if no file says it (torch's Adam takes it for False).

    >>> sgd = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "foreach": None}
    >>> sorted(missing_keys(sgd, decouples=None))
    ['differentiable', 'fused', 'maximize']
    """
    if group.get(OF_DEEPSPEED, 1) != 1:
        message = "the optimizer runs without bias correction, which torch's Adam always makes"
        raise UnsupportedError(f"{message}: export the weights alone, as safetensors")
    missing: dict[str, Node] = {}
    for known, defaults in _DEFAULTS:
        if known <= group.keys():
            missing |= {key: value for key, value in defaults.items() if key not in group}
    return {key: decouples if key == DECOUPLED else value for key, value in missing.items()}


def step_of(state: State) -> bytes:
    """Return a step counter as torch keeps it, the bytes of one float32."""
    count = state.number()
    if count is None:
        raise UnsupportedError(f"the optimizer's step {state} is not a count of steps")
    if not (0 <= count <= _EXACT and count == int(count)):
        raise UnsupportedError(f"the optimizer's step {count} is not exact in torch's float32")
    return struct.pack("<f", count)


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """Parameters that share the options of a param group."""

    params: tuple[str, ...]
    """In the order of the checkpoint; of a flattened optimizer, in the order of its keys."""
    options: Mapping[str, Node]
    """`lr`, `betas`, …, without the parameters."""
    states: Mapping[str, State] | None
    """By their keys; None before the first step."""


class SavedOptimizer:
    """The optimizer of a distributed checkpoint."""

    def __init__(
        self,
        index: Index,
        keys: StateKeys,
        files: ItemFiles,
        places: Mapping[str, TensorPlaces],
    ) -> None:
        self._index = index
        self._keys = keys
        self._places = places
        owned = [*keys.groups.values(), *keys.copies.values(), *keys.states.values()]
        wanted = [key for by_option in owned for key in by_option.values() if key in index.values]
        self._values = files.values(wanted)

    def groups(self) -> list[SavedGroup]:
        """Read the param groups.

        A flattened optimizer has options by parameter, and does not tell which parameters shared a
        group: those with equal options and states are one group here. Parameters without states,
        as no gradient has reached them yet, are a group of their own too.
        """
        if self._keys.by_parameter:
            return self._by_options()
        groups: list[SavedGroup] = []
        listed: dict[str, str] = {}
        for number in sorted(self._keys.groups, key=int):
            options = self.options(number)
            listed_names = _names(options.pop(PARAMS, None), number)
            params = tuple(name.removeprefix(self._keys.wrapper) for name in listed_names)
            for name in params:
                if listed.setdefault(name, number) != number or params.count(name) > 1:
                    raise CorruptFileError(f"'{name}' is in two param groups")
            self._require_copies(params, number, options)
            begun = tuple(name for name in params if name in self._keys.states)
            rest = tuple(name for name in params if name not in self._keys.states)
            groups += [
                SavedGroup(names, options, self.states_of(names))
                for names in ([begun, rest] if begun and rest else [params])
            ]
        for name in self._keys.states:
            if name not in listed:
                raise CorruptFileError(f"the optimizer has states of {show(name)}, in no group")
        return groups

    def _require_copies(
        self, params: Sequence[str], number: str, options: Mapping[str, Node]
    ) -> None:
        """Refuse options that are kept by parameter too, and differ from their group's."""
        for name in params:
            for option, key in self._keys.copies.get(name, {}).items():
                value = self._value(key)
                if option not in options or repr(value) != repr(options[option]):
                    message = f"{show(key)} is {show(value)}, in param group {number} it is"
                    raise DisagreementError(f"{message} {show(options.get(option))}")

    def _by_options(self) -> list[SavedGroup]:
        members: dict[str, list[str]] = {}
        by_name: dict[str, dict[str, Node]] = {}
        for name in self._keys.groups:
            options, states = self.options(name), self.states_of([name]) or {}
            documents = {key: state.document() for key, state in states.items()}
            text = repr([sorted(options.items()), sorted(documents.items())])
            members.setdefault(text, []).append(name)
            by_name[text] = options
        for name in self._keys.states:
            if name not in self._keys.groups:
                raise CorruptFileError(f"the optimizer has states of {show(name)}, in no group")
        return [
            SavedGroup(tuple(names), by_name[text], self.states_of(names))
            for text, names in members.items()
        ]

    def options(self, owner: str) -> dict[str, Node]:
        """Read the options of a group, or of one parameter of a flattened optimizer."""
        return {name: self._value(key) for name, key in self._keys.groups[owner].items()}

    def states_of(self, params: Sequence[str]) -> Mapping[str, State] | None:
        """Read the states that parameters share; None if none of them has any."""
        keys = {name: self._keys.states.get(name, {}) for name in params}
        return common_states(
            {
                name: {s: self._state(name, key) for s, key in own.items()}
                for name, own in keys.items()
            }
        )

    def _state(self, name: str, key: str) -> State:
        tensor = self._index.tensors.get(key)
        if tensor is None:
            return Plain(self._value(key))
        weight = self._keys.weights.get(name)
        shape = self._index.tensors[weight].shape if weight is not None else None
        if tensor.shape == () and (shape != () or key.endswith(".step")):
            return self._scalar(key)
        if tensor.shape != shape:
            message = f"'{key}' has the shape {list(tensor.shape)}, its parameter"
            message = f"{message} {list(shape or ())}: only states with an element for each of the"
            raise UnsupportedError(f"{message} parameter")
        if tensor.dtype in CODES and shape:
            message = f"'{key}' holds codes of {tensor.dtype}: 8-bit optimizers such as those of"
            message = f"{message} bitsandbytes keep a scale for every block of them, and blocks"
            raise UnsupportedError(f"{message} are not cut. {_ANEW}")
        return Elementwise(tensor.dtype)

    def _scalar(self, key: str) -> Scalar:
        tensor = self._index.tensors[key]
        return Scalar(tensor.dtype, (), self._places[key].scalar)

    def _value(self, key: str) -> Node:
        """Read a plain value: a number, a text, a flag, a small tuple or list of these."""
        if key in self._index.tensors:
            if self._index.tensors[key].shape != ():
                raise UnsupportedError(f"'{key}' is a tensor that is no state of a parameter")
            return number_in(key, self._scalar(key))
        value = self._values[key]
        if tensor_of(value) is not None or not is_plain(value):
            raise UnsupportedError(f"'{key}' is {show(value)}, which no ZeRO optimizer keeps")
        return value


def common_states(states: Mapping[str, Mapping[str, State]]) -> Mapping[str, State] | None:
    """Return the states that the parameters of a group share; None if they have none."""
    first = next(iter(states), "")
    for name, own in states.items():
        for key in {**states[first], **own}:
            pair = states[first].get(key), own.get(key)
            if _bits(pair[0]) != _bits(pair[1]):
                shown = ["not at all" if state is None else str(state) for state in pair]
                message = f"'{first}' has {key} {shown[0]}, '{name}' of"
                message = f"{message} the same param group {shown[1]}"
                raise DisagreementError(f"{message}: ZeRO keeps one for all")
    return states[first] or None if states else None


def number_in(key: str, scalar: Scalar) -> int | float:
    """Return the number that a tensor of one element holds."""
    number = scalar.number()
    if number is None:
        raise UnsupportedError(f"its {key} is {scalar.dtype}, which is no number of an optimizer")
    return number


def _bits(state: State | None) -> str:
    """Return a text that is the same only for the same bits."""
    return "" if state is None else repr(state.document())


def is_plain(value: Node, depth: int = 3) -> bool:
    """Tell whether a value is a number, a text, a flag, or a small tuple or list of these."""
    if isinstance(value, list | tuple):
        return depth > 0 and all(is_plain(part, depth - 1) for part in value)
    return value is None or isinstance(value, bool | int | float | str)


def _names(node: Node, number: str) -> tuple[str, ...]:
    if not isinstance(node, list | tuple) or not all(isinstance(name, str) for name in node):
        raise CorruptFileError(f"param group {number} lists no names of parameters: {show(node)}")
    return tuple(node)

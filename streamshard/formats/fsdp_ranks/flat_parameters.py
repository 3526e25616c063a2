"""Tells which parameters FSDP1 has joined to flat ones, and how ranks cut these.

Without `use_orig_params` FSDP1 joins the parameters of each module that it wraps, in the order of
`named_modules()`, except those of modules inside that it wraps too; `torch.chunk` cuts what comes
out, and zeros fill the last part. The optimizer numbers flat parameters in the order of the wrapped
modules (torch 2.5 to 2.13: `torch/distributed/fsdp/_flat_param.py`). No file lists the wrapped
modules. verl, Accelerate and torch's own policies wrap a model's `_no_split_modules`: each layer of
a numbered list. So these are taken, if the parts then have the lengths that the files have.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from streamshard.errors import Option, UnsupportedError, UsageError, lacking
from streamshard.formats.dcp.renaming import name_pattern
from streamshard.formats.pickle.inert import Call, Global, Node, show_few
from streamshard.formats.torch.torch_tensor import Storage, Tensor, make_tensor, tensor_of
from streamshard.layout.zero import FlatGroup, ceil_div, flat_group
from streamshard.model import Literal
from streamshard.sizes import counted

Names = tuple[str, ...]
_FLAT: Final = Global("torch.distributed.fsdp", "FlatParameter")
_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_PARAMS: Final = "params"
WRAPPED: Final = Option("facts", what="source.wrapped")
_LAYER: Final = re.compile(r"(?:(?!\d+\.)[^.]+\.)*\d+")
"""The outermost numbered module around a parameter, such as `model.layers.7`."""


def flat_node(tensors: Sequence[Node]) -> Call:
    """Return what stands for a flat tensor: the parameters' parts of it, each whole."""
    return Call(_FLAT, tuple(tensors))


def is_flat(node: Node) -> bool:
    """Tell whether a node stands for a flat tensor."""
    return isinstance(node, Call) and node.function == _FLAT


def group_of(numels: Sequence[int], ranks: int) -> FlatGroup:
    """Return how ranks cut what parameters of such lengths are joined to.

    >>> group_of([5, 4], 2).slices(1)
    ((1, 0, 4),)
    """
    group = flat_group(numels, world_size=ranks, round_robin=False, alignment=1)
    return replace(group, partition_numel=ceil_div(group.numel, ranks))


def joined_parameters(
    numels: Mapping[str, int], lengths: Sequence[int], ranks: int, wrapped: Sequence[str] = ()
) -> tuple[Names, ...]:
    """Return the parameters in each flat parameter: in the root's first, then in each module's.

    `numels`: elements of each parameter, in the model's order.
    `lengths`: elements of each flat parameter that a rank has, in the optimizer's order.
    `wrapped`: patterns of the modules that were wrapped in the model; by default each layer.

    >>> numels = {"embed": 6, "layers.0.up": 8, "layers.0.bias": 2, "layers.1.up": 7, "norm": 2}
    >>> joined_parameters(numels, [4, 5, 4], 2)
    (('embed', 'norm'), ('layers.0.up', 'layers.0.bias'), ('layers.1.up',))
    >>> numels = {"layers.0.up": 8, "layers.0.mlp.down": 4, "layers.0.bias": 2, "norm": 2}
    >>> joined_parameters(numels, [1, 5, 2], 2, ["layers.*", "layers.*.mlp"])
    (('norm',), ('layers.0.up', 'layers.0.bias'), ('layers.0.mlp.down',))
    """
    if wrapped:
        _require_modules(numels, wrapped)
    is_wrapped = [name_pattern(pattern).fullmatch for pattern in wrapped] or [_LAYER.fullmatch]
    joined: dict[str, list[str]] = {"": []}
    for name in numels:
        around = [m for m in _around(name) if any(matches(m) for matches in is_wrapped)]
        for module in around:
            joined.setdefault(module, [])
        joined[around[-1] if around else ""].append(name)
    parameters = tuple(tuple(names) for names in joined.values() if names)
    sums = [sum(map(numels.__getitem__, names)) for names in parameters]
    if [ceil_div(numel, ranks) for numel in sums] == [*lengths]:
        return parameters
    flat = f"{counted(len(lengths), 'flat parameter')} of FSDP1, of {show_few(lengths)} elements"
    if wrapped:
        message = f"{WRAPPED}: the files have {flat} per rank; these modules give other lengths"
        raise UsageError(message)
    message = f"has {flat} per rank. If FSDP1 had wrapped each layer of a numbered list, they would"
    message = f"{message} have other lengths. Name what it wrapped"
    raise UnsupportedError(f"{message}: {lacking('wrapped')}")


def _require_modules(numels: Mapping[str, int], wrapped: Sequence[str]) -> None:
    """Refuse a pattern that no module around a parameter matches."""
    modules = dict.fromkeys(module for name in numels for module in _around(name))
    for pattern in wrapped:
        if not any(map(name_pattern(pattern).fullmatch, modules)):
            message = f"{WRAPPED}: no module around a parameter is named '{pattern}'"
            raise UsageError(f"{message}; there are {show_few([*modules])}")


def evened_roots(roots: Sequence[Any]) -> list[Any] | None:
    """Let each rank have the states of all parameters, with no elements where it has none.

    With `use_orig_params` a rank has those of which elements are in its parts of flat parameters.
    None if what ranks have differs in another way.
    """
    if not all(isinstance(root, dict) and isinstance(root.get(_STATE), dict) for root in roots):
        return None
    rank_states = [root[_STATE] for root in roots]
    first = {key: states for own in reversed(rank_states) for key, states in own.items()}
    nodes = [node for own in rank_states for states in own.values() for node in states.values()]
    if not all(isinstance(node, Call) and _is_run(tensor_of(node)) for node in nodes):
        return None
    empty = {key: {k: _emptied(n) for k, n in states.items()} for key, states in first.items()}
    order = [key for group in roots[0][_GROUPS] for key in group[_PARAMS] if key in first]
    if len(order) != len(first):
        return None
    return [
        {**root, _STATE: {key: own.get(key, empty[key]) for key in order}}
        for root, own in zip(roots, rank_states, strict=True)
    ]


def _is_run(tensor: Tensor | None) -> bool:
    return tensor is not None and len(tensor.shape) <= 1


def _emptied(node: Call) -> Node:
    tensor = tensor_of(node)
    if tensor is None or not tensor.shape:
        return node
    return make_tensor(Storage(tensor.dtype, 0, Literal(b"")), (0,))


def _around(name: str) -> list[str]:
    """Return the modules around a parameter in the model, the outermost first.

    >>> _around("model.layers.0.norm.weight")
    ['model', 'model.layers', 'model.layers.0', 'model.layers.0.norm']
    """
    steps = name.split(".")[:-1]
    return [".".join(steps[: n + 1]) for n in range(len(steps))]

"""Reads where AutoEP placed the experts of each layer, as model files tell it.

AutoEP makes one parameter of the experts of a layer that a rank has: `…experts.w1` and two more,
whose first dimension counts them (`deepspeed/module_inject/auto_ep_layer.py`, 0.19.8). Here the
part of each expert is a tensor of its own, whichever rank holds it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Node, show

Placement = tuple[tuple[int, ...], ...]
"""The experts of each expert rank, in the order in which its parameters have them."""

_WEIGHTS: Final = ("w1", "w2", "w3")
_FORMAT: Final = "per_expert_files"
_ANEW: Final = "Save again with DeepSpeed 0.19.8"


def placements(
    model: Mapping[str, Node], shapes: Mapping[str, Sequence[int]], path: Path
) -> dict[str, Placement]:
    """Return where the experts are that each parameter of AutoEP has; empty without AutoEP.

    `shapes`: of each trained parameter, as the first rank has it.
    """
    layers = model.get(names.AUTO_EXPERTS) or []
    if not isinstance(layers, list):
        raise CorruptFileError(f"its '{names.AUTO_EXPERTS}' is no list", path=path)
    found: dict[str, Placement] = {}
    for layer in layers:
        for name, placement in _of_layer(layer, path):
            if name in found:
                message = f"its '{names.AUTO_EXPERTS}' lists '{name}' twice"
                raise CorruptFileError(message, path=path)
            found[name] = placement
            _require_shape(name, placement, shapes, path)
    return found


def _of_layer(layer: Node, path: Path) -> Iterator[tuple[str, Placement]]:
    entries = layer if isinstance(layer, dict) else {}
    prefix = entries.get("expert_key_prefix")
    if not isinstance(prefix, str) or not names.fused_expert_of(f"{prefix}.w1.0"):
        message = f"its '{names.AUTO_EXPERTS}' has a layer of experts under {show(prefix)}"
        raise CorruptFileError(message, path=path)
    form = entries.get("checkpoint_format")
    if form != _FORMAT:
        message = f"the experts of '{prefix}' are saved as {show(form)}, and not '{_FORMAT}'"
        raise UnsupportedError(f"{message}. {_ANEW}", path=path)
    placement = _placement(prefix, entries, path)
    for weight in _WEIGHTS:
        yield f"{prefix}.{weight}", placement


def _placement(prefix: str, layer: Mapping[str, Node], path: Path) -> Placement:
    """Read the placement of a layer's experts: each on one rank, as many on each rank."""
    what = f"the placement of the experts of '{prefix}'"
    placed, count, degree = (layer.get(k) for k in ("expert_placement", "num_experts", "ep_size"))
    version = placed.get("version") if isinstance(placed, dict) else None
    if not isinstance(placed, dict) or version != 1:
        message = f"{what} is of version {show(version)}, not 1. {_ANEW}"
        raise UnsupportedError(message, path=path)
    ranks = placed.get("ranks")
    entries = [rank if isinstance(rank, dict) else {} for rank in ranks or ()]
    noted = placed.get("num_experts"), placed.get("ep_size"), [rank.get("rank") for rank in entries]
    if noted != (count, degree, [*range(len(entries))]) or len(entries) != degree:
        message = f"{what} lists {len(entries)} ranks, and is not of {show(count)} experts on"
        raise CorruptFileError(f"{message} {show(degree)} ranks, as the layer is", path=path)
    found = tuple(tuple(rank.get("experts") or ()) for rank in entries)
    if not all(type(expert) is int for expert in chain.from_iterable(found)):
        raise CorruptFileError(f"{what} has experts without a number", path=path)
    held = [len(experts) for experts in found]
    if count != sum(held) or {*chain.from_iterable(found)} != {*range(count)}:
        message = f"the ranks have {sum(held)} experts of '{prefix}', which has {show(count)}: some"
        raise UnsupportedError(f"{message} are on several ranks, or on none", path=path)
    if len({*held}) > 1:
        message = f"the ranks have {held} experts of '{prefix}', and not as many each"
        raise UnsupportedError(f"{message}: not supported. {_ANEW}", path=path)
    return found


def _require_shape(
    name: str, placement: Placement, shapes: Mapping[str, Sequence[int]], path: Path
) -> None:
    if name not in shapes:
        message = f"the experts '{name}' are frozen, and AutoEP saves those of one rank alone in"
        raise UnsupportedError(f"{message} the model file: not supported. Train them", path=path)
    own = shapes[name]
    if len(own) < 2 or own[0] != len(placement[0]):
        message = f"'{name}' has shape {list(own)}, and {len(placement[0])} experts on a rank"
        raise DisagreementError(message, path=path)


def of_ranks(
    name: str, expert_rank: int, ranks: int | None, placed: Mapping[str, Placement]
) -> Iterator[str]:
    """Yield the names of the experts that a parameter of an expert rank has.

    `ranks`: count of expert ranks of its param group; None if that is not of experts.
    """
    placement = placed[name]
    if len(placement) != ranks:
        group = "is of no experts" if ranks is None else f"has its experts on {ranks}"
        message = (
            f"the experts '{name}' are on {len(placement)} ranks, and their param group {group}"
        )
        raise DisagreementError(message)
    yield from (names.fused_expert(name, number) for number in placement[expert_rank])


_OF_RANKS: Final = frozenset(
    {
        "num_local_experts", "ep_size", "expert_placement", "affine_maps", "ep_group_name",
        "ep_rank", "expert_data_parallel_rank", "expert_data_parallel_world_size",
        "global_expert_start", "global_expert_end",
    }
)  # fmt: skip
"""Entries of a layer that depend on the ranks of the job."""


def without_ranks(model: Mapping[str, Node]) -> Mapping[str, Node]:
    """Return a model file's dict without what AutoEP notes of ranks."""
    return with_layers(model, lambda layer: {k: v for k, v in layer.items() if k not in _OF_RANKS})


def with_sharing(model: Mapping[str, Node], world_size: int) -> Mapping[str, Node]:
    """Return a model file's dict as `world_size` data-parallel ranks save it."""

    def change(layer: Mapping[str, Node]) -> Mapping[str, Node]:
        degree = layer.get("ep_size")
        if not isinstance(degree, int) or degree < 1:
            raise CorruptFileError(f"a layer of experts is on {show(degree)} ranks")
        return {**layer, "expert_data_parallel_world_size": world_size // degree}

    return with_layers(model, change)


Layer = Mapping[str, Node]


def with_layers(model: Mapping[str, Node], change: Callable[[Layer], Layer]) -> Mapping[str, Node]:
    """Return a model file's dict with other entries of AutoEP's layers, in all places."""
    layers = model.get(names.AUTO_EXPERTS)
    if not layers:
        return model
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise CorruptFileError(f"'{names.AUTO_EXPERTS}' is no list of layers")
    changed = [change(layer) for layer in layers]
    info = model.get(names.UNIVERSAL_INFO)
    if isinstance(info, dict) and names.AUTO_EXPERTS in info:
        info = {**info, names.AUTO_EXPERTS: changed}
    both = {names.AUTO_EXPERTS: changed, names.UNIVERSAL_INFO: info}
    return {key: both.get(key, node) for key, node in model.items()}

"""Reads where AutoEP placed the experts of each layer, as model files tell it.

AutoEP makes one parameter of the experts of a layer that a rank has: `…experts.w1` and two more,
whose first dimension counts them (`deepspeed/module_inject/auto_ep_layer.py`, 0.19.8). Here the
part of each expert is a tensor of its own, whichever rank holds it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Node, show
from streamshard.model import ZeroLayout

_WEIGHTS: Final = ("w1", "w2", "w3")
_FORMATS: Final = {"per_expert_files": (1, 2), "zero3_partitioned": (3,)}
"""How experts are saved → the ZeRO stages at which they are."""
_ANEW: Final = "Save again with DeepSpeed 0.19.8"


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Where the experts are that a layer's parameters have."""

    experts: tuple[tuple[int, ...], ...]
    """Of each expert rank, in the order in which its parameters have them."""

    def names_of(self, name: str, expert_rank: int, ranks: int | None) -> tuple[str, ...]:
        """Return the names of the experts that a parameter of an expert rank has.

        `ranks`: count of expert ranks of its param group; None if that is not of experts.
        """
        if len(self.experts) != ranks:
            group = "is of no experts" if ranks is None else f"has its experts on {ranks}"
            count = len(self.experts)
            message = f"the experts '{name}' are on {count} ranks, and their param group {group}"
            raise DisagreementError(message)
        return tuple(names.fused_expert(name, number) for number in self.experts[expert_rank])


def placements(
    model: Mapping[str, Node], shapes: Mapping[str, Sequence[int]], path: Path, stage: int
) -> dict[str, ExpertPlacement]:
    """Return where the experts are that each parameter of AutoEP has.

    `shapes`: of each trained parameter, as the first rank has it.
    """
    layers = model.get(names.AUTO_EXPERTS) or []
    if not isinstance(layers, list):
        raise CorruptFileError(f"its '{names.AUTO_EXPERTS}' is no list", path=path)
    param_placements: dict[str, ExpertPlacement] = {}
    for layer in layers:
        for name, placement in _of_layer(layer, path, stage):
            if name in param_placements:
                message = f"its '{names.AUTO_EXPERTS}' lists '{name}' twice"
                raise CorruptFileError(message, path=path)
            param_placements[name] = placement
            _require_shape(name, placement, shapes, path)
    return param_placements


def _of_layer(layer: Node, path: Path, stage: int) -> Iterator[tuple[str, ExpertPlacement]]:
    entries = layer if isinstance(layer, dict) else {}
    prefix = entries.get("expert_key_prefix")
    if not isinstance(prefix, str) or not names.fused_expert_of(f"{prefix}.w1.0"):
        message = f"its '{names.AUTO_EXPERTS}' has a layer of experts under {show(prefix)}"
        raise CorruptFileError(message, path=path)
    form = entries.get("checkpoint_format")
    if not isinstance(form, str) or stage not in _FORMATS.get(form, ()):
        message = f"the experts of '{prefix}' are saved as {show(form)}, at stage {stage}"
        raise UnsupportedError(f"{message}. {_ANEW}", path=path)
    placement = _placement(prefix, entries, path)
    for weight in _WEIGHTS:
        yield f"{prefix}.{weight}", placement


def _placement(prefix: str, layer: Mapping[str, Node], path: Path) -> ExpertPlacement:
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
    rank_experts = tuple(tuple(rank.get("experts") or ()) for rank in entries)
    if not all(type(expert) is int for expert in chain.from_iterable(rank_experts)):
        raise CorruptFileError(f"{what} has experts without a number", path=path)
    counts = [len(experts) for experts in rank_experts]
    if count != sum(counts) or {*chain.from_iterable(rank_experts)} != {*range(count)}:
        message = f"the ranks have {sum(counts)} experts of '{prefix}', which has {show(count)}"
        raise UnsupportedError(f"{message}: some are on several ranks, or on none", path=path)
    if len({*counts}) > 1:
        message = f"the ranks have {counts} experts of '{prefix}', and not as many each"
        raise UnsupportedError(f"{message}: not supported. {_ANEW}", path=path)
    return ExpertPlacement(rank_experts)


def _require_shape(
    name: str, placement: ExpertPlacement, shapes: Mapping[str, Sequence[int]], path: Path
) -> None:
    if name not in shapes:
        message = f"the experts '{name}' are frozen, and AutoEP saves those of one rank alone in"
        raise UnsupportedError(f"{message} the model file: not supported. Train them", path=path)
    own = shapes[name]
    if len(own) < 2 or own[0] != len(placement.experts[0]):
        message = (
            f"'{name}' has shape {list(own)}, and {len(placement.experts[0])} experts on a rank"
        )
        raise DisagreementError(message, path=path)


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


def of_rank(model: Mapping[str, Node], layout: ZeroLayout, rank: int) -> Mapping[str, Node]:
    """Return a model file's dict as a data-parallel rank saves it."""

    def change(layer: Layer) -> Layer:
        degree, local_count = layer.get("ep_size"), layer.get("num_local_experts")
        if not isinstance(degree, int) or degree < 1 or not isinstance(local_count, int):
            raise CorruptFileError(
                f"a layer of {show(local_count)} experts each is on {show(degree)} ranks"
            )
        expert_rank, sharer = layout.expert_place(rank, degree)
        return {
            **layer,
            "ep_rank": expert_rank,
            "expert_data_parallel_rank": sharer,
            "expert_data_parallel_world_size": layout.world_size // degree,
            "global_expert_start": expert_rank * local_count,
            "global_expert_end": (expert_rank + 1) * local_count,
        }

    return with_layers(model, change)


Layer = Mapping[str, Node]


def with_layers(model: Mapping[str, Node], change: Callable[[Layer], Layer]) -> Mapping[str, Node]:
    """Return a model file's dict with other entries of AutoEP's layers, in all places."""
    layers, info = model.get(names.AUTO_EXPERTS), model.get(names.UNIVERSAL_INFO)
    if not layers:
        return model
    layer_lists: dict[int, list[Layer]] = {}

    def changed(listed: Node) -> list[Layer]:
        # What is one object in a file stays one, and what stays as it is stays the same object.
        if id(listed) not in layer_lists:
            if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
                raise CorruptFileError(f"'{names.AUTO_EXPERTS}' is no list of layers")
            new_layers = [change(layer) for layer in listed]
            layer_lists[id(listed)] = listed if new_layers == listed else new_layers
        return layer_lists[id(listed)]

    entries = {names.AUTO_EXPERTS: changed(layers), names.UNIVERSAL_INFO: info}
    if isinstance(info, dict) and names.AUTO_EXPERTS in info:
        new_layers = changed(info[names.AUTO_EXPERTS])
        if new_layers is not info[names.AUTO_EXPERTS]:
            entries[names.UNIVERSAL_INFO] = {**info, names.AUTO_EXPERTS: new_layers}
    return {key: entries.get(key, node) for key, node in model.items()}


def second_names(model: Mapping[str, Node], module: Collection[str]) -> dict[str, str]:
    """Return the second names of routers' weights → their first names.

    A layer has its router under the name that Hugging Face's model gives it, too. DeepSpeed lists
    that nowhere, as the module is the same.
    """
    layers = model.get(names.AUTO_EXPERTS) or []
    paths = {layer.get("module_path") for layer in layers if isinstance(layer, dict)}
    second: dict[str, str] = {}
    for name in module:
        parts = name.split(".")
        for length in range(1, len(parts) - 1):
            path, own = ".".join(parts[:length]), parts[length]
            first = ".".join([path, "router", *parts[length + 1 :]])
            if path in paths and own != "router" and first in module:
                second[name] = first
    return second

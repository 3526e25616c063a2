"""Places AutoEP's experts on another count of ranks, as its engines do and note it.

Each rank gets as many, in the order of their numbers: `legacy_uniform_autoep_placement_descriptor`
and `autoep_placement_to_affine_map` of `deepspeed/checkpoint/autoep_affine.py` (0.19.8).
"""

from collections.abc import Mapping
from typing import Final

from streamshard.errors import UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.auto_experts import Layer, with_layers
from streamshard.formats.deepspeed.model_parallel.affine_maps import map_of
from streamshard.formats.deepspeed.model_parallel.expert_groups import AS_SAVED
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.shapes import require_shape
from streamshard.layout.model_cut import split_cut

_SECTION: Final = "expert_parallel"
_MAPS: Final = "affine_maps"


def placed_anew(
    model: Mapping[str, Node], counts: Mapping[str, int], own: int, degree: int
) -> Mapping[str, Node]:
    """Return a model file's dict with its experts over `degree` ranks, and no longer over `own`.

    `counts`: of the experts of each layer.
    """
    return with_degree(
        with_layers(model, lambda layer: _placed(layer, counts, own, degree)), degree
    )


def with_degree(file: Mapping[str, Node], degree: int) -> Mapping[str, Node]:
    """Return a file's dict whose DeepSpeed config has the count of ranks, if it has AutoEP on."""
    config = file.get(names.DS_CONFIG)
    if not isinstance(config, dict):
        return file
    section = config.get(_SECTION)
    if not isinstance(section, dict) or not section.get("enabled"):
        return file
    return {**file, names.DS_CONFIG: {**config, _SECTION: {**section, "autoep_size": degree}}}


def _placed(layer: Layer, counts: Mapping[str, int], own: int, degree: int) -> Layer:
    """Return the entries of a layer on another count of ranks, as the first of them saves it."""
    prefix = str(layer.get("expert_key_prefix"))
    count = counts.get(prefix, own)
    for key, node in {"num_experts": count, **_placing(layer, count, own)}.items():
        if layer.get(key) != node:
            message = f"the '{key}' of the experts '{prefix}' is not that of {count} experts, in"
            raise UnsupportedError(
                f"{message} their order on {own} ranks, as DeepSpeed 0.19.8 places them: they "
                f"cannot be spread over another count of ranks. {AS_SAVED}"
            )
    return {**layer, **_placing(layer, count, degree)}


def _placing(layer: Layer, count: int, degree: int) -> dict[str, Node]:
    """Return the entries of a layer that depend on the count of ranks."""
    each, maps = count // degree, layer.get(_MAPS)
    ranks = [
        {"rank": rank, "experts": [*range(each * rank, each * (rank + 1))]}
        for rank in range(degree)
    ]
    placement = {"version": 1, "num_experts": count, "ep_size": degree, "ranks": ranks}
    found = {
        "num_local_experts": each,
        "ep_size": degree,
        "expert_placement": placement,
        "ep_group_name": names.ranks_name(degree),
        "ep_rank": 0,
        "expert_data_parallel_rank": 0,
        "global_expert_start": 0,
        "global_expert_end": each,
    }
    params = maps.get("params") if isinstance(maps, dict) else None
    if isinstance(params, dict):
        shapes = {name: _shape(node, count) for name, node in params.items()}
        mapped = {n: map_of(split_cut(shape, 0, [each] * degree)) for n, shape in shapes.items()}
        found[_MAPS] = {"version": 1, "params": mapped}
    return found


def _shape(node: Node, count: int) -> tuple[int, ...]:
    shape = node.get("logical_shape") if isinstance(node, dict) else None
    if isinstance(shape, list) and shape[:1] == [count]:
        return require_shape(shape)
    raise UnsupportedError(f"an affine map of {count} experts has the logical shape {show(shape)}")

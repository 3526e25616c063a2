"""Tells whether the experts of all parts of a model can be spread over another count of ranks.

Beside tensor parallelism every tensor-parallel rank has its own part of each expert, and the ranks
that share its files, one family, spread these parts among themselves: with
`enable_expert_tensor_parallelism`, `MoE._create_process_groups` has
`_create_expert_data_and_model_parallel` divide each data-parallel group by itself, and
`DeepSpeedEngine._get_expert_ckpt_name` puts the family's number into the names of experts' files
(0.19.8). Without it the groups of `_create_expert_and_data_parallel` go through the families;
`unsupported` refuses that.
"""

import re
from collections.abc import Iterator
from typing import Final

from streamshard.errors import DisagreementError
from streamshard.formats.checkpoint import Checkpoint, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.expert_groups import AS_SAVED
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import is_pipeline
from streamshard.formats.pickle.inert import Node

_LOCAL_EXPERT: Final = re.compile(r"deepspeed_experts\\*\.\d")
"""In the name of an expert's parameter, or in a regular expression of it."""


def objection_to_spreading(checkpoint: Checkpoint) -> str | None:
    """Say why the experts of a checkpoint cannot be spread anew, as far as its kind tells."""
    if checkpoint.is_dumps:
        return "raw dumps lack the experts' files"
    if _has_stages(checkpoint):
        return "it is of a pipeline, of which each stage has layers of its own"
    if checkpoint.layout.stage not in (1, 2):
        return f"it was saved at ZeRO stage {checkpoint.layout.stage}, and not at 1 or 2"
    if checkpoint.replicas > 1:
        return "it was trained on sequences that ranks share"
    of_ranks = f"{checkpoint.tag}/{names.WHOLE_EXPERT_OPTIMIZER}"
    if any(file.path.startswith(of_ranks) for file in checkpoint.files):
        return f"an older DeepSpeed saved it, with a file {of_ranks}* for each expert rank"
    if any(family.is_muon(group) for family in checkpoint.families for group in family.groups):
        return "it was trained with Muon"
    listed = [e.name for f in checkpoint.families for e in f.module if names.expert_of(e.name)]
    if listed:
        return f"the model file has a weight of an expert, '{listed[0]}', as of a frozen one"
    told = (family.model_state.get(names.UNIVERSAL_INFO) for family in checkpoint.families)
    if any(_LOCAL_EXPERT.search(text) for info in told for text in _strings(info)):
        message = f"its '{names.UNIVERSAL_INFO}' names experts as one rank numbers them"
        return f"{message}, as what AutoTP saves does"
    return None


def _strings(node: Node) -> Iterator[str]:
    """Yield the strings in a tree of dicts and lists, however deep it is."""
    rest, seen = [node], set()
    while rest:
        held = rest.pop()
        if isinstance(held, str):
            yield held
        elif isinstance(held, dict | list | tuple) and id(held) not in seen:
            seen.add(id(held))
            rest += [*held, *held.values()] if isinstance(held, dict) else held


def _has_stages(checkpoint: Checkpoint) -> bool:
    """Tell whether families are stages of a pipeline.

    `_save_moe_checkpoint` saves these with the weights in the model file, so that the degrees that
    DeepSpeed notes since 0.19.5 may be the only sign.
    """
    noted = checkpoint.families[0].model_state.get(names.PARALLEL_DEGREES)
    return is_pipeline(checkpoint) or (isinstance(noted, dict) and noted.get("pp_degree", 1) != 1)


def require_families_alike(checkpoint: Checkpoint) -> None:
    """Refuse families that do not have parts of the same experts in the same order."""
    first, *others = checkpoint.families
    for other in others:
        for what, one, another in (
            ("experts", *(f.model_state.get(names.EXPERT_COUNTS) for f in (first, other))),
            ("param groups", *([_place(g) for g in f.groups] for f in (first, other))),
        ):
            if one != another:
                message = f"{first.name} and {other.name} have different {what}, or in another"
                raise DisagreementError(
                    f"{message} order: they are not of tensor-parallel ranks that have parts of "
                    f"the same experts. {AS_SAVED}"
                )


def _place(group: ParamGroup) -> tuple[object, ...]:
    return group.number, group.expert_parallel, group.expert_rank, group.params

"""File names and dictionary keys of DeepSpeed (`deepspeed/checkpoint/constants.py`)."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from streamshard.formats.pickle.inert import Global
from streamshard.io.entries import exists, is_file, read_all
from streamshard.io.object_path import as_path

LATEST: Final = "latest"
_LATEST_BYTES: Final = 4096
"""More bytes than a tag has."""
_NAME_BYTES: Final = 255
"""What the name of a directory takes at most."""
NO_TAG: Final = "its name has characters that cannot be shown, so it is no tag; rename it"
LATEST_UNIVERSAL: Final = "latest_universal"
_NO_DIRECTORY: Final = (LATEST, LATEST_UNIVERSAL)
OWN_PREFIX: Final = ".streamshard"
"""Prefix of the names of streamshard's own working files."""

_RANK_FILE: Final = re.compile(
    r"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)"
    r"_?(?P<kind>optim|model)_states\.pt"
)
_MODEL_FILE: Final = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")
_PART_FILE: Final = re.compile(
    r"(layer_\d+[-_].*model_states|expert_\d+_mp_rank_\d+.*|expp_rank_\d+_mp_rank_\d+_optim_states)"
    r"\.pt"
)

_WRITER_PART: Final = re.compile(r".*_states\.pt-\d+\.(?P<count>\d+)")
_DROPPING_LAYER: Final = ".random_ltd_layer"
_LAST_NUMBER: Final = re.compile(r"(?<![0-9])(?<![0-9][.,])[0-9]+$")
"""Digits after a decimal point are not a step: after `epoch3.75` comes `epoch4.0`."""
LIGHTNING_SUFFIX: Final = ".ckpt"
"""Lightning's names end in it, also those of the directories that DeepSpeed saves for it."""
_LIGHTNING_STEP: Final = re.compile(r"(?:^|[-/])step=([0-9]+)(?=[-.])(?!\.[0-9])")

_ESCAPE: Final = re.compile(r"%(?=2F|25)")
_ODD: Final = frozenset({"", ".", ".."})
"""Parts that a path which stays in its directory does not have."""
_ESCAPED: Final = re.compile(r"%2F|%25")

_EXPERT: Final = re.compile(r"(?P<layer>.*\bdeepspeed_experts\.)(?P<local>\d+)(?P<rest>\..*)")

_FUSED_EXPERT: Final = re.compile(r"(?P<fused>.*\bexperts\.w[123])\.(?P<number>\d{1,9})")

WHOLE_EXPERT_OPTIMIZER: Final = "expp_rank_"
"""Prefix of the names of optimizer files of jobs with experts and without ZeRO."""

OPTIMIZER: Final = "optimizer_state_dict"
"""In an optimizer file: the ZeRO optimizer's state. In that, at stage 3: the wrapped one's."""
BASE_OPTIMIZER: Final = "base_optimizer_state"
"""Stages 1 and 2: the wrapped optimizer's state."""
FLAT_GROUPS: Final = "single_partition_of_fp32_groups"
FLAT_GROUPS_3: Final = "fp32_flat_groups"
PARTITION_COUNT: Final = "partition_count"
GROUP_PADDINGS: Final = "group_paddings"
ALIGNMENT_PADDINGS: Final = "param_alignment_paddings"
SLICE_MAPPINGS: Final = "param_slice_mappings"
ZERO_STAGE: Final = "zero_stage"
STAGE_ENUM: Final = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
STAGES: Final[Mapping[Any, int]] = {
    "disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3
}  # fmt: skip
"""Members of the enum that `ZERO_STAGE` is a member of since 0.7.0."""
IS_EXPERTS: Final = "moe"
"""Set in a param group of the wrapped optimizer that holds experts."""
GROUP_NAME: Final = "name"
"""In a param group: of experts, the name of the ranks that share them."""
IS_MUON: Final = "use_muon"
"""Set in a param group of the wrapped optimizer that DeepSpeed's Muon trains."""
MOMENTUM: Final = "momentum_buffer"
"""Muon's only state."""
QUANTISED: Final = "__bnb_optimizer_quant_state__"
"""In a group's state: a dict of the states that bitsandbytes hides from FSDP."""
CLIP_GRAD: Final = "clip_grad"
DS_CONFIG: Final = "ds_config"
DS_VERSION: Final = "ds_version"

SCHEDULER: Final = "lr_scheduler"
RATES_PER_GROUP: Final = ("base_lrs", "_last_lr", "lr_lambdas")
"""Entries of torch's schedulers with an element for each param group."""
MODULE_STATE: Final = "module"
BUFFER_NAMES: Final = "buffer_names"
PARAM_SHAPES: Final = "param_shapes"
FROZEN_SHAPES: Final = "frozen_param_shapes"
FROZEN_FRAGMENTS: Final = "frozen_param_fragments"
SHARED_PARAMS: Final = "shared_params"
DP_WORLD_SIZE: Final = "dp_world_size"
MP_WORLD_SIZE: Final = "mp_world_size"
PARALLEL_DEGREES: Final = "checkpoint_parallel_dimensions"
"""Pipeline and tensor parallel degrees as the model-parallel unit reports them, since 0.19.5."""
UNIVERSAL_INFO: Final = "universal_checkpoint_info"
"""Entry of a model file that tells how tensor parallelism cut the parameters."""
UNIVERSAL_PARAMS: Final = "zero"
"""Directory of a universal checkpoint with one for each parameter."""
UNIVERSAL_STATE: Final = "optimizer_state.pt"
"""File in it for what belongs to no parameter."""
EXPERT_COUNTS: Final = "num_experts"
"""Count of experts of each expert layer."""
AUTO_EXPERTS: Final = "ds_autoep_layers"
"""Entry of a model file that only AutoEP fills: where the experts of each layer are."""
OLD_AUTO_EXPERTS: Final = "autoep_layers"
"""Its name in 0.19.2."""
FOLDED_EXPERTS: Final = "folding"
"""Entry of a model file and an optimizer's state that AutoEP fills next to AutoTP."""
AUTO_EXPERT_GROUPS: Final = "ds_zero_partition_groups"
"""Entry of an optimizer's state that only AutoEP fills, at stage 3."""
WHOLE_OPTIMIZER: Final = "optimizer"
"""Entry of a model file for an optimizer that is not partitioned."""
RANDOM_LTD: Final = "random_ltd"
"""Entry of a model file for the state of random layer token dropping, if that is on."""

CUT_IN_OPTIMIZER: Final = frozenset(
    {
        BASE_OPTIMIZER, OPTIMIZER, FLAT_GROUPS, FLAT_GROUPS_3, PARTITION_COUNT, GROUP_PADDINGS,
        ALIGNMENT_PADDINGS, SLICE_MAPPINGS, AUTO_EXPERT_GROUPS,
    }
)  # fmt: skip
"""Entries of the ZeRO optimizer's state that depend on the partitioning."""
CUT_IN_MODEL: Final = frozenset(
    {MODULE_STATE, PARAM_SHAPES, FROZEN_SHAPES, FROZEN_FRAGMENTS, SHARED_PARAMS, DP_WORLD_SIZE}
)
"""Entries of a model file that depend on the partitioning, or follow from the module's entries."""
LOOKED_INTO: Final = (
    CUT_IN_OPTIMIZER
    | CUT_IN_MODEL - {DP_WORLD_SIZE}
    | {DS_CONFIG, BUFFER_NAMES, EXPERT_COUNTS, PARALLEL_DEGREES, UNIVERSAL_INFO}
)
"""Entries of files and dumps that are interpreted, not only copied, and are more than a number."""


class RankFile(NamedTuple):
    """The facts in the name of a checkpoint file."""

    kind: str
    """`optim`, `model`, or `part` (the weights of a pipeline layer or of an expert)."""
    prefix: str
    dp_rank: int | None
    """None for the model file of stages 1 and 2, which all ranks share."""
    mp_rank: int


def read_latest(file: Path) -> str:
    return tag_of(read_all(file, _LATEST_BYTES).decode(errors="replace"))


def latest_of(directory: Path, name: str = LATEST) -> str | None:
    """Return the tag that `latest` names, or a file like it; None if there is no such file."""
    return read_latest(directory / name) if is_file(directory / name) else None


def parse(name: str) -> RankFile | None:
    """Parse a file name of a tag directory; None if it is not DeepSpeed's."""
    if match := _RANK_FILE.fullmatch(name):
        return RankFile(match["kind"], match["prefix"] or "", int(match["dp"]), int(match["mp"]))
    if match := _MODEL_FILE.fullmatch(name):
        return RankFile("model", "", None, int(match["mp"]))
    if _PART_FILE.fullmatch(name):
        return RankFile("part", "", None, 0)
    return None


def writer_parts(name: str) -> int:
    """Return the part count in the name of a file part; 0 if the name is not that of a part.

    `deepspeed/io/fast_file_writer.py` writes files in parts.

    >>> [writer_parts(f"mp_rank_00_model_states.pt{end}") for end in ("-0.1", "-3.4", "")]
    [1, 4, 0]
    """
    match = _WRITER_PART.fullmatch(name)
    return int(match["count"]) if match else 0


def without_dropping(name: str) -> str:
    """Remove from a name the part that `RandomLayerTokenDrop` adds when it wraps a layer.

    DeepSpeed removes it in the module's state dict only (`remove_random_ltd_state_dict`).

    >>> without_dropping("blocks.0.random_ltd_layer.up.weight")
    'blocks.0.up.weight'
    """
    return name.replace(_DROPPING_LAYER, "")


def expert_of(name: str) -> tuple[str, int, str] | None:
    """Split the name of an expert's parameter around the expert's number.

    >>> expert_of("moe.deepspeed_experts.1.w")
    ('moe.deepspeed_experts.', 1, '.w')
    """
    match = _EXPERT.fullmatch(name)
    return None if match is None else (match["layer"], int(match["local"]), match["rest"])


def count_local_experts(params: Iterable[str]) -> dict[str, int]:
    """Count the experts that one rank has in each layer, by the layer's name."""
    counts: dict[str, int] = {}
    for layer, local, _ in filter(None, map(expert_of, params)):
        counts[layer] = max(counts.get(layer, 0), local + 1)
    return counts


def of_expert_rank(name: str, expert_rank: int, counts: Mapping[str, int]) -> str:
    """Replace the expert's number in a parameter name by its number in the whole model.

    Each expert rank counts its own experts from 0 (`deepspeed/moe/experts.py`).

    >>> of_expert_rank("moe.deepspeed_experts.1.w", 2, {"moe.deepspeed_experts.": 2})
    'moe.deepspeed_experts.5.w'
    """
    found = expert_of(name)
    if found is None:
        return name
    layer, local, rest = found
    return f"{layer}{counts[layer] * expert_rank + local}{rest}"


def fused_expert(name: str, number: int) -> str:
    """Return the name of one expert's part of a parameter in which AutoEP fuses experts.

    It is that in the files of experts' weights (`_save_moe_checkpoint` of `runtime/engine.py`).
    """
    return f"{name}.{number}"


def fused_expert_of(name: str) -> tuple[str, int] | None:
    """Split the name that `fused_expert` made.

    >>> fused_expert_of("mlp.experts.w1.5"), fused_expert_of("moe.deepspeed_experts.1.w")
    (('mlp.experts.w1', 5), None)
    """
    match = None if expert_of(name) else _FUSED_EXPERT.fullmatch(name)
    return None if match is None else (match["fused"], int(match["number"]))


@lru_cache(maxsize=64)  # asked for each rank
def parameters(experts: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Return the parameters that experts' tensors are, with the count of tensors of each.

    They are one each, except where AutoEP fuses those that are next to each other.

    >>> parameters(("mlp.experts.w1.2", "mlp.experts.w1.3", "mlp.experts.w2.2"))
    (('mlp.experts.w1', 2), ('mlp.experts.w2', 1))
    """
    fused = (found[0] if (found := fused_expert_of(name)) else name for name in experts)
    return tuple((name, len([*tensors])) for name, tensors in groupby(fused))


def is_of_experts(group: Mapping[str, Any]) -> bool:
    """Tell whether a param group of the wrapped optimizer is of experts."""
    return group.get(IS_EXPERTS) is True


def ranks_name(degree: int) -> str:
    """Return the name by which an engine knows the ranks that share experts (`groups.py`)."""
    return f"ep_size_{degree}"


def expert_ranks(group: Mapping[str, Any]) -> int | None:
    """Return over how many ranks a param group of experts is spread, as its name tells.

    None if it holds no experts, or has another name. It is the name of a group of processes
    (`MoE.__init__` of `deepspeed/moe/layer.py`).

    >>> expert_ranks({"moe": True, "name": "ep_size_4"})
    4
    """
    name = group.get(GROUP_NAME)
    is_named = is_of_experts(group) and isinstance(name, str)
    match = re.fullmatch(r"ep_size_(\d{1,9})", str(name)) if is_named else None
    return None if match is None else int(match[1])


def tag_of(text: str) -> str:
    """Return the tag that a text names, as a path below the run directory.

    >>> tag_of("./global_step5\\n"), tag_of("epoch//1/"), tag_of("../a"), tag_of("")
    ('global_step5', 'epoch/1', '../a', '')
    """
    return str(PurePosixPath(text.strip())) if text.strip() else ""


def is_tag(text: str) -> bool:
    """Tell whether a text can be a tag: the path of a directory below the run directory.

    >>> [is_tag(text) for text in ("global_step5", "epoch/1", "..", "a/../b", "a\\nb", "")]
    [True, True, False, False, False, False]
    """
    if not is_inside(text) or not text.isprintable():
        return False
    first, *deeper = parts = text.split("/")
    if any(len(part.encode()) > _NAME_BYTES for part in parts):
        return False
    # A path below our own directories is not a tag, nor is one below the file `latest`.
    return not deeper or not (first in _NO_DIRECTORY or first.startswith(OWN_PREFIX))


def is_name(text: str) -> bool:
    """Tell whether a text can be the name of one directory.

    >>> [is_name(text) for text in ("mp_rank_00", "..", "a/b", "")]
    [True, False, False, False]
    """
    return is_tag(text) and "/" not in text


def flat(tag: str) -> str:
    """Turn a tag, which may be a path, into a file name. Each tag has a different file name.

    >>> flat("global_step5"), flat("epoch/1"), flat("epoch%2F1")
    ('global_step5', 'epoch%2F1', 'epoch%252F1')
    """
    return _ESCAPE.sub("%25", tag).replace("/", "%2F")


def unflat(name: str) -> str:
    """Return the tag that `flat` turned into this name.

    >>> [unflat(flat(tag)) == tag for tag in ("epoch/1", "epoch%2F1", "100%", "%/", "%%2F", "%25")]
    [True, True, True, True, True, True]
    """
    return _ESCAPED.sub(lambda match: "/" if match[0] == "%2F" else "%", name)


def is_inside(path: str) -> bool:
    """Tell whether a path relative to a directory stays in that directory.

    >>> [is_inside(path) for path in ("a/b", "a//b", "../a", "a/../b", "/a", "a/", "")]
    [True, False, False, False, False, False, False]
    """
    return "\0" not in path and _ODD.isdisjoint(path.split("/"))


def model_part(mp_rank: int) -> str:
    return f"mp_rank_{mp_rank:02d}"


def expert_file(layer: int, expert: int, mp_rank: int) -> str:
    """Return the name of the file of one expert's weights. `expert` counts in the whole model."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp_rank:02d}_model_states.pt"


def part_of_expert_file(name: str) -> int | None:
    """Return which part of the model a file of an expert's weights is of; None for other files.

    >>> part_of_expert_file("layer_0_expert_3_mp_rank_01_model_states.pt")
    1
    """
    match = re.fullmatch(r"(?:layer_\d+_)?expert_\d+_mp_rank_(\d{1,9})_model_states\.pt", name)
    return None if match is None else int(match[1])


def optimizer_file(dp_rank: int, *, bf16: bool, mp_rank: int = 0) -> str:
    """Return the name of the optimizer file that an engine looks for."""
    prefix = "bf16_" if bf16 else ""
    return f"{prefix}zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"


def model_file(dp_rank: int | None, mp_rank: int = 0) -> str:
    """Return the name of a rank's model file; without a rank, of the file that all ranks share."""
    if dp_rank is None:
        return f"mp_rank_{mp_rank:02d}_model_states.pt"
    return f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_model_states.pt"


def step_of(name: str) -> int | None:
    """Read the step from a tag's name: the whole number at its end, or what Lightning calls `step`.

    >>> step_of("global_step1000"), step_of("checkpoint-7"), step_of("best"), step_of("epoch3.75")
    (1000, 7, None, None)
    >>> step_of("epoch=1-step=10.ckpt"), step_of("step=10-loss=5.ckpt"), step_of("last.ckpt")
    (10, 10, None)
    """
    if name.endswith(LIGHTNING_SUFFIX):
        steps = _LIGHTNING_STEP.findall(name)
        return int(steps[0]) if len(steps) == 1 else None
    match = _LAST_NUMBER.search(name)
    return int(match[0]) if match else None


def is_template(path: str) -> bool:
    """Tell whether a path stands for one file per rank: raw dumps."""
    return "{" in path


def is_source_template(path: str) -> bool:
    """Tell whether a path stands for the files of all ranks: a template or a file name pattern."""
    whole = as_path(path)
    return is_template(path) or (bool({*"*?["} & {*whole.name}) and not exists(whole))

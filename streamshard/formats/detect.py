"""Detects what a path without a ZeRO checkpoint holds, and says what can be done with it.

File names decide if they suffice. A file that may be one of several kinds is opened, inertly like
any other.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from streamshard.errors import IncompleteError, SourceError, UnsupportedError
from streamshard.formats.deepspeed import ds_config, ds_versions, names
from streamshard.formats.deepspeed.dumps.dump_names import template_of
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch import torch_file
from streamshard.io.entries import is_directory, is_file, is_link, names_in, paths_in, paths_like

_WEIGHTS: Final = re.compile(
    r".*\.(safetensors|gguf)|.*\.(safetensors|bin)\.index\.json"
    r"|(pytorch_model|adapter_model|model|diffusion_pytorch_model)(-\d+-of-\d+)?\.bin"
    r"|pytorch_model_fsdp(_\d+)?\.bin"
    r"|consolidated(\.\d+)?\.pth"
)
"""Names of weight files of Hugging Face and of Llama's first release."""
_WHOLE_OPTIMIZER: Final = re.compile(r"optimizer(_\d+)?\.(pt|bin)")
"""Optimizer files of HF Trainer and Accelerate without DeepSpeed."""
_TORCH_DCP: Final = re.compile(r"__\d+_\d+\.distcp|\.metadata")
"""Files that `torch.distributed.checkpoint.FileSystemWriter` writes (torch 2.13)."""
_MEGATRON: Final = frozenset(
    {"latest_checkpointed_iteration.txt", "common.pt", "model_optim_rng.pt", "distrib_optim.pt"}
)
"""Files that Megatron-LM's `checkpointing.py` and `dist_checkpointing` write."""
_TORCH_OPTIMIZER: Final = frozenset({"state", "param_groups"})
_WHOLE_MASTERS: Final = frozenset({"fp32_groups_flat", "fp32_groups"})
"""Keys of the master weights that DeepSpeed's fused and unfused optimizers save without ZeRO."""
_CUT: Final = frozenset({names.FLAT_GROUPS, names.FLAT_GROUPS_3, names.PARTITION_COUNT})
"""Keys that ZeRO's optimizers save."""

_PARTS_OF_RANKS: Final = (
    (
        re.compile(r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt"),
        (
            "files of FSDP's ranks as verl saves them, which hold a part of each tensor; give the "
            "directory of all ranks' model files, {directory}, to read or export the weights. The "
            "optimizer's state is not read; it loads on as many ranks as saved it"
        ),
    ),
    (
        re.compile(r"pytorch_model_fsdp(_\d+)?_rank\d+\.bin|optimizer_\d+_rank\d+\.bin"),
        (
            "files of FSDP's ranks as Accelerate saves them (LOCAL_STATE_DICT), which hold a part "
            "of each tensor and are not read here; they load on as many ranks as saved them. What "
            "fsdp_state_dict_type: SHARDED_STATE_DICT saves is read"
        ),
    ),
    (
        re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors"),
        (
            "files of ranks as PyTorch's HuggingFaceStorageWriter(save_distributed=True) saves "
            "them, and with it transformers, which hold a part of each tensor; give the directory "
            "of all ranks' files, {directory}"
        ),
    ),
)
"""Names of files that hold one rank's part of each tensor, and what can be done with them.

Checked with verl 0.8, accelerate 1.15 and torch 2.13.
"""
_MOST_LEVELS: Final = 2
"""How far below a run directory verl saves such files: `global_step_5/actor`."""

_NOTHING_CUT: Final = "nothing in it depends on the count of ranks, so it needs no resharding"


def directory(path: Path) -> str | None:
    """Describe a directory; None if it is not recognized."""
    return next((text for rule in _DIRECTORIES if (text := rule(path)) is not None), None)


def file(path: Path) -> str | None:
    """Describe a file; None if neither its name nor its content is recognized."""
    if names.parse(path.name) is not None or path.name == names.LATEST:
        return f"one file of a DeepSpeed checkpoint; give its directory, {path.parent}"
    if (part := part_of_rank(path)) is not None:
        return f"one of the {part}"
    if _WEIGHTS.fullmatch(path.name):
        return f"a model's weights; {_NOTHING_CUT}"
    if _TORCH_DCP.fullmatch(path.name):
        return f"one file of a distributed checkpoint of PyTorch; give its directory, {path.parent}"
    expected = path.suffix in (".pt", ".pth", ".bin", ".ckpt") and is_file(path)  # not a pipe
    return _torch_file(path) if expected else None


def _torch_file(path: Path) -> str | None:
    root = torch_file.read(path, -1).root
    if not isinstance(root, dict):
        return None
    if (dump := _dump(root, path, "a raw dump of one rank's optimizer")) is not None:
        return dump
    if names.OPTIMIZER in root:
        return f"one file of a DeepSpeed checkpoint; give its directory, {path.parent}"
    if "pytorch-lightning_version" in root:
        return f"a Lightning checkpoint in one file, saved without ZeRO; {_NOTHING_CUT}"
    return None


def _dump(root: Mapping[str, Node], path: Path, cut: str) -> str | None:
    """Describe a dump of an optimizer, as `cut` if ZeRO partitioned it; None for any other file."""
    if names.FLAT_GROUPS in root or names.FLAT_GROUPS_3 in root:
        return f"{cut}; give all ranks' by a template{_template(path)}"
    whole = kind_of_whole_dump(root)
    if whole is None:
        return None
    return (
        f"{whole}, which ZeRO did not partition. If the files of all ranks hold the same, any of "
        f"them loads on any count of ranks; a template shows whether they do{_template(path)}"
    )


def part_of_rank(path: Path) -> str | None:
    """Describe files that hold one rank's part of each tensor by the name of one; else None."""
    found = (text for pattern, text in _PARTS_OF_RANKS if pattern.fullmatch(path.name))
    text = next(found, None)
    return None if text is None else text.format(directory=shlex.quote(str(path.parent)))


def is_cut(root: Mapping[str, Node]) -> bool:
    """Tell whether a state dict is that of an optimizer which ZeRO partitioned."""
    return bool(_CUT & root.keys())


def kind_of_whole_dump(root: Mapping[str, Node]) -> str | None:
    """Describe the optimizer of a dump without ZeRO; None for any other file.

    Checked with DeepSpeed 0.19.8: without ZeRO (stage 0), `engine.optimizer` is torch's own in
    fp32, an `FP16_Optimizer` or `FP16_UnfusedOptimizer` (`deepspeed/runtime/fp16`) in 16 bits.
    """
    if root.keys() >= _TORCH_OPTIMIZER and not is_cut(root):
        return "a plain torch optimizer's state dict"
    if names.OPTIMIZER in root and _WHOLE_MASTERS & root.keys():
        return "the state dict of DeepSpeed's optimizer without ZeRO (stage 0)"
    return None


def _template(path: Path) -> str:
    """Suggest the template of the dumps in a file's directory, if only one fits."""
    beside = [entry.name for entry in paths_in(path.parent) if is_file(entry)]
    name = template_of(path.name, beside)
    return f", '{path.with_name(name)}'" if name else " such as 'optimizer.{rank:02d}.pt'"


# Directories --------------------------------------------------------------------------------------


def _parts_of_ranks(path: Path, levels: int = _MOST_LEVELS) -> str | None:
    listed = sorted(paths_in(path))
    part = next((text for entry in listed if (text := part_of_rank(entry)) is not None), None)
    for entry in listed if part is None and levels else ():
        with suppress(PermissionError):
            part = _parts_of_ranks(entry, levels - 1) if is_directory(entry) else None
        if part is not None:
            break
    return part


def is_megatron(path: Path) -> bool:
    """Tell whether a directory holds files that only Megatron writes."""
    return not _MEGATRON.isdisjoint(names_in(path))


def _megatron(path: Path) -> str | None:
    inside = filter(is_directory, sorted(paths_in(path)))
    if not is_megatron(path) and not any(map(is_megatron, inside)):
        return None
    return (
        "a checkpoint in Megatron's own format, not DeepSpeed's; of these only distributed "
        "checkpoints (torch_dist) are read, which Megatron itself reshards when it loads them"
    )


def _dumps(path: Path) -> str | None:
    for entry in sorted(paths_like(path, "*.pt")):
        if is_link(entry) or not is_file(entry):
            continue
        try:
            root = torch_file.read(entry, -1).root
        except (SourceError, OSError):
            continue
        found = _dump(root, entry, "raw dumps of the optimizer") if isinstance(root, dict) else None
        if found is not None:
            return found
    return None


def _weights(path: Path) -> str | None:
    listed = names_in(path)
    if not any(_WEIGHTS.fullmatch(name) for name in listed):
        return None
    if any(_WHOLE_OPTIMIZER.fullmatch(name) for name in listed):
        return f"weights and an optimizer's state, saved without ZeRO; {_NOTHING_CUT}"
    return f"a model's weights without an optimizer's state; {_NOTHING_CUT}"


_DIRECTORIES: Final[tuple[Callable[[Path], str | None], ...]] = (
    _parts_of_ranks,
    _megatron,
    _weights,
    _dumps,
)


# Tag directories without optimizer files ----------------------------------------------------------


def is_stage_0(model_file: Path) -> bool:
    """Tell whether a model file also holds the optimizer's state, as it does without ZeRO.

    With ZeRO, `DeepSpeedEngine._common_checkpoint_state` (0.19.8) saves the parameter shapes in
    place of that state. An entry `optimizer` alone proves nothing: it may be the user's.
    """
    root = torch_file.read(model_file, -1).root
    if not isinstance(root, dict) or root.get(names.WHOLE_OPTIMIZER) is None:
        return False
    stage = ds_config.zero_stage(ds_config.config_in(root))
    return not stage and root.get(names.PARAM_SHAPES) is None


def without_shards(tag_dir: Path, models: Sequence[Path], parts: Sequence[Path]) -> SourceError:
    """Explain why there is no optimizer file in a tag directory.

    `parts`: files of pipeline layers and experts in the directory.
    """
    # Weights next to DeepSpeed's model files are not the whole checkpoint.
    text = None if models else directory(tag_dir)
    if text is not None:
        return UnsupportedError(f"{text}", path=tag_dir)
    if any(path.name.startswith(names.WHOLE_EXPERT_OPTIMIZER) for path in parts):
        count = "any multiple of the expert-parallel size"
        return UnsupportedError(f"{_STAGE_0}. {_AS_IT_IS} on {count}", path=tag_dir)
    if not models:
        return IncompleteError("no DeepSpeed checkpoint files in it", path=tag_dir)
    root = torch_file.read(models[0], -1).root
    model: dict[str, Node] = root if isinstance(root, dict) else {}
    config = ds_config.config_in(model)
    # With a ZeRO stage, an entry of this name is client state.
    if model.get(names.WHOLE_OPTIMIZER) is not None and not ds_config.zero_stage(config):
        return UnsupportedError(f"{_STAGE_0}. {_AS_IT_IS} on any count of them", path=models[0])
    if config and not ds_config.zero_stage(config) and not _had_bf16_optimizer(model, config):
        return UnsupportedError(
            f"{_STAGE_0}, and no optimizer's state is in it: in bf16, DeepSpeed "
            "0.17.6 to 0.18.4 left it out. Load it as it is, with load_optimizer_states=False, on "
            "any count of them; the optimizer starts again without state",
            path=models[0],
        )
    message = "no *_optim_states.pt file, of which each rank saved one"
    return IncompleteError(f"{message}: copy them from the nodes that saved them", path=tag_dir)


_STAGE_0: Final = "saved without ZeRO (stage 0), which cuts nothing among data-parallel ranks"
_AS_IT_IS: Final = "Load it as it is, with engine.load_checkpoint(),"


def _had_bf16_optimizer(model: dict[str, Node], config: ds_config.Config) -> bool:
    """Tell whether a job of stage 0 had a `BF16_Optimizer`, which saves optimizer files.

    See `DeepSpeedEngine._do_optimizer_sanity_check` before 0.17.6.
    """
    version = ds_versions.version_in(model)
    had = version is None or version < ds_versions.STAGE_0_WITHOUT_BF16_OPTIMIZER
    return had and ds_config.module_dtype(config) == "bfloat16"

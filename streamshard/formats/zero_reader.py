"""Reads a native ZeRO checkpoint into logical tensors and says where their bytes lie."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats import deepspeed_names as names
from streamshard.formats import ds_config, frameworks, torch_file
from streamshard.formats.checkpoint import Checkpoint, OtherFile, ParamGroup
from streamshard.formats.inert import Call, Node
from streamshard.formats.torch_tensor import shape_of, storages_in
from streamshard.formats.zero_files import ShardSet, SourceFiles, find, fingerprint, require
from streamshard.formats.zero_module import ModuleReader
from streamshard.formats.zero_optimizer import OptimizerReader
from streamshard.model import BLOB, FILE, MASTER, LogicalTensor, SourceMap, Whole

_CUT_KEYS: Final = frozenset(
    {
        names.BASE_OPTIMIZER,
        names.OPTIMIZER,
        names.FLAT_GROUPS,
        names.FLAT_GROUPS_3,
        names.PARTITION_COUNT,
        names.GROUP_PADDINGS,
        names.ALIGNMENT_PADDINGS,
        names.SLICE_MAPPINGS,
    }
)
"""Entries of the optimizer's state that depend on the cutting."""


def read(tag_dir: Path, run_files: Sequence[tuple[Path, str]]) -> tuple[Checkpoint, SourceMap]:
    """Open a tag directory.

    The params of each group come in the order in which the files store them; undoing
    `round_robin_gradients` takes arithmetic that is not a format's.

    Parameters
    ----------
    run_files
        Other files that come along: where they are, and their path relative to the run directory.

    Raises
    ------
    SourceError
        Something is missing, damaged, contradictory or not supported; the message names the file.
    """
    shards = find(tag_dir)
    inside = [(p, f"{tag_dir.name}/{p.relative_to(tag_dir).as_posix()}") for p in shards.others]
    with malformed(tag_dir):
        return _read_shards(shards, [*run_files, *inside])


@contextmanager
def malformed(place: Path) -> Iterator[None]:
    """Turn what comes of looking for things where DeepSpeed puts them into a message."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        message = f"{place}: not laid out as DeepSpeed does it ({type(error).__name__}: {error})"
        raise CorruptFileError(message) from error


def _read_shards(
    shards: ShardSet, others: Sequence[tuple[Path, str]]
) -> tuple[Checkpoint, SourceMap]:
    sources = SourceFiles()
    optimizers = [sources.read_dict(path) for path in shards.optimizer_files]
    models = [sources.read_dict(path) for path in shards.model_files]
    both = zip(optimizers, shards.optimizer_files, strict=True)
    states = [require(optimizer, names.OPTIMIZER, path) for optimizer, path in both]
    stage = _stage(states, shards)
    _check_world_size(states, models, shards)
    check_agreement(states, shards.optimizer_files)

    shapes = _param_shapes(models, shards)
    optimizer = OptimizerReader(sources, shards.optimizer_files, states, stage)
    groups = optimizer.groups([list(unit) for unit in shapes])
    shape_by_name = {name: shape for unit in shapes for name, shape in unit.items()}
    module = ModuleReader(sources, shards.model_files, models, stage)
    entries = module.entries(shape_by_name)
    tensors = optimizer_tensors(groups, shape_by_name)
    module_map = module.place(entries, first=len(tensors))
    tensors += module.tensors

    config = _config(optimizers[0], models[0])
    param_ids = optimizer.param_ids([list(unit) for unit in shapes], entries)
    strip_optimizer(states[0], stage)
    module.strip(entries)
    whole = dict(module_map.whole)
    adopt_blobs([models[0], optimizers[0]], tensors, whole)
    files = _adopt_files(others, sources, tensors, whole)
    checkpoint = Checkpoint(
        tag=shards.tag_dir.name,
        layout=replace(
            ds_config.zero_layout(config, stage=stage, world_size=len(states)),
            bf16_optimizer=names.ZERO_STAGE not in states[0],
        ),
        tensors=tuple(tensors),
        groups=groups,
        module=entries,
        module_dtype=module.dtype(entries) or ds_config.module_dtype(config),
        model_state=models[0],
        optimizer_file=optimizers[0],
        param_ids=param_ids,
        files=files,
        notes=tuple(module.notes),
        is_bf16=shards.prefix == "bf16_",
        accelerate_step=_accelerate_step(others, len(states)),
    )
    source_map = SourceMap(
        files=tuple(sources.files),
        whole=whole,
        partitions={} if stage == 3 else optimizer.slots,
        recorded=() if stage == 3 else optimizer.recorded(),
        sub_groups=optimizer.slots if stage == 3 else {},
        sub_group_params=tuple(tuple(unit) for unit in shapes) if stage == 3 else (),
        shards=module_map.shards,
    )
    return checkpoint, source_map


def _stage(states: Sequence[Mapping[str, Node]], shards: ShardSet) -> int:
    stage = stage_of(states, shards.optimizer_files)
    if (stage == 3) != (len(shards.model_files) > 1 or "zero_pp" in shards.model_files[0].name):
        message = f"{shards.model_files[0]} does not belong to optimizer files of stage {stage}"
        raise DisagreementError(message)
    return stage


def stage_of(states: Sequence[Mapping[str, Node]], paths: Sequence[Path]) -> int:
    """Read the ZeRO stage that all ranks' optimizer states agree about."""
    # BF16_Optimizer, which does what stage 1 does, does not say so.
    stages = [_enum_value(state.get(names.ZERO_STAGE, 1)) for state in states]
    for stage, path in zip(stages, paths, strict=True):
        if stage not in (1, 2, 3):
            raise UnsupportedError(f"{path}: ZeRO stage {stage} is not known")
        if stage != stages[0]:
            message = f"{path} is of ZeRO stage {stage}, {paths[0]} of {stages[0]}"
            raise DisagreementError(f"{message}; move away the files of the older run")
    return int(stages[0])


def _enum_value(node: Node) -> Node:
    """Read an int or an enum of ints, which pickles as a call of its class with the value."""
    if isinstance(node, Call) and len(node.args) == 1:
        return node.args[0]
    return node


def _check_world_size(
    states: Sequence[Mapping[str, Node]], models: Sequence[Mapping[str, Node]], shards: ShardSet
) -> None:
    """Refuse sets in which a file says that there were more or fewer ranks than there are files."""
    found = len(states)
    said = [
        (require(model, names.DP_WORLD_SIZE, path), path)
        for model, path in zip(models, shards.model_files, strict=True)
    ]
    for state, path in zip(states, shards.optimizer_files, strict=True):
        counts = require(state, names.PARTITION_COUNT, path)
        said += [(count, path) for count in (counts if isinstance(counts, list) else [counts])]
    for world_size, path in said:
        if world_size == found:
            continue
        message = f"{path} was saved by {world_size} ranks, but there are {found} optimizer files"
        if isinstance(world_size, int) and world_size > found:
            bf16 = shards.prefix == "bf16_"
            missing = shards.tag_dir / names.optimizer_file(found, bf16=bf16)
            message += f"; {missing} is missing: copy it from the node that saved it"
        else:
            surplus = shards.optimizer_files[world_size if isinstance(world_size, int) else 0]
            message += f"; {surplus} is of another world size: move it and its like away"
        raise DisagreementError(message)


def check_agreement(states: Sequence[Mapping[str, Node]], paths: Sequence[Path]) -> None:
    """Refuse ranks that disagree about what does not depend on the rank."""
    first, *rest = [
        {key: fingerprint(value) for key, value in state.items() if key not in _CUT_KEYS}
        for state in states
    ]
    for other, path in zip(rest, paths[1:], strict=True):
        wrong = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if wrong:
            message = f"{path} and {paths[0]} disagree about {', '.join(wrong)}"
            raise DisagreementError(f"{message}: they are not of one step of one run")


def _param_shapes(
    models: Sequence[Mapping[str, Node]], shards: ShardSet
) -> list[dict[str, tuple[int, ...]]]:
    """Read names and shapes of the trained parameters, per param group or sub-group."""
    units = require(models[0], names.PARAM_SHAPES, shards.model_files[0])
    if not isinstance(units, list) or not all(isinstance(unit, dict) for unit in units):
        message = f"{shards.model_files[0]}: no parameter shapes; saved before DeepSpeed 0.6"
        raise UnsupportedError(message)
    for model, path in zip(models[1:], shards.model_files[1:], strict=True):
        for key in (names.PARAM_SHAPES, "global_steps"):
            if fingerprint(model.get(key)) != fingerprint(models[0].get(key)):
                message = f"{path} and {shards.model_files[0]} disagree about {key}"
                raise DisagreementError(f"{message}: they are not of one step of one run")
    return [{name: shape_of(shape) for name, shape in unit.items()} for unit in units]


def _config(optimizer: Mapping[str, Node], model: Mapping[str, Node]) -> ds_config.Config:
    for holder in (optimizer, model):
        if isinstance(holder.get(names.DS_CONFIG), dict):
            return dict(holder[names.DS_CONFIG])
    return {}


def optimizer_tensors(
    groups: Sequence[ParamGroup], shapes: Mapping[str, tuple[int, ...]]
) -> list[LogicalTensor]:
    """List the logical tensors of all optimizer states, group by group and state by state."""
    return [
        LogicalTensor(state, name, dtype, shapes[name])
        for group in groups
        for state, dtype in {MASTER: group.master_dtype, **group.flat_states()}.items()
        for name in group.params
    ]


def strip_optimizer(state: dict[str, Node], stage: int) -> None:
    """Empty what depends on the cutting, leaving every key where it stands."""
    inner = state[names.OPTIMIZER if stage == 3 else names.BASE_OPTIMIZER]
    inner["state"] = {}
    for group in inner["param_groups"]:
        group["params"] = []
    for key in _CUT_KEYS - {names.OPTIMIZER, names.BASE_OPTIMIZER}:
        if key in state:
            state[key] = None


def _accelerate_step(others: Sequence[tuple[Path, str]], world_size: int) -> int | None:
    """Read the step that Accelerate keeps with each rank's random generators, if it is there."""
    steps: dict[Path, Node] = {}
    for path, relative in others:
        rank = frameworks.accelerate_rank(relative)
        if rank is not None and rank < world_size:
            root = torch_file.read(path, -1).root
            steps[path] = root.get("step") if isinstance(root, dict) else None
    for path, step in steps.items():
        first = next(iter(steps))
        if step != steps[first]:
            message = f"{path} is of Accelerate's step {step}, {first} of {steps[first]}"
            raise DisagreementError(f"{message}: they are not of one save")
    step = next(iter(steps.values()), None)
    return step if isinstance(step, int) else None


def adopt_blobs(
    roots: Sequence[Node], tensors: list[LogicalTensor], whole: dict[int, tuple[int, int]]
) -> None:
    """Make every storage that is left in the training state a logical tensor of raw bytes."""
    adopted = 0
    for storage in storages_in(list(roots)):
        if storage.content is None:
            whole[len(tensors)] = (storage.file, storage.offset)
            storage.content = Whole(len(tensors))
            tensors.append(LogicalTensor(BLOB, str(adopted), "uint8", (storage.nbytes,)))
            adopted += 1


def _adopt_files(
    others: Sequence[tuple[Path, str]],
    sources: SourceFiles,
    tensors: list[LogicalTensor],
    whole: dict[int, tuple[int, int]],
) -> tuple[OtherFile, ...]:
    files = []
    for path, relative in others:
        index = sources.add(path)
        whole[len(tensors)] = (index, 0)
        tensors.append(LogicalTensor(FILE, relative, "uint8", (sources.files[index].nbytes,)))
        files.append(OtherFile(relative, path.stat().st_mode & 0o777))
    if len({file.path for file in files}) != len(files):
        raise CorruptFileError("two files claim the same place in the checkpoint")
    return tuple(files)

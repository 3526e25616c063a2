"""Reads one model part of a native ZeRO checkpoint: its optimizer and model files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.checkpoint import ModelPart, ModuleEntry, ParamGroup
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.cut.part_cut import in_own_order
from streamshard.formats.deepspeed.cut.zero_cutting import ModelPartMap
from streamshard.formats.deepspeed.ds_versions import version_in
from streamshard.formats.deepspeed.read.agreement import (
    check_agreement,
    check_world_size,
    disagreement,
    model_part_stage,
)
from streamshard.formats.deepspeed.read.model_files import ModelFile, differences, read_models
from streamshard.formats.deepspeed.read.module_reader import ModuleReader
from streamshard.formats.deepspeed.read.optimizer_reader import OptimizerReader
from streamshard.formats.deepspeed.read.rank_files import (
    SAVE_AGAIN,
    ModelPartFiles,
    SourceFiles,
    read_optimizers,
    require,
)
from streamshard.formats.deepspeed.read.redundant_copies import (
    require_alike,
    steps_apart,
    unlike_optimizers,
)
from streamshard.formats.deepspeed.unsupported import Saved, refuse
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.node_checks import danger_in, name_of, of_file
from streamshard.formats.torch.torch_tensor import shape_of, storages_in, tensor_of
from streamshard.model import BLOB, LogicalTensor, Note, Slot, Whole, ZeroLayout

if TYPE_CHECKING:
    from streamshard.formats.deepspeed.auto_experts import ExpertPlacement

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModelPartReading:
    """A model part that was read, with its logical tensors and their places in the files."""

    model_part: ModelPart
    part_map: ModelPartMap
    layout: ZeroLayout
    tensors: Sequence[LogicalTensor]
    """Their numbers in the checkpoint begin with `first`."""
    whole: Mapping[int, tuple[int, int]]
    shards: Mapping[int, Slot]
    module_dtype: str
    tied: Mapping[str, str]
    """Parameter → the other name under which its values are saved, as the files list it."""
    notes: Sequence[Note]
    uncut: UnsupportedError | None = None
    """Why states of the optimizer cannot be cut; None if all can."""


def read_model_part(
    files: ModelPartFiles,
    sources: SourceFiles,
    *,
    name: str,
    first: int,
    tied: Mapping[str, str],
) -> ModelPartReading:
    """Open the shards of one model part.

    `name`: name of the model part if the checkpoint has several, else empty.
    `first`: number of the model part's first logical tensor in the checkpoint.
    `tied`: tied parameters that the first model part's files list: only the first rank saves them.
    """
    optimizers = read_optimizers(sources, files.optimizer_files)
    model_files = read_models(sources, files.model_files)
    models = [file.root for file in model_files]
    both = zip(optimizers, files.optimizer_files, strict=True)
    states = [require(optimizer, names.OPTIMIZER, path) for optimizer, path in both]
    stage = model_part_stage(states, files)
    config = ds_config.config_in(optimizers[0], models[0])
    version = version_in(optimizers[0], states[0], models[0])
    saved = Saved(stage, config, states, files.optimizer_files, models, files.model_files, version)
    refuse(saved)
    check_world_size(states, models, files)
    check_agreement(states, files.optimizer_files)

    layout = ds_config.zero_layout(
        config,
        stage=stage,
        world_size=len(states),
        bf16_optimizer=names.ZERO_STAGE not in states[0],
        version=version,
    )
    optimizer = OptimizerReader(sources, files.optimizer_files, states, layout)
    shapes = _param_shapes(model_files, files, optimizer, layout)
    shape_by_name = {param: shape for unit in shapes for param, shape in unit.items()}
    placed: Mapping[str, ExpertPlacement] = {}
    if models[0].get(names.AUTO_EXPERTS):
        from streamshard.formats.deepspeed.auto_experts import placements  # not at the top: rare

        placed = placements(models[0], shape_by_name, files.model_files[0], stage)
    of_experts = {
        names.fused_expert(param, number): shape_by_name[param][1:]
        for param, placement in placed.items()
        for number in placement.experts[0]
    }
    tensor_shapes = {**shape_by_name, **of_experts}
    groups = optimizer.groups([list(unit) for unit in shapes], placed, tensor_shapes)
    if version is None or stage == 1:
        layout = replace(layout, round_robin=_is_round_robin(optimizer, layout, shapes))
    module = ModuleReader(model_files, stage, tied)
    entries = module.entries(shape_by_name)
    tensors = optimizer_tensors(groups, tensor_shapes, name)
    notes = [
        *unlike_optimizers(optimizers),
        *steps_apart(groups, models[0]),
        *(map(Note, danger_in(states)) if optimizer.uncut else ()),
    ]
    require_alike(model_files, entries, stage)
    module.assign(entries, first=first + len(tensors), model_part=name)
    tensors += module.tensors

    param_ids = known_param_ids(optimizer.ends(), [list(unit) for unit in shapes], entries)
    part_map = optimizer.part_map()  # before the next lines strip what it reads
    strip_optimizer(states[0], stage)
    module.strip(entries)
    whole = dict(module.whole)
    model_part = ModelPart(name, groups, entries, models[0], optimizers[0], param_ids)
    adopt_blobs([models[0], optimizers[0]], tensors, whole, first=first, model_part=name)
    return ModelPartReading(
        model_part=model_part,
        part_map=part_map,
        layout=layout,
        tensors=tensors,
        whole=whole,
        shards=module.shards,
        module_dtype=module.dtype(entries) or ds_config.module_dtype(config),
        tied=module.tied,
        notes=(*module.notes, *notes),
        uncut=optimizer.uncut,
    )


def _param_shapes(
    models: Sequence[ModelFile],
    files: ModelPartFiles,
    optimizer: OptimizerReader,
    layout: ZeroLayout,
) -> list[Shapes]:
    """Read names and shapes of the trained parameters, per param group or sub-group."""
    first = models[0].root
    units = first.get(names.PARAM_SHAPES)
    if names.PARAM_SHAPES in first and units is None and layout.bf16_optimizer:
        # Without a ZeRO stage the model file lists no shapes, but BF16_Optimizer saves its states.
        return _with_shapes(
            recorded_units(optimizer, files.optimizer_files), first[names.MODULE_STATE]
        )
    return listed_shapes(models, files)


def listed_shapes(models: Sequence[ModelFile], files: ModelPartFiles) -> list[Shapes]:
    """Read names and shapes of the trained parameters as the model files list them."""
    units = models[0].root.get(names.PARAM_SHAPES)
    if not isinstance(units, list) or not all(isinstance(unit, dict) for unit in units):
        message = "no parameter shapes; saved before DeepSpeed 0.6?"
        raise UnsupportedError(f"{message} {SAVE_AGAIN}", path=files.model_files[0])
    compared = (names.PARAM_SHAPES, "global_steps")
    for file, wrong in differences(models, lambda file: {k: file.root.get(k) for k in compared}):
        raise disagreement(file.path, models[0].path, str(wrong[0]))
    with of_file(files.model_files[0]):
        return [{name_of(name): shape_of(shape) for name, shape in unit.items()} for unit in units]


def recorded_units(optimizer: OptimizerReader, paths: Sequence[Path]) -> list[Shapes]:
    """Read parameter names and sizes from the slices that the ranks record, in the group's order.

    A parameter's size is the sum of its slices on all ranks. Its shape is unknown and not needed.
    """
    units: list[dict[str, int]] = []
    for recorded, path in zip(optimizer.recorded, paths, strict=True):
        if recorded.slices is None:
            message = "saved by a DeepSpeed before 0.7.4, which did not name parameters"
            raise UnsupportedError(message, path=path)
        if any(any(group) for group in recorded.alignments or ()):
            message = "saved with parameter_alignment, which only a model file explains"
            raise UnsupportedError(message, path=path)
        units = units or [{} for _ in recorded.slices]
        for unit, slices in zip(units, recorded.slices, strict=True):
            for name, _, numel in slices:
                unit[name] = unit.get(name, 0) + numel
    # All expert ranks use the same names for their experts, so each name adds up all of them.
    return [
        {name: (numel // optimizer.expert_parallel(number),) for name, numel in unit.items()}
        for number, unit in enumerate(units)
    ]


def _with_shapes(units: Sequence[Shapes], module: Node) -> list[Shapes]:
    """Replace flat shapes by those of the module's weights, if the module has the weights."""
    entries = module if isinstance(module, dict) else {}
    weights = {name: tensor_of(entries.get(name)) for unit in units for name in unit}
    return [
        {
            name: weight.shape if (weight := weights[name]) and (weight.numel,) == flat else flat
            for name, flat in unit.items()
        }
        for unit in units
    ]


def known_param_ids(
    recorded: Sequence[Node], units: Sequence[Sequence[str]], entries: Sequence[ModuleEntry]
) -> dict[str, int]:
    """Return ZeRO-3's `ds_id` of the parameters.

    The files record the first and last id of each sub-group. The engine numbers parameters in the
    module's order unless they were created under `zero.Init`. If the module's order fits every
    recorded id, all ids are known, else only the recorded ones.
    """
    counted = [e.name for e in entries if e.kind in ("param", "frozen")]
    derived = {name: number for number, name in enumerate(counted)}
    recorded_ids: dict[str, int] = {}
    for params, ends in zip(units, recorded, strict=True):
        first, _, last = (ends if isinstance(ends, str) else "").partition("_")
        if first.isdecimal() and last.isdecimal() and params:
            recorded_ids |= {params[0]: int(first), params[-1]: int(last)}
    agrees = all(derived.get(name) == number for name, number in recorded_ids.items())
    return derived if agrees else recorded_ids


def _is_round_robin(
    optimizer: OptimizerReader, layout: ZeroLayout, stored: Sequence[Shapes]
) -> bool:
    """Tell whether a model part is stored in round-robin order: from its files, if they prove it.

    At stage 1 the rule is that of the version that the files were made for, which they need not
    record. Elsewhere a known version is not doubted: files that contradict it are refused later.

    The shapes are in the stored order, the recorded slices in the group's own order. Only if both
    orders fit, or neither, what the config and the version say counts.
    """
    own_order = optimizer.own_order()
    if own_order is None or not 0 < layout.stage < 3 or layout.bf16_optimizer:
        return layout.round_robin
    fits = {False: True, True: True}
    for number, (shapes, named) in enumerate(zip(stored, own_order, strict=True)):
        params, recorded = list(shapes), set(named)
        sharers = layout.world_size // optimizer.expert_parallel(number)
        for is_shuffled in fits:
            order = in_own_order(params, sharers) if is_shuffled else params
            fits[is_shuffled] &= [name for name in order if name in recorded] == named
    return layout.round_robin if fits[True] == fits[False] else fits[True]


def optimizer_tensors(
    groups: Sequence[ParamGroup], shapes: Mapping[str, tuple[int, ...]], model_part: str
) -> list[LogicalTensor]:
    """List the logical tensors of all optimizer states, group by group and state by state.

    `shapes`: shape of each parameter, by its name in the files: each expert rank counts from 0.
    """
    serialized = {group.number: group.params for group in groups if group.expert_rank == 0}
    tensors = [
        LogicalTensor(key, name, state.dtype, state.shape(shapes[in_files]), model_part)
        for group in groups
        for key, state in group.tensor_states.items()
        for name, in_files in zip(group.params, serialized[group.number], strict=True)
    ]
    names_of = Counter((tensor.state, tensor.name) for tensor in tensors)
    for (_, name), count in names_of.items():
        if count > 1:
            raise CorruptFileError(f"parameter '{name}' is in {count} param groups")
    return tensors


def strip_optimizer(state: dict[str, Node], stage: int) -> None:
    """Empty the entries that depend on the partitioning, and keep every key in its place."""
    inner = state[names.OPTIMIZER if stage == 3 else names.BASE_OPTIMIZER]
    inner["state"] = {}
    for group in inner["param_groups"]:
        group["params"] = []
    for key in names.CUT_IN_OPTIMIZER - {names.OPTIMIZER, names.BASE_OPTIMIZER}:
        if key in state:
            state[key] = None


def adopt_blobs(
    roots: Sequence[Node],
    tensors: list[LogicalTensor],
    whole: dict[int, tuple[int, int]],
    *,
    first: int,
    model_part: str,
) -> None:
    """Turn each storage that is left in the training state into a logical tensor of raw bytes.

    `first`: number of the first of `tensors` in the checkpoint.
    """
    adopted = 0
    for storage in storages_in(list(roots)):
        if storage.content is None:
            index = first + len(tensors)
            whole[index] = (storage.file, storage.offset)
            storage.content = Whole(index)
            tensors.append(
                LogicalTensor(BLOB, str(adopted), "uint8", (storage.nbytes,), model_part)
            )
            adopted += 1

"""Reads raw per-rank dumps: files that `torch.save(optimizer.state_dict(), …)` wrote on each rank.

Dumps come without model files and without a config. Stages 1 and 2 record the parameters' names
and sizes in `param_slice_mappings`. Stage 3 records neither, so it needs a reference checkpoint of
the same model.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from streamshard.errors import DisagreementError, Option, UnsupportedError, lacking
from streamshard.formats.checkpoint import LIKE, Checkpoint, ModelPart, Reading
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.cut.muon_order import needs_order
from streamshard.formats.deepspeed.cut.zero_cutting import cut_source
from streamshard.formats.deepspeed.ds_versions import version_in
from streamshard.formats.deepspeed.dumps.dump_names import files_of
from streamshard.formats.deepspeed.read.agreement import check_agreement, rank_counts, stage_of
from streamshard.formats.deepspeed.read.fingerprints import fingerprints
from streamshard.formats.deepspeed.read.model_part import (
    Shapes,
    adopt_blobs,
    optimizer_tensors,
    recorded_units,
    strip_optimizer,
)
from streamshard.formats.deepspeed.read.optimizer_reader import OptimizerReader
from streamshard.formats.deepspeed.read.rank_files import SourceFiles, read_optimizers
from streamshard.formats.deepspeed.read.zero_reader import malformed
from streamshard.formats.deepspeed.unsupported import Saved, refuse
from streamshard.formats.detect import is_cut, kind_of_whole_dump, part_of_rank
from streamshard.formats.pickle.inert import Node, show, show_few
from streamshard.io.files import require_inside
from streamshard.layout.zero import shard_numel
from streamshard.model import Note, NoteKind, Template, ZeroLayout
from streamshard.sizes import counted

_ASSUMED: Final = (
    "The dumps do not say whether round_robin_gradients was on. They were read as if it was off, "
    "which is DeepSpeed's default. If it was on, what was written is wrong: repeat this with the "
    "config of the job that saved them."
)
"""What was assumed of dumps that were read without a config."""
_LOADING: Final = (
    "To resume, call optimizer.load_state_dict(dumps) on every rank, with the list of all ranks' "
    "dumps in the order of the ranks."
)
_MASTER: Final = (
    "Pass load_from_fp32_weights=True to it: without that, DeepSpeed makes the master weights "
    "again from the 16-bit weights of the model."
)


def read(template: Template, config: ds_config.Config | None, like: Checkpoint | None) -> Reading:
    """Open the dumps of all ranks.

    `like`: reference checkpoint of the same job. It supplies the names and shapes of the
    parameters, which stage 3 needs.
    """
    paths = files_of(template)
    for path in paths:
        require_inside(path, template.directory)
    with malformed(template.directory):
        return _read_ranks(paths, template.name, config, like)


def _read_ranks(
    paths: Sequence[Path], name: str, config: ds_config.Config | None, like: Checkpoint | None
) -> Reading:
    sources = SourceFiles()
    states = read_optimizers(sources, paths)
    _refuse_other_kinds(states, paths)
    for state, path in zip(states, paths, strict=True):
        if names.OPTIMIZER in state and names.FLAT_GROUPS_3 not in state:
            message = "a DeepSpeed checkpoint file, not a dump; give its directory instead"
            raise UnsupportedError(message, path=path)
    stage = stage_of(states, paths)
    refuse(Saved(stage, config or {}, states, paths))
    _check_world_size(states, paths)
    check_agreement(states, paths)
    layout = ds_config.zero_layout(
        config or {},
        stage=stage,
        world_size=len(states),
        bf16_optimizer=names.ZERO_STAGE not in states[0],
        version=version_in(states[0]),
    )
    optimizer = OptimizerReader(sources, paths, states, layout)
    if stage == 3:
        units = _units_like(optimizer, paths[0], like, len(states))
    else:
        units = recorded_units(optimizer, paths)
    shapes = {name: shape for unit in units for name, shape in unit.items()}
    groups = optimizer.groups([list(unit) for unit in units], {}, shapes)
    if optimizer.uncut is not None:
        raise optimizer.uncut
    tensors = optimizer_tensors(groups, shapes, "")
    strip_optimizer(states[0], stage)
    whole: dict[int, tuple[int, int]] = {}
    adopt_blobs([states[0]], tensors, whole, first=0, model_part="")
    model_part = ModelPart(
        name="",
        groups=groups,
        module=(),
        model_state={},
        optimizer_file={names.OPTIMIZER: states[0], names.DS_CONFIG: config},
        param_ids={},
    )
    _require_known_momentum(model_part, layout, config, paths[0])
    checkpoint = Checkpoint(
        tag=name,
        layout=layout,
        tensors=tuple(tensors),
        model_parts=(model_part,),
        module_dtype=ds_config.module_dtype(config) if config else "bfloat16",
        files=(),
        notes=(*sources.notes, *_notes(layout, config)),
    )
    # The recorded slices name the parameters in the group's own order already.
    return cut_source(checkpoint, sources.files, whole, {}, [optimizer.part_map()])


def _require_known_momentum(
    model_part: ModelPart, layout: ZeroLayout, config: ds_config.Config | None, path: Path
) -> None:
    """Refuse Muon without a config: how to store its momentum for resuming is then unknown."""
    kept = [model_part.kept_states(group, layout) for group in model_part.groups]
    if config is None and any(state.is_whole for states in kept for state in states.values()):
        message = (
            f"trained with Muon, whose '{names.MOMENTUM}' is kept in one way with "
            "offload_optimizer and in another without, and dumps do not tell which of them was "
            f"on: {lacking('ds_config')}, the config of the job that saved them"
        )
        raise UnsupportedError(message, path=path)


def _notes(layout: ZeroLayout, config: ds_config.Config | None) -> Iterator[Note]:
    loading = _LOADING if layout.stage == 3 else f"{_LOADING} {_MASTER}"
    yield Note(loading)
    is_known = config is not None or layout.bf16_optimizer or layout.world_size == 1
    if layout.stage < 3 and not is_known:
        yield Note(_ASSUMED, NoteKind.ASSUMED)


def _check_world_size(states: Sequence[Mapping[str, Node]], paths: Sequence[Path]) -> None:
    for state, path in zip(states, paths, strict=True):
        for count in rank_counts(state, path):
            if count != len(states):
                message = f"{counted(len(states), 'dump')} of {show(count)} ranks; all are needed"
                raise DisagreementError(f"{message}, of one step", path=path)


def _units_like(
    optimizer: OptimizerReader, path: Path, like: Checkpoint | None, world_size: int
) -> list[Shapes]:
    """Assign the reference checkpoint's parameters to the sub-groups, by length."""
    if like is None:
        message = (
            f"dumps of stage 3 contain neither names nor shapes of the parameters, without "
            "which their padding cannot be told from data; give any DeepSpeed checkpoint of the "
            f"same model and optimizer with {Option('like')}"
        )
        raise UnsupportedError(message, path=path)
    units: list[Shapes] = []
    lengths = optimizer.lengths()
    members = optimizer.members(len(lengths))
    model_part = like.model_parts[0]
    if len(members) != len(model_part.groups):
        message = f"{len(members)} param groups, {LIKE} has"
        raise DisagreementError(f"{message} {len(model_part.groups)}", path=path)
    _require_known_order(like, path)
    for group, (own, shapes) in enumerate(zip(members, like.group_shapes(model_part), strict=True)):
        params = list(shapes.items())
        for unit in own:
            unit_shapes: dict[str, tuple[int, ...]] = {}
            remainder = lengths[unit]
            while remainder > 0 and params:
                name, shape = params.pop(0)
                unit_shapes[name] = shape
                remainder -= shard_numel(math.prod(shape), world_size)
            if remainder != 0:
                message = f"sub-group {unit} holds {lengths[unit]} elements, the parameters"
                found = lengths[unit] - remainder
                raise DisagreementError(f"{message} of {LIKE} add up to {found}", path=path)
            units.append(unit_shapes)
        if params:
            message = f"param group {group} has no room for '{params[0][0]}', which"
            raise DisagreementError(f"{message} {LIKE} has in it", path=path)
    return units


def _require_known_order(like: Checkpoint, path: Path) -> None:
    """Refuse the order of Muon's parameters from another stage, which may order them otherwise."""
    if needs_order(like, 3):
        message = "trained with Muon, whose parameters stages 1 and 2 order by size"
        raise UnsupportedError(
            f"{message}: give a checkpoint of stage 3 with {Option('like')}", path=path
        )


def _refuse_other_kinds(states: Sequence[Mapping[str, Node]], paths: Sequence[Path]) -> None:
    """Refuse files that are not ZeRO's."""
    part = part_of_rank(paths[0])
    if part is not None:
        raise UnsupportedError(f"one of the {part}", path=paths[0])
    kind = kind_of_whole_dump(states[0])
    if kind is not None:
        _refuse_whole(states, paths, kind)
    if not is_cut(states[0]) and names.OPTIMIZER not in states[0]:
        message = "not a dump of an optimizer's state that ZeRO partitioned; give a template of"
        raise UnsupportedError(f"{message} files that hold one each", path=paths[0])


def _refuse_whole(
    states: Sequence[Mapping[str, Node]], paths: Sequence[Path], kind: str
) -> NoReturn:
    """Refuse dumps in which nothing is partitioned: any rank's file alone can be loaded.

    If they differ, the message says so.
    """
    first = fingerprints({**states[0]})
    for state, path in zip(states[1:], paths[1:], strict=True):
        other = fingerprints({**state})
        wrong = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if wrong:
            message = (
                f"{kind}, which ZeRO did not partition, and {paths[0]} holds other values "
                f"of {show_few(wrong)}. Such files are of different steps or runs, or the ranks "
                "were not data-parallel alone (tensor parallelism, FSDP), which is not resharded"
            )
            raise UnsupportedError(
                f"{message}: load each rank's own file on as many ranks", path=path
            )
    same = f"all {len(states)} files hold the same" if len(states) > 1 else "of one rank"
    message = f"{kind}, {same}: nothing in it is partitioned, so it needs no resharding"
    load = f"optimizer.load_state_dict(torch.load({str(paths[0])!r}))"
    raise UnsupportedError(
        f"{message}. Any rank's file will do, on any count of ranks: {load}", path=paths[0]
    )

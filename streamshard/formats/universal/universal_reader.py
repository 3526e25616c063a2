"""Reads DeepSpeed's universal checkpoints into logical tensors, with the places of their bytes.

`deepspeed/checkpoint/ds_to_universal.py` (0.14.5, 0.16.9 and 0.19.8) copies the model files of a
ZeRO checkpoint, merges every state of every parameter into a file of its own, and leaves the rest
of rank 0's optimizer in `zero/optimizer_state.pt`. So nothing is lost of what Adam trained with
data parallelism alone; where something is, it is refused by name. DeepSpeed itself restores less.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    UnsupportedError,
    UsageError,
    raise_first,
)
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ParamGroup, Reading
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.cut.part_cut import in_own_order
from streamshard.formats.deepspeed.cut.zero_cutting import cut_source
from streamshard.formats.deepspeed.ds_versions import version_in
from streamshard.formats.deepspeed.read.agreement import model_part_stage
from streamshard.formats.deepspeed.read.model_files import ModelFile, read_models
from streamshard.formats.deepspeed.read.model_part import (
    Shapes,
    adopt_blobs,
    known_param_ids,
    listed_shapes,
    optimizer_tensors,
    strip_optimizer,
)
from streamshard.formats.deepspeed.read.module_reader import ModuleReader
from streamshard.formats.deepspeed.read.rank_files import (
    ModelPartFiles,
    SourceFiles,
    TagFiles,
    missing_ranks,
    require,
)
from streamshard.formats.deepspeed.read.redundant_copies import require_alike, steps_apart
from streamshard.formats.deepspeed.read.uncut_part import recorded_ranks
from streamshard.formats.deepspeed.read.zero_reader import accelerate_step, adopt_files, malformed
from streamshard.formats.deepspeed.states import State
from streamshard.formats.deepspeed.unsupported import Saved, refuse, refuse_files
from streamshard.formats.pickle.inert import Node, show, show_few
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.formats.torch.torch_tensor import tensor_of
from streamshard.formats.universal.param_files import AGAIN, ParamFiles, scalar_of
from streamshard.io.entries import is_file, paths_below
from streamshard.model import Note, NoteKind, ZeroLayout
from streamshard.sizes import counted

_SUFFIX: Final = "_universal"
"""What DeepSpeed's examples add to a tag to name the universal checkpoint that is made of it."""
_SCRATCH: Final = "tmp"
"""Directory that the converter fills first, and removes unless it is told to keep it."""
_GROUPS: Final = "param_groups"
_AFFINE_MAP: Final = "affine_map"
_UNKEPT: Final = {"amsgrad": "max_exp_avg_sq", "momentum_decay": "mu_product"}
"""Hyper-parameter of an optimizer → the state that it has apart from what the converter reads.

By torch's Adam, AdamW and NAdam (2.13).
"""

_GIVE: Final = "Give the checkpoint that it was made from"
_PARTS: Final = (
    "of a model with tensor, pipeline or expert parallelism: DeepSpeed's ds_to_universal merged "
    f"the parameters, and not what is next to them. {_GIVE}, to change its degrees too"
)
_AUTO_EXPERTS: Final = (
    "trained with AutoEP, whose experts are cut in a way of their own, and not read here. "
    'DeepSpeed loads it as it is with "checkpoint": {"load_universal": true}'
)


def read(
    tag_dir: Path, run_files: Sequence[tuple[Path, str]], *, tag: str, notes: Sequence[str] = ()
) -> Reading:
    """Open the directory of a universal checkpoint.

    `run_files`: other files to copy: their path, and their path relative to the run directory.
    `tag`: path of the directory in the run directory.
    `notes`: more notes.
    """
    with malformed(tag_dir):
        try:
            reading = _read(tag_dir, run_files, tag.removesuffix(_SUFFIX) or tag)
        except UsageError as error:  # in the config that the checkpoint keeps
            raise CorruptFileError(f"{error}", path=tag_dir) from error
    noted = (*reading.checkpoint.notes, *map(Note, notes))
    return replace(reading, checkpoint=replace(reading.checkpoint, notes=noted))


@dataclass(frozen=True, slots=True)
class _Files:
    tag_dir: Path
    files: TagFiles
    params: Sequence[Path]
    """Those below `zero`."""
    sidecars: Sequence[Path]
    """Those that are not DeepSpeed's."""
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, tag_dir: Path) -> "_Files":
        """Sort the files of a directory by their names."""
        below = sorted(path for path in paths_below(tag_dir) if is_file(path))
        first = {path: path.relative_to(tag_dir).parts[0] for path in below}
        params = [path for path in below if first[path] == names.UNIVERSAL_PARAMS]
        files = TagFiles(tag_dir, [p for p in below if first[p] != names.UNIVERSAL_PARAMS])
        sidecars = [path for path in files.sidecars if first[path] != _SCRATCH]
        text = f"Not read: {tag_dir / _SCRATCH}, which ds_to_universal fills before it merges."
        notes = (Note(text, NoteKind.LEFT_OUT),) if len(sidecars) < len(files.sidecars) else ()
        return cls(tag_dir, files, params, sidecars, notes)

    @property
    def state(self) -> Path:
        """The file of what belongs to no parameter."""
        return self.tag_dir / names.UNIVERSAL_PARAMS / names.UNIVERSAL_STATE

    def saved(self) -> ModelPartFiles:
        """Return the files of the only part of the model, which must be there."""
        refuse_files(self.tag_dir, self.sidecars)
        parts = self.files.model_parts
        if not parts or not is_file(self.state):
            missing = self.state if parts else self.tag_dir / names.model_file(None)
            message = f"missing: the conversion was cut off before it was written; {AGAIN}"
            raise IncompleteError(message, path=missing)
        model_files = self.files.model_part(0).model
        if self.files.parts or [*parts] != [0] or not model_files:
            path = next(iter([*self.files.parts, *parts[max(parts)].model.values()]), self.tag_dir)
            raise UnsupportedError(_PARTS, path=path)
        if None in model_files:
            return ModelPartFiles(0, (model_files[None],), (self.state,))
        ranks = sorted(rank for rank in model_files if rank is not None)
        models = [model_files[rank] for rank in ranks]
        each = missing_ranks({*ranks}, ranks[-1] + 1, lambda r: self.tag_dir / names.model_file(r))
        raise_first(each)
        return ModelPartFiles(0, tuple(models), (self.state,))


@dataclass(frozen=True, slots=True)
class _Job:
    """What the model files and the optimizer's file tell of the job that saved."""

    stage: int
    config: ds_config.Config
    models: Sequence[ModelFile]
    units: Sequence[Shapes]
    """Shapes of the parameters, per param group or sub-group."""
    state: dict[str, Any]
    """The ZeRO optimizer's state, with the entries that the converter took out of it."""
    layout: ZeroLayout

    @property
    def wrapped(self) -> Mapping[str, Any]:
        """The state of the optimizer that ZeRO wraps."""
        key = names.OPTIMIZER if self.stage == 3 else names.BASE_OPTIMIZER
        wrapped: Mapping[str, Any] = self.state[key]
        return wrapped


def _read(tag_dir: Path, run_files: Sequence[tuple[Path, str]], tag: str) -> Reading:
    sources, listing = SourceFiles(), _Files.of(tag_dir)
    job = _job(listing, sources)
    ranks = job.layout.world_size if job.stage == 3 else 0
    root = tag_dir / names.UNIVERSAL_PARAMS
    files = ParamFiles.of(root, listing.params, sources, ranks=ranks)
    module = ModuleReader(job.models, job.stage, {})
    shapes = {name: shape for unit in job.units for name, shape in unit.items()}
    entries = module.entries(shapes)
    dtype = module.dtype(entries) or ds_config.module_dtype(job.config)
    groups = _groups(job, files, sources, listing.state, is_16_bit=dtype != "float32")
    require_alike(job.models, entries, job.stage)
    tensors = optimizer_tensors(groups, shapes, "")
    whole = {number: files.places[t.state, t.name] for number, t in enumerate(tensors)}
    module.assign(entries, first=len(tensors), model_part="")
    tensors += module.tensors
    whole |= module.whole

    first = job.models[0].root
    told = (names.DS_CONFIG, names.DS_VERSION)
    optimizer = {names.OPTIMIZER: job.state, **{key: first[key] for key in told if key in first}}
    ids = known_param_ids(_ends(job), [list(unit) for unit in job.units], entries)
    # Of what is no parameter the converter may write files too (`inject_missing_state`).
    known = {*shapes, *(entry.name for entry in entries)}
    beyond = _beyond(sorted(files.paths.keys() - known))
    notes = (*listing.notes, *beyond, *sources.notes, *module.notes, *steps_apart(groups, first))
    strip_optimizer(job.state, job.stage)
    module.strip(entries)
    adopt_blobs([first, optimizer], tensors, whole, first=0, model_part="")
    others = [(path, f"{tag}/{path.relative_to(tag_dir).as_posix()}") for path in listing.sidecars]
    other_files = adopt_files([*run_files, *others], sources, tensors, whole)
    checkpoint = Checkpoint(
        tag=tag,
        layout=job.layout,
        tensors=tuple(tensors),
        model_parts=(ModelPart("", groups, entries, first, optimizer, ids),),
        module_dtype=dtype,
        files=other_files,
        notes=notes,
        is_bf16=ds_config.module_dtype(job.config) == "bfloat16"
        if job.config
        else dtype == "bfloat16",
        accelerate_step=accelerate_step(run_files, job.layout.world_size),
    )
    return cut_source(checkpoint, sources.files, whole, module.shards)


def _beyond(others: Sequence[str]) -> Iterator[Note]:
    """Yield a note about what an earlier conversion may have left, of another model."""
    if others:
        text = f"Not read: files of {show_few(others)}, which the model file does not have."
        yield Note(text, NoteKind.LEFT_OUT)


def _job(listing: _Files, sources: SourceFiles) -> _Job:
    """Read the model files and the optimizer's own file, and refuse what is lost in them."""
    files = listing.saved()
    models = read_models(sources, files.model_files)
    kept = sources.read(listing.state, sources.add(listing.state)).root
    first = models[0].root
    stage = model_part_stage([kept], files)
    ranks = recorded_ranks(models[0])
    if stage == 3 and ranks != len(models):
        message = f"saved by {counted(ranks, 'rank')}, but there are model files of {len(models)}"
        raise IncompleteError(message, path=models[0].path)
    _refuse_parts(first, require(kept, _GROUPS, listing.state), models[0].path)
    config, version = ds_config.config_in(first), version_in(first)
    layout = ds_config.zero_layout(
        config,
        stage=stage,
        world_size=ranks,
        bf16_optimizer=names.ZERO_STAGE not in kept,
        version=version,
    )
    units = listed_shapes(models, files)
    if layout.round_robin:
        units = [{name: unit[name] for name in in_own_order([*unit], ranks)} for unit in units]
    state = _restored(kept, stage, len(units))
    states, paths = [state] * len(models), [listing.state] * len(models)
    roots = [model.root for model in models]
    refuse(Saved(stage, config, states, paths, roots, files.model_files, version))
    return _Job(stage, config, models, units, state, layout)


def _refuse_parts(model: Mapping[str, Node], groups: Sequence[Node], path: Path) -> None:
    """Refuse what the converter merged of parts of the model, or cut in another way."""
    if model.get(names.AUTO_EXPERTS) or model.get(names.OLD_AUTO_EXPERTS):
        raise UnsupportedError(_AUTO_EXPERTS, path=path)
    has_experts = bool(model.get(names.EXPERT_COUNTS)) or any(map(names.is_of_experts, groups))
    is_one = model.get(names.MP_WORLD_SIZE, 1) == 1
    if has_experts or not is_one or model.get(names.MODULE_STATE) is None:
        raise UnsupportedError(_PARTS, path=path)
    info = model.get(names.UNIVERSAL_INFO)
    if isinstance(info, dict) and info.get(_AFFINE_MAP):
        message = f"its '{names.UNIVERSAL_INFO}' has an '{_AFFINE_MAP}', by which ds_to_universal"
        raise UnsupportedError(f"{message} moves and scales elements. {_GIVE}", path=path)


def _restored(kept: Mapping[str, Node], stage: int, units: int) -> dict[str, Any]:
    """Return a ZeRO optimizer's state with all its keys, in DeepSpeed's order.

    At stages 1 and 2 the converter takes out what is cut (`_save_optimizer_state`); at stage 3 it
    leaves rank 0's. At both it adds the param groups at the top.
    """
    entries = {key: node for key, node in kept.items() if key != _GROUPS}
    if stage == 3:
        return {**entries, names.FLAT_GROUPS_3: entries.get(names.FLAT_GROUPS_3) or [None] * units}
    wrapped = {"state": {}, _GROUPS: kept[_GROUPS]}
    behind: dict[str, dict[str, Node]] = {
        names.CLIP_GRAD: {names.BASE_OPTIMIZER: wrapped, names.FLAT_GROUPS: [None] * units},
        names.DS_VERSION: {names.SLICE_MAPPINGS: None},
    }
    restored: dict[str, Any] = {}
    for key, node in entries.items():
        restored |= {key: node, **behind.pop(key, {})}
    return restored | {key: node for others in behind.values() for key, node in others.items()}


def _groups(
    job: _Job, files: ParamFiles, sources: SourceFiles, path: Path, *, is_16_bit: bool
) -> tuple[ParamGroup, ...]:
    listed = [group.get("params") for group in job.wrapped[_GROUPS]]
    if list(chain.from_iterable(listed)) != list(range(len(job.units))):
        raise CorruptFileError(f"param groups do not number {len(job.units)} groups", path=path)
    groups = []
    for number, (members, options) in enumerate(zip(listed, job.wrapped[_GROUPS], strict=True)):
        shapes = {name: shape for unit in members for name, shape in job.units[unit].items()}
        group = files.group(number, shapes, casts_lose=is_16_bit)
        if job.stage == 3:
            with of_file(path):
                group = replace(group, states=_states_3(job, members, group, sources))
        for key, state in _UNKEPT.items():
            if options.get(key) and group.states is not None and state not in group.states:
                raise UnsupportedError(_unkept(state), path=path)
        groups.append(group)
    return tuple(groups)


def _states_3(
    job: _Job, members: Sequence[int], group: ParamGroup, sources: SourceFiles
) -> Mapping[str, State] | None:
    """Return the states of a group at stage 3, where rank 0's optimizer has the scalars of each."""
    flat = group.states or {}
    unit_states: list[Mapping[str, State]] = []
    for unit in members:
        states: dict[str, State] = {}
        for key, node in job.wrapped["state"].get(unit, {}).items():
            tensor = tensor_of(node)
            if key not in flat and tensor is not None and tensor.shape:
                raise UnsupportedError(_unkept(key))
            states[name_of(key)] = flat[key] if key in flat else scalar_of(node, sources)
        unit_states.append({**states, **{key: flat[key] for key in flat if key not in states}})
        if unit_states[0] != unit_states[-1]:
            raise DisagreementError("sub-groups of a param group differ in state")
    return unit_states[0] if unit_states and unit_states[0] else None


def _unkept(state: Node) -> str:
    message = f"its optimizer has a state {show(state)} too, which DeepSpeed's ds_to_universal does"
    return f"{message} not keep. {_GIVE}"


def _ends(job: _Job) -> list[Node]:
    """Return the `ds_id` of each unit, which rank 0's master weights have at stage 3."""
    flats = job.state[names.FLAT_GROUPS_3 if job.stage == 3 else names.FLAT_GROUPS]
    masters = [tensor_of(node) for node in flats]
    return [None if master is None else master.attributes.get("ds_id") for master in masters]

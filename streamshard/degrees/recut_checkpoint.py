"""Cuts a checkpoint into the parts of the model that a reference checkpoint has.

All elements, states, steps, hyper-parameters and counters are the source's. The reference, which
the target job saved, tells how that job cuts the model: which part has which parameters, in which
order, and which elements of them. Each of its tensors is put together from the source's, and
`layout.cutting` finds the bytes by the source's own ZeRO layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import (
    LIKE,
    Checkpoint,
    LayerFile,
    ModelPart,
    ModuleEntry,
    ParamGroup,
    Reading,
)
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import (
    TENSOR_PARALLEL,
    is_pipeline,
    layer_numbers,
)
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts, with_cut_info
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import refilled
from streamshard.formats.deepspeed.read.fingerprints import fingerprint
from streamshard.formats.deepspeed.read.model_part import optimizer_tensors
from streamshard.formats.pickle.inert import Node, show_few
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.formats.torch.tree_copy import renumbered
from streamshard.layout.boxes import NotTiledError
from streamshard.layout.cutting import Cutting, CuttingBuilder
from streamshard.layout.model_cut import ModelCut, Recut, recut
from streamshard.model import FILE, ITEMSIZE, MODULE, LogicalTensor, Note, Slot, Whole

_OF_DEGREES: Final = (
    names.MODULE_STATE,
    names.BUFFER_NAMES,
    names.SHARED_PARAMS,
    names.MP_WORLD_SIZE,
    names.PARALLEL_DEGREES,
    names.UNIVERSAL_INFO,
)
"""Entries of a model file that depend on the degrees."""
_MUST_AGREE: Final = ("lr_scheduler", "data_sampler", names.RANDOM_LTD, names.DS_CONFIG)
"""Entries of a model file that differ between parts only if something is wrong."""


R = TypeVar("R", bound=Reading)


def recut_checkpoint(source: R, parts: ModelInParts, like: ModelInParts) -> R:
    """Cut a checkpoint into the parts of a reference checkpoint, or of `whole_model`."""
    merging = _MergedParts(parts, like)
    merging.require_same_tensors()
    merging.require_same_layers()
    checkpoint, cutting = _Building(source, parts, like, merging).made()
    return replace(source, checkpoint=checkpoint, cutting=cutting)


class _MergedParts:
    """What the source's parts have in common, next to the reference's."""

    def __init__(self, parts: ModelInParts, like: ModelInParts) -> None:
        self._parts = parts
        self._like = like
        self._source = parts.checkpoint
        self.differing: set[str] = set()
        """Entries of the model files in which the parts differ."""

    def require_same_tensors(self) -> None:
        """Refuse tensors that only one side has, or that it trains in another group."""
        tensors, like = self._parts.tensors, self._like.tensors
        missing, extra = sorted(like.keys() - tensors.keys()), sorted(tensors.keys() - like.keys())
        if missing:
            raise DisagreementError(f"lacks what {LIKE} has: {show_few(missing)}")
        if extra:
            raise DisagreementError(f"{LIKE} lacks what is in it: {show_few(extra)}")
        for name, tensor in tensors.items():
            reference = like[name]
            if (tensor.kind, tensor.group) != (reference.kind, reference.group):
                one, two = (
                    side.kind if side.group is None else f"in param group {side.group}"
                    for side in (tensor, reference)
                )
                raise DisagreementError(f"'{name}' is {one}, in {LIKE} {two}")
        aliases = [
            {e.name: e.alias_of for f in c.model_parts for e in f.module if e.kind == "alias"}
            for c in (self._source, self._like.checkpoint)
        ]
        if aliases[0] != aliases[1]:
            raise DisagreementError(f"other names are tied than in {LIKE}")

    def require_same_layers(self) -> None:
        """Refuse other layers of a pipeline than the reference's."""
        checkpoints = self._source, self._like.checkpoint
        if is_pipeline(checkpoints[0]) != is_pipeline(checkpoints[1]):
            which = "is" if is_pipeline(checkpoints[0]) else "is not"
            raise DisagreementError(f"{which} of a pipeline, unlike {LIKE}")
        parts, like = self._parts, self._like
        for name in parts.tensors if parts.keeps_shards else ():
            if parts.shards(name) != like.shards(name):
                message = f"'{name}' has other shapes than in {LIKE} on tensor-parallel ranks"
                raise DisagreementError(f"{message}: it is not of the same job")
        mine, theirs = map(layer_numbers, checkpoints)
        differing = sorted(mine ^ theirs)
        # `whole_model` has no files of layers.
        if theirs and differing:
            shown = show_few([f"{number}" for number in differing])
            raise DisagreementError(f"has files of other layers than {LIKE}: {shown}")

    def groups(self) -> list[ParamGroup]:
        """Return a group for each number, with what all parts say of it."""
        first, *later_parts = self._source.model_parts
        counts = {
            len(f.groups) for c in (self._source, self._like.checkpoint) for f in c.model_parts
        }
        if len(counts) > 1:
            raise DisagreementError(f"not all parts of it and of {LIKE} have as many param groups")
        for model_part in later_parts:
            if fingerprint(model_part.optimizer_file) != fingerprint(first.optimizer_file):
                message = "hyper-parameters, the loss scaler or other entries of the optimizer"
                raise DisagreementError(f"{model_part.name} and {first.name} differ in {message}")
        return [self._group(number) for number in range(counts.pop())]

    def _group(self, number: int) -> ParamGroup:
        groups = [model_part.groups[number] for model_part in self._source.model_parts]
        for model_part in self._like.checkpoint.model_parts:
            if not model_part.groups[number].params or not any(group.params for group in groups):
                message = f"param group {number} has no parameters in {model_part.name or 'it'}"
                raise UnsupportedError(f"{message}: a part without some group is not supported")
        filled = [group for group in groups if group.params]
        facts = [(group.master_dtype, _facts(group)) for group in filled]
        if any(one != facts[0] for one in facts):
            message = f"the states of param group {number}, such as their step"
            raise DisagreementError(f"its parts differ in {message}: they are not of one save")
        return filled[0]

    def model_state(self) -> Mapping[str, Node]:
        """Return the first part's entries, once the others' are known to be alike."""
        first, *others = (model_part.model_state for model_part in self._source.model_parts)
        aside = {*_OF_DEGREES, *names.CUT_IN_MODEL}
        for other in others:
            for key in {**first, **other}:
                if key in aside or _same_entry(key, first, other):
                    continue
                if key in _MUST_AGREE:
                    raise DisagreementError(f"its parts differ in '{key}': not of one save")
                self.differing.add(str(key))
        return first

    def notes(self) -> Iterator[str]:
        """Say what comes from where."""
        target, source = self._like.degrees, self._parts.degrees
        made = f"cut among {target.parts} parts ({target})" if target.parts > 1 else "whole"
        if target != source:
            yield f"The model is {made}. In the source it is cut among {source.parts} ({source})."
        if self.differing:
            keys = show_few(sorted(self.differing))
            yield f"The source's parts differ in {keys}; the first part's are taken for all."


def _same_entry(key: str, one: Mapping[str, Node], other: Mapping[str, Node]) -> bool:
    return key in one and key in other and fingerprint(one[key]) == fingerprint(other[key])


def _facts(group: ParamGroup) -> object:
    documents = group.documents
    return documents and {key: fingerprint(document) for key, document in documents.items()}


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor of the target, with the tensors of the source that it is made of."""

    tensor: LogicalTensor
    recut: Recut | None
    """None if it has no elements, or is the whole of one tensor."""
    rows: Sequence[int]
    """The source's tensor that each box lies in."""


class _Building:
    """Makes the target's model parts and their tensors."""

    def __init__(
        self, source: Reading, parts: ModelInParts, like: ModelInParts, merging: _MergedParts
    ) -> None:
        self._source = source
        self._checkpoint = source.checkpoint
        self._parts = parts
        self._like = like
        self._merging = merging
        self._index = source.checkpoint.tensor_index()
        self._made: list[MadeTensor] = []
        self._dtypes = {
            entry.name: entry.dtype for f in self._checkpoint.model_parts for entry in f.module
        }

    def made(self) -> tuple[Checkpoint, Cutting]:
        """Make the checkpoint, and find the place of every element of it."""
        groups, state = self._merging.groups(), self._merging.model_state()
        optimizer = self._checkpoint.model_parts[0].optimizer_file
        shapes = {
            name: (self._parts.cut(name), self._like.cut(name)) for name in self._like.tensors
        }
        model_parts = []
        for number, model_part in enumerate(self._like.checkpoint.model_parts):
            target = self._model_part(model_part, groups)
            recuts = {name: self._recut(name, number, *both) for name, both in shapes.items()}
            for tensor in self._tensors(target, model_part):
                self._add(tensor, recuts[tensor.name])
            model, optimizer_file = self._training_state(model_part, state, optimizer)
            model_parts.append(replace(target, model_state=model, optimizer_file=optimizer_file))
        layers = self._layers()
        for number, tensor in enumerate(self._checkpoint.tensors):
            if tensor.state == FILE:
                self._made.append(MadeTensor(tensor, None, [number]))
        tensors = [target.tensor for target in self._made]
        checkpoint = replace(
            self._checkpoint,
            tensors=tuple(tensors),
            model_parts=tuple(model_parts),
            layers=layers,
            saved_ranks=self._checkpoint.ranks,
            notes=(*self._checkpoint.notes, *map(Note, self._merging.notes())),
        )
        return checkpoint, cutting_of(self._made, self._source.cutting)

    def _layers(self) -> tuple[LayerFile, ...]:
        """Return the reference's files of layers, with the target's tensors in them."""
        rows = {
            (one.tensor.model_part, one.tensor.name): number
            for number, one in enumerate(self._made)
            if one.tensor.state == MODULE
        }

        def fill(tensor: LogicalTensor, saved: Storage) -> Storage:
            row = rows[tensor.model_part, tensor.name]
            return Storage(self._made[row].tensor.dtype, saved.numel, Whole(row))

        like = self._like.checkpoint
        return refilled(like.layers, like.tensors, fill, LIKE)

    def _model_part(self, model_part: ModelPart, groups: Sequence[ParamGroup]) -> ModelPart:
        """Return a model part of the target, without its training state."""
        entries = tuple(
            replace(entry, dtype=self._dtypes[entry.alias_of or entry.name])
            for entry in model_part.module
        )
        merged = tuple(
            replace(groups[group.number], params=group.params) for group in model_part.groups
        )
        return replace(model_part, groups=merged, module=entries, param_ids={})

    def _tensors(self, target: ModelPart, like: ModelPart) -> Iterator[LogicalTensor]:
        shapes = self._like.checkpoint.master_shapes(like)
        yield from optimizer_tensors(target.groups, shapes, target.name)
        for entry in target.module:
            if entry.kind != "alias" and self._has_module_tensor(entry):
                yield LogicalTensor(MODULE, entry.name, entry.dtype, entry.shape, target.name)

    def _has_module_tensor(self, entry: ModuleEntry) -> bool:
        holder = next(iter(self._parts.tensors[entry.name].shapes))
        return (self._checkpoint.model_parts[holder].name, MODULE, entry.name) in self._index

    def _recut(self, name: str, number: int, source: ModelCut, target: ModelCut) -> Recut | None:
        try:
            return recut(target, number, source)
        except NotTiledError as error:
            message = f"'{name}' is not the same tensor as in {LIKE}: {error}"
            if self._parts.is_vocabulary(name) or self._like.is_vocabulary(name):
                message = self._of_vocabulary(name, source.shape[0], target.shape[0])
            raise DisagreementError(message) from error

    def _of_vocabulary(self, name: str, rows: int, expected: int) -> str:
        """Say how the target job gets as many rows. DeepSpeed's converter fills zeros in."""
        each, rest = divmod(rows, self._like.degrees.tensor)
        option = "" if rest else f" (Megatron-DeepSpeed: --make-vocab-size-divisible-by {each})"
        return (
            f"'{name}' has {rows:,} rows, in {LIKE} {expected:,}. A vocabulary keeps the rows that "
            f"it is padded with, as they are trained like all others. Let that job pad it to "
            f"{rows:,} rows{option}, save once more, and give that"
        )

    def _add(self, tensor: LogicalTensor, boxes: Recut | None) -> None:
        rows = []
        if boxes is not None:
            model_parts = self._checkpoint.model_parts
            keys = [(model_parts[m].name, tensor.state, tensor.name) for m in boxes.ranks.tolist()]
            rows = [self._index[key] for key in keys]
            for row in rows:
                if self._checkpoint.tensors[row].dtype != tensor.dtype:
                    message = f"{tensor.state} of '{tensor.name}' has another dtype in each part"
                    raise DisagreementError(message)
        self._made.append(MadeTensor(tensor, boxes, rows))

    def _training_state(
        self, like: ModelPart, state: Mapping[str, Node], optimizer: Mapping[str, Node]
    ) -> tuple[Mapping[str, Node], Mapping[str, Node]]:
        """Return both files' dicts, with the entries that depend on the degrees."""
        merged = {key: node for key, node in state.items() if key not in _OF_DEGREES}
        own = {key: like.model_state[key] for key in _OF_DEGREES if key in like.model_state}
        # In DeepSpeed's own order; what the user saved comes last.
        order = [*(key for key in like.model_state if key in merged or key in own), *merged]
        model = {key: own.get(key, merged.get(key)) for key in dict.fromkeys(order)}
        stated = like.optimizer_file[names.OPTIMIZER].get(names.UNIVERSAL_INFO)
        roots = model, with_cut_info(optimizer, stated)
        files = [{**root, **self._config(root)} for root in roots]
        made = renumbered((files[0], files[1]), lambda row: self._blob(row, like.name))
        return made[0], made[1]

    def _config(self, root: Mapping[str, Node]) -> dict[str, Node]:
        """Return the config with the reference's tensor parallelism."""
        config = root.get(names.DS_CONFIG)
        if not isinstance(config, dict):
            return {}
        config = {key: value for key, value in config.items() if key != TENSOR_PARALLEL}
        theirs = self._like.checkpoint.config
        if TENSOR_PARALLEL in theirs:
            config[TENSOR_PARALLEL] = theirs[TENSOR_PARALLEL]
        return {names.DS_CONFIG: config}

    def _blob(self, row: int, model_part: str) -> int:
        """Add a blob of the source to a model part of the target; return its number."""
        number = len(self._made)
        named = replace(self._checkpoint.tensors[row], name=str(number), model_part=model_part)
        self._made.append(MadeTensor(named, None, [row]))
        return number


def cutting_of(targets: Sequence[MadeTensor], of: Cutting) -> Cutting:
    """Return where the elements of tensors lie that are made of those of another cutting."""
    builder = CuttingBuilder([ITEMSIZE[target.tensor.dtype] for target in targets])
    for number, target in enumerate(targets):
        rows = np.array(target.rows, dtype=np.int64)
        slot = builder.slot(Slot(rows, np.zeros_like(rows), np.zeros_like(rows)))
        if target.recut is not None:
            builder.place_boxes(number, slot, target.recut.grid)
        elif len(rows) or not target.tensor.numel:
            builder.assign(number, slot, piece_numel=target.tensor.numel)
    for number in builder.missing().tolist():
        tensor = targets[number].tensor
        raise CorruptFileError(f"{tensor.state} of '{tensor.name}' is nowhere")
    return builder.build(of)

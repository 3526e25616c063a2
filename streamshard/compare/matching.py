"""Matches the tensors of two checkpoints of any formats, stages and world sizes.

The result of `pair_up` lists the elements that should be equal. Other modules read them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from streamshard.compare.comparison import Pair, Pairing, SideElements
from streamshard.engine.numeric.cast import cast_between
from streamshard.errors import UnsupportedError
from streamshard.formats import frameworks
from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.formats.deepspeed import training_state
from streamshard.formats.pickle.inert import show_few
from streamshard.formats.torch.tree_comparison import BlobPair
from streamshard.model import BLOB, FILE, MASTER, MODULE, LogicalTensor, NoteKind
from streamshard.source.source import Source

_OWN_STATES: Final = (MODULE, BLOB, FILE)
"""States that are not the optimizer's."""
_TOLD: Final = (NoteKind.COPIES, NoteKind.LEFT_OUT, NoteKind.UNREAD)
"""Notes about what is compared in part."""


def pair_up(
    left: Source, right: Source, *, converted: bool = False, by_value: bool = False
) -> Pairing:
    """Match the tensors of two checkpoints, and compare everything else.

    If one side does not keep module weights, as at stage 3, casts of its master weights are
    compared in their place.

    `converted`: whether the left side was made from the right side by a change of the module's
    dtype. If so, its weights are compared with casts of the right side's weights, and the other
    dtype is not reported as a difference.
    `by_value`: whether the values of floats of different dtypes are compared too, in the dtype that
    holds the values of both sides. The different dtypes are reported in any case.
    """
    pairing = Pairing(by_value=by_value)
    one, other = left.checkpoint, right.checkpoint
    if len(one.model_parts) != len(other.model_parts):
        message = (
            f"{len(one.model_parts)} and {len(other.model_parts)} tensor or pipeline parallel parts"
        )
        pairing.differ("value", "the model", message)
        return pairing
    if one.foreign or other.foreign:
        _pair_foreign(one, other, pairing)
    else:
        _pair_training(one, other, pairing, converted=converted)
    _note_settings(one, other, pairing)
    _differ_in_unread(left, right, pairing)
    for side in (left, right):
        checkpoint = side.checkpoint
        said = [note.text for note in checkpoint.notes if note.kind in _TOLD]
        pairing.notes += [f"{side.path}: {text}" for text in (*checkpoint.unread, *said)]
    if one.uncut or other.uncut:
        are_kept = not (one.foreign or other.foreign)
        how = "compared as each rank has them" if are_kept else "not compared"
        pairing.notes.append(f"States that cannot be cut for other ranks were {how}.")
    return pairing


def _differ_in_unread(left: Source, right: Source, pairing: Pairing) -> None:
    """Tell apart from equal ones two optimizers of which one could not be read."""
    for side, other in ((left, right), (right, left)):
        unread = [note for note in side.checkpoint.notes if note.kind is NoteKind.UNREAD]
        if unread and _has_optimizer(other.checkpoint):
            message = f"not compared, as that of {side.path} is not read"
            pairing.differ("unread", "the optimizer's state", message)


def _has_optimizer(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint's files hold an optimizer's state, read or not."""
    has_any = any(part.groups for part in checkpoint.model_parts) or not checkpoint.foreign
    has_any |= any(note.kind is NoteKind.UNREAD for note in checkpoint.notes)
    return has_any and checkpoint.dropped is None


def _pair_training(left: Checkpoint, right: Checkpoint, found: Pairing, *, converted: bool) -> None:
    _pair_states(left, right, found)
    are_whole = not (left.is_dumps or right.is_dumps)
    if are_whole:
        for parts in zip(left.model_parts, right.model_parts, strict=True):
            _pair_modules((left, parts[0]), (right, parts[1]), found, converted=converted)
    for place in training_state.compare(left, right):
        if isinstance(place, BlobPair):
            _pair_blobs(place, found)
        else:
            found.differ("value", place.name, place.message)
    if left.is_dumps != right.is_dumps:
        found.notes.append("One side is raw dumps: only the optimizer's state was compared.")
    if are_whole:
        _pair_files(left, right, found)


def _pair_foreign(left: Checkpoint, right: Checkpoint, pairing: Pairing) -> None:
    """Match two checkpoints of which one is not of DeepSpeed: what both of them hold."""
    what = left.foreign or right.foreign
    (model_part,), (counterpart,) = left.model_parts, right.model_parts
    are_numbered = left.foreign == right.foreign and all(any(_own_states(c)) for c in (left, right))
    if are_numbered or (model_part.groups and counterpart.groups):
        _pair_states(left, right, pairing)
        for place in training_state.compare_shared(model_part, counterpart):
            pairing.differ("value", place.name, place.message)
        pairing.notes.append(
            f"One side is {what}: compared are tensors, and of the optimizer the steps and the "
            "hyper-parameters that both sides have."
        )
    else:
        parts = (left, model_part), (right, counterpart)
        without = [c.foreign for c, part in parts if c.foreign and not part.groups]
        what = next(iter(without), what)
        pairing.notes.append(
            f"One side is {what}, without an optimizer: only weights and buffers were compared."
        )
    if not (left.is_dumps or right.is_dumps):
        _pair_modules((left, model_part), (right, counterpart), pairing, converted=False)


def _pair_states(left: Checkpoint, right: Checkpoint, pairing: Pairing) -> None:
    left_states, right_states = (dict(_own_states(checkpoint)) for checkpoint in (left, right))
    # Dumps, and BF16_Optimizer without a stage, record sizes but no shapes.
    flat_ok = any(c.is_dumps or c.layout.bf16_optimizer for c in (left, right))
    for key in {**left_states, **right_states}:
        if key not in left_states or key not in right_states:
            tensor = (left_states.get(key) or right_states[key])[1]
            pairing.only(tensor, is_left=key in left_states)
            continue
        (index, tensor), (counterpart_index, counterpart) = left_states[key], right_states[key]
        is_flat = (tensor.numel,) in (tensor.shape, counterpart.shape)
        is_alike = flat_ok and is_flat and tensor.numel == counterpart.numel
        if tensor.shape == counterpart.shape or is_alike:
            pairing.add_same(
                tensor,
                SideElements(index, tensor.dtype),
                SideElements(counterpart_index, counterpart.dtype),
            )
        else:
            pairing.differ_in("shape", tensor, f"{tensor.shape} here, {counterpart.shape} there")


def _own_states(
    checkpoint: Checkpoint,
) -> Iterator[tuple[tuple[int, str, str], tuple[int, LogicalTensor]]]:
    numbers = {model_part.name: number for number, model_part in enumerate(checkpoint.model_parts)}
    for index, tensor in enumerate(checkpoint.tensors):
        if tensor.state not in _OWN_STATES:
            yield (numbers[tensor.model_part], tensor.state, tensor.name), (index, tensor)


@dataclass(frozen=True, slots=True)
class _Weight:
    """An entry of a module's state dict."""

    elements: SideElements
    dtype: str
    shape: tuple[int, ...]
    master: SideElements | None
    """Its master weights, if it is trained."""
    is_cast: bool
    """Whether the checkpoint keeps only its master weights, of which it is a cast."""


def _pair_modules(
    left_part: tuple[Checkpoint, ModelPart],
    right_part: tuple[Checkpoint, ModelPart],
    pairing: Pairing,
    *,
    converted: bool,
) -> None:
    """Match the entries of the modules of one model part."""
    excluded = _without_values(*left_part) | _without_values(*right_part)
    is_foreign = bool(left_part[0].foreign or right_part[0].foreign)
    left_weights, right_weights = dict(_weights(*left_part)), dict(_weights(*right_part))
    for name in {**left_weights, **right_weights}:
        left, right = left_weights.get(name), right_weights.get(name)
        weight = left or right_weights[name]
        tensor = LogicalTensor(MODULE, name, weight.dtype, weight.shape, left_part[1].name)
        if (left is None or right is None) and name in excluded:
            pairing.notes.append(
                f"'{name}' was compared with nothing: stage 3 keeps no values of a frozen "
                "weight that was saved with exclude_frozen_parameters."
            )
        elif left is None or right is None:
            pairing.only(tensor, is_left=left is not None)
        elif left.shape != right.shape:
            pairing.differ_in("shape", tensor, f"{left.shape} here, {right.shape} there")
        elif is_foreign:
            _pair_foreign_weights(tensor, left, right, pairing)
        elif left.dtype == right.dtype or converted:
            _pair_weights(tensor, left, right, pairing)
        elif left.is_cast or right.is_cast:  # the master weights show how they differ
            pairing.differ_in("dtype", tensor, f"{left.dtype} here, {right.dtype} there")
        else:
            pairing.add_same(tensor, left.elements, right.elements)


def _pair_foreign_weights(
    tensor: LogicalTensor, left: _Weight, right: _Weight, pairing: Pairing
) -> None:
    """Match weights of which one side has no master weights, or not by that name."""
    if left.master and right.master:
        return  # matched as states
    sides = [[w.elements, *([w.master] if w.master else [])] for w in (left, right)]
    same = [(a, b) for a in sides[0] for b in sides[1] if a.dtype == b.dtype]
    pairing.add_same(tensor, *(same[-1] if same else (sides[0][-1], sides[1][-1])))


def _pair_weights(tensor: LogicalTensor, left: _Weight, right: _Weight, pairing: Pairing) -> None:
    """Match the weights of one name, unless both sides keep only the master weights."""
    dtype, elements = left.dtype, right.elements
    if left.dtype != right.dtype:
        if left.is_cast:
            return
        elements = right.master or elements
    elif left.is_cast and right.is_cast:
        return
    for side in (left.elements, elements):
        try:
            cast_between(side.dtype, dtype)
        except UnsupportedError as error:
            pairing.differ_in("dtype", tensor, str(error))
            return
    pairing.add(tensor, left.elements, elements, dtype)


def _weights(checkpoint: Checkpoint, model_part: ModelPart) -> Iterator[tuple[str, _Weight]]:
    """Yield the entries of a module's state dict, tied weights under each of their names."""
    index = checkpoint.tensor_index()
    for entry in model_part.module:
        name = entry.held_as
        kept, master = (
            SideElements(tensor, checkpoint.tensors[tensor].dtype) if tensor is not None else None
            for tensor in (index.get((model_part.name, state, name)) for state in (MODULE, MASTER))
        )
        elements = kept or master
        if elements is not None and entry.kind != "extra":
            yield entry.name, _Weight(elements, entry.dtype, entry.shape, master, kept is None)


def _without_values(checkpoint: Checkpoint, model_part: ModelPart) -> set[str]:
    """List the excluded weights for which stage 3 saved only a placeholder."""
    index = checkpoint.tensor_index()
    return {
        entry.name
        for entry in model_part.module
        if entry.kind == "excluded" and (model_part.name, MODULE, entry.name) not in index
    }


def _pair_blobs(place: BlobPair, pairing: Pairing) -> None:
    """Match one place of the training state; elements that several places share only once."""
    sides = [SideElements(tensor, "uint8", start) for tensor, start in (place.left, place.right)]
    pair = Pair(place.name, sides[0], sides[1], place.nbytes, "uint8", place.itemsize)
    shown = (sides[0], sides[1], pair.nbytes)
    if shown in pairing.blobs:
        return
    pairing.blobs.add(shown)
    pairing.pairs.append(pair)


def _pair_files(left: Checkpoint, right: Checkpoint, pairing: Pairing) -> None:
    """Match the sidecars, except files of ranks that only one side has."""
    left_files, right_files = _files(left), _files(right)
    for_left = frameworks.resize(
        left.tag, list(right_files), source_world_size=right.ranks, world_size=left.ranks
    )
    for_right = frameworks.resize(
        right.tag, list(left_files), source_world_size=left.ranks, world_size=right.ranks
    )
    # A file that resharding leaves out does not count as missing; it may still be here, as in a
    # store. A file that resharding makes for a new rank is not the old file of the same name.
    kept = {path: path for path in left_files.keys() - {*for_left.new_steps, *for_right.new_steps}}
    moved = {path: for_left.paths.get(path) or kept.get(path) for path in right_files}
    for path, now in moved.items():
        tensor = right.tensors[right_files[path]]
        if now is None:
            continue
        if now not in left_files:
            pairing.only(tensor, is_left=False)
            continue
        sides = SideElements(left_files[now], "uint8"), SideElements(right_files[path], "uint8")
        if left.tensors[left_files[now]].nbytes != tensor.nbytes:
            message = f"{left.tensors[left_files[now]].nbytes} bytes here, {tensor.nbytes} there"
            pairing.differ_in("shape", tensor, message)
        else:
            pairing.add(tensor, *sides, "uint8")
    matched = {*moved.values(), *for_left.new_steps}
    for path, row in left_files.items():
        if path not in matched and path in for_right.paths:
            pairing.only(left.tensors[row], is_left=True)


def _files(checkpoint: Checkpoint) -> Mapping[str, int]:
    """Return path → tensor; in each path, `<tag>` stands for the tag directory."""
    prefix = f"{checkpoint.tag}/"
    return {
        f"<tag>/{t.name.removeprefix(prefix)}" if t.name.startswith(prefix) else t.name: index
        for index, t in enumerate(checkpoint.tensors)
        if t.state == FILE
    }


def _note_settings(left: Checkpoint, right: Checkpoint, pairing: Pairing) -> None:
    """Add notes on differences that are not state: tag, config, versions."""
    if left.tag != right.tag:
        pairing.notes.append(f"The tags differ: '{left.tag}' and '{right.tag}'.")
    settings = [dict(training_state.provenance(checkpoint)) for checkpoint in (left, right)]
    keys = training_state.differing_keys(settings[0], settings[1])
    if keys:
        shown = show_few([key.lstrip(".") for key in keys])
        pairing.notes.append(f"Settings that differ, which are not state: {shown}.")

"""Compares values that a model part's files hold more than once: on each rank, or in two places."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import ModuleEntry, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.agreement import differing, disagreement, facts_of_each
from streamshard.formats.deepspeed.read.model_files import ModelFile
from streamshard.formats.pickle.inert import Node, show, show_few, show_key
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import Tensor, shape_of, tensor_of
from streamshard.model import Note, NoteKind

_OTHER_COPY: Final = "take another copy of the checkpoint, or an earlier tag"


def ranks_differ(keys: set[Node]) -> Note:
    """Return the note about entries other than the shards about which ranks disagree."""
    serialized = show_few(sorted(keys, key=show_key))
    text = f"The ranks' files differ in {serialized}; rank 0's are taken for all."
    return Note(text, NoteKind.LEFT_OUT)


def unlike_optimizers(optimizers: Sequence[Mapping[str, Node]]) -> Iterator[Note]:
    """Yield a note if optimizer files disagree about entries other than the optimizer's state."""
    first, *rest = facts_of_each(optimizers, (names.OPTIMIZER,))
    unlike = {key for own in rest for key in differing(first, own)}
    if unlike:
        yield ranks_differ(unlike)


def steps_apart(groups: Sequence[ParamGroup], model: Mapping[str, Node]) -> Iterator[Note]:
    """Yield a note if the optimizer has taken another count of steps than the model file records.

    A job that dies while it saves a tag for the second time leaves a new model file with all
    optimizer files of the first save. Then only these counts differ. A run whose optimizer was
    started afresh has such counts as well, so this is no error.
    """
    taken, lag = _steps_taken(groups), optimizer_lag(groups, model)
    if lag:
        text = (
            f"The optimizer's files are of step {show(max(taken))}, the model's of step "
            f"{show(max(taken) + lag)} (skipped steps are not counted). Either the run began with "
            "a new optimizer; or a job died while it saved this tag again, and the files are of "
            "two saves: then take another tag."
        )
        yield Note(text, NoteKind.MIXED)


def optimizer_lag(groups: Sequence[ParamGroup], model: Mapping[str, Node]) -> int | None:
    """Return how many steps the optimizer is behind the model file; None if the files do not tell.

    It is 0 if any param group has taken all steps: others may have been added later.
    """
    total, skipped = model.get("global_steps"), model.get("skipped_steps", 0)
    taken = _steps_taken(groups)
    if not taken or not isinstance(total, int) or not isinstance(skipped, int):
        return None
    return 0 if total - skipped in taken else total - skipped - max(taken)


def _steps_taken(groups: Sequence[ParamGroup]) -> list[int]:
    steps = [(group.states or {}).get("step") for group in groups]
    counts = [step.number() for step in steps if step is not None]
    return [int(count) for count in counts if count is not None and count % 1 == 0]


def require_alike(models: Sequence[ModelFile], entries: Sequence[ModuleEntry], stage: int) -> None:
    """Refuse model files that hold a weight in two places with different values.

    Call this before the entries that depend on the partitioning are removed.
    """
    for file in models:
        if file.cached is not None:
            continue
        if _frozen_shapes(file) != _frozen_shapes(models[0]):
            raise disagreement(file.path, models[0].path, f"'{names.FROZEN_SHAPES}'")
        if stage == 3:
            _require_placeholders(file, entries)
        _require_same_frozen(file, entries, stage)


def _require_placeholders(file: ModelFile, entries: Sequence[ModuleEntry]) -> None:
    """Refuse partitioned weights that have values in the module in addition to their fragments."""
    module = file.root.get(names.MODULE_STATE) or {}
    buffers = {entry.name for entry in entries if entry.kind == "buffer"}
    for entry in entries:
        with of_file(file.path):
            weight = tensor_of(module.get(entry.name))
        is_cut = entry.kind in ("param", "frozen", "alias") and entry.alias_of not in buffers
        if is_cut and weight is not None and weight.numel > 0:
            message = (
                f"'{names.MODULE_STATE}' has {weight.numel:,} values of "
                f"'{entry.name}', where stage 3 leaves 0 and keeps the weight in fragments"
            )
            raise DisagreementError(f"{message}; {_OTHER_COPY}", path=file.path)


def _require_same_frozen(file: ModelFile, entries: Sequence[ModuleEntry], stage: int) -> None:
    """Require that each weight listed as frozen is frozen in the module, with the same values."""
    module = file.root.get(names.MODULE_STATE) or {}
    frozen = {entry.name for entry in entries if entry.kind == "frozen" or entry.paused}
    extra = {entry.name for entry in entries if entry.kind == "extra"}
    for key in (names.FROZEN_SHAPES, names.FROZEN_FRAGMENTS):
        for name, node in (file.root.get(key) or {}).items():
            if name in extra:
                message = f"the frozen weight '{name}' is not stored as its elements in a row. Make"
                raise UnsupportedError(f"{message} it contiguous before saving", path=file.path)
            message = f"'{key}' lists {show(name)}"
            if name not in module and names.expert_of(name):
                continue  # its values are in the expert's own file
            if name not in frozen:
                found = "is a buffer there" if name in module else "is not there"
                message = f"{message}, which '{names.MODULE_STATE}' does not: it {found}"
                raise DisagreementError(f"{message}; {_OTHER_COPY}", path=file.path)
            if stage == 3 or key == names.FROZEN_SHAPES:
                continue
            with of_file(file.path):
                is_same = _same_elements(tensor_of(node), tensor_of(module[name]))
            if not is_same:
                message = f"{message} with other values than '{names.MODULE_STATE}' has of it"
                raise DisagreementError(f"{message}; {_OTHER_COPY}", path=file.path)


def _same_elements(left: Tensor | None, right: Tensor | None) -> bool:
    """Tell whether two tensors are alike, also where one is a part of a larger storage.

    So is a weight on a GPU that was cut from a fused one; its copy on the CPU is alone.
    """
    if alike(left, right):
        return True
    if left is None or right is None or (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    parts = [tensor.require_contiguous("a frozen weight").alone() for tensor in (left, right)]
    return torch_file.checksum(parts[0]) == torch_file.checksum(parts[1])


def _frozen_shapes(file: ModelFile) -> dict[str, tuple[int, ...]]:
    with of_file(file.path):
        shapes = file.root.get(names.FROZEN_SHAPES) or {}
        return {name: shape_of(node) for name, node in shapes.items()}


def alike(left: Tensor | None, right: Tensor | None) -> bool:
    """Tell whether two places hold the same tensor, by the CRC-32 of their storages."""
    if left is None or right is None:
        return False
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    if left.location == right.location:
        return True
    storages = left.storage, right.storage
    return (
        left.start == right.start
        and storages[0].numel == storages[1].numel
        and torch_file.checksum(storages[0]) == torch_file.checksum(storages[1])
    )

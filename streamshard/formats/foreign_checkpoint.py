"""Makes the checkpoint of what others than DeepSpeed saved."""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from streamshard.formats.checkpoint import Checkpoint, ModelPart, ModuleEntry, OtherFile, ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Node
from streamshard.model import LogicalTensor, Note, ZeroLayout

Weight = tuple[str, str, tuple[int, ...], Sequence[object]]
"""Name, dtype and shape of an entry of the module, and what only names of the same elements share;
empty without elements."""


def module_entries(weights: Iterable[Weight], trained: Set[str]) -> Iterator[ModuleEntry]:
    """Yield a module's entries; what is not trained may be a frozen weight, a buffer, or tied."""
    first: dict[object, str] = {}
    for name, dtype, shape, places in weights:
        tied_to = first.setdefault((dtype, shape, *places), name) if places else name
        kind = "param" if name in trained else "weight" if tied_to == name else "alias"
        yield ModuleEntry(name, kind, dtype, shape, tied_to if kind == "alias" else "")


def foreign_checkpoint(
    what: str,
    tag: str,
    ranks: int,
    tensors: Iterable[LogicalTensor],
    module: tuple[ModuleEntry, ...],
    groups: tuple[ParamGroup, ...] = (),
    hyper_parameters: Sequence[Mapping[str, Node]] = (),
    state: Mapping[str, Node] | None = None,
    files: tuple[OtherFile, ...] = (),
    notes: Iterable[Note] = (),
    unrecorded: Iterable[str] = (),
) -> Checkpoint:
    """Return a checkpoint that is not DeepSpeed's.

    `hyper_parameters`: those of each param group.
    `state`: training state next to the module's.
    """
    numels = Counter[str]()
    for entry in module:
        numels[entry.dtype] += math.prod(entry.shape)
    wrapped = {"state": {}, "param_groups": list(hyper_parameters)}
    optimizer = {names.OPTIMIZER: {names.BASE_OPTIMIZER: wrapped}} if groups else {}
    model_state = {names.MODULE_STATE: OrderedDict(), **(state or {})}
    return Checkpoint(
        tag=tag,
        layout=ZeroLayout(stage=0, world_size=ranks),
        tensors=tuple(tensors),
        model_parts=(ModelPart("", groups, module, model_state, optimizer, {}),),
        module_dtype=max(numels, key=numels.__getitem__, default="float32"),
        files=files,
        notes=tuple(notes),
        foreign=what,
        unrecorded=tuple(unrecorded),
    )

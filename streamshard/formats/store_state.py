"""Training state of a store: a checkpoint's inert nodes as one pickle, read and written inertly."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats import inert_dump, inert_load
from streamshard.formats.checkpoint import (
    Checkpoint,
    Family,
    FlatState,
    ModuleEntry,
    OtherFile,
    ParamGroup,
    ScalarState,
)
from streamshard.formats.inert import Node
from streamshard.formats.torch_tensor import Storage
from streamshard.model import ITEMSIZE, LogicalTensor, Whole, ZeroLayout

VERSION: Final = 1
"""Version of a store's format."""

_FLAT: Final = "flat"
_SCALAR: Final = "scalar"
_PLAIN: Final = "plain"


ChunkShapes = Sequence[tuple[int, ...]]
"""Shape of the chunks of each logical tensor."""


def dump(checkpoint: Checkpoint, chunk_shapes: ChunkShapes) -> bytes:
    """Spell everything of a checkpoint that is not a logical tensor's bytes."""

    def persistent_id(node: Node) -> Node | None:
        if not isinstance(node, Storage):
            return None
        if not isinstance(node.content, Whole):
            raise CorruptFileError("a storage of the training state is no blob")
        return ("blob", node.dtype, node.numel, node.content.tensor)

    return inert_dump.dump(
        {
            "tag": checkpoint.tag,
            "layout": _values(checkpoint.layout),
            "tensors": [_values(tensor) for tensor in checkpoint.tensors],
            "chunk_shapes": list(chunk_shapes),
            "families": [_spell_family(family) for family in checkpoint.families],
            "module_dtype": checkpoint.module_dtype,
            "files": [_values(file) for file in checkpoint.files],
            "notes": checkpoint.notes,
            "is_bf16": checkpoint.is_bf16,
            "accelerate_step": checkpoint.accelerate_step,
        },
        persistent_id,
    )


def load(data: bytes) -> tuple[Checkpoint, ChunkShapes]:
    """Read what `dump` spelled.

    Raises
    ------
    CorruptFileError
        The bytes are not what `dump` spells.
    """
    storages: dict[Node, Storage] = {}

    def persistent_load(identifier: Node) -> Storage:
        kind, dtype, numel, tensor = identifier
        if kind != "blob" or dtype not in ITEMSIZE or not isinstance(tensor, int):
            raise CorruptFileError("a persistent id does not name a blob")
        # One object for one blob: tensors that shared a storage are to share it again.
        return storages.setdefault(identifier, Storage(dtype, numel, Whole(tensor)))

    try:
        root = inert_load.load(data, persistent_load)
        shapes = [tuple(map(int, shape)) for shape in root["chunk_shapes"]]
        checkpoint = Checkpoint(
            tag=_text(root["tag"]),
            layout=ZeroLayout(*root["layout"]),
            tensors=tuple(_tensor(*values) for values in root["tensors"]),
            families=tuple(_read_family(family) for family in root["families"]),
            module_dtype=_text(root["module_dtype"]),
            files=tuple(OtherFile(*values) for values in root["files"]),
            notes=tuple(root["notes"]),
            is_bf16=root["is_bf16"],
            accelerate_step=root["accelerate_step"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"training state is not as streamshard writes it: {error}"
        raise CorruptFileError(message) from error
    return checkpoint, shapes


def _values(noun: object) -> tuple[Any, ...]:
    return tuple(getattr(noun, field.name) for field in fields(noun))  # type: ignore[arg-type]


def _spell_family(family: Family) -> dict[str, Node]:
    return {
        "name": family.name,
        "groups": [
            {
                "params": group.params,
                "master_dtype": group.master_dtype,
                "states": _spell_states(group.states),
                "number": group.number,
                "expert_parallel": group.expert_parallel,
                "expert_rank": group.expert_rank,
            }
            for group in family.groups
        ],
        "module": [_values(entry) for entry in family.module],
        "model_state": family.model_state,
        "optimizer_file": family.optimizer_file,
        "param_ids": family.param_ids,
    }


def _read_family(spelled: Node) -> Family:
    return Family(
        name=_text(spelled["name"]),
        groups=tuple(
            ParamGroup(
                params=tuple(map(_text, group["params"])),
                master_dtype=_text(group["master_dtype"]),
                states=_read_states(group["states"]),
                number=int(group["number"]),
                expert_parallel=int(group["expert_parallel"]),
                expert_rank=int(group["expert_rank"]),
            )
            for group in spelled["groups"]
        ),
        module=tuple(ModuleEntry(*values) for values in spelled["module"]),
        model_state=_mapping(spelled["model_state"]),
        optimizer_file=_mapping(spelled["optimizer_file"]),
        param_ids=_mapping(spelled["param_ids"]),
    )


def _spell_states(states: Mapping[str, Node] | None) -> Node:
    return None if states is None else {k: _spell_state(v) for k, v in states.items()}


def _read_states(spelled: Node) -> dict[str, Node] | None:
    return None if spelled is None else {k: _read_state(v) for k, v in spelled.items()}


def _spell_state(value: Node) -> Node:
    if isinstance(value, FlatState):
        return (_FLAT, value.dtype)
    if isinstance(value, ScalarState):
        return (_SCALAR, value.dtype, value.shape, value.data.hex())
    return (_PLAIN, value)


def _read_state(spelled: Node) -> Node:
    kind, *values = spelled
    if kind == _FLAT:
        return FlatState(*values)
    if kind == _SCALAR:
        dtype, shape, data = values
        return ScalarState(dtype, shape, bytes.fromhex(data))
    (value,) = values
    return value


def _tensor(
    state: str, name: str, dtype: str, shape: tuple[int, ...], family: str
) -> LogicalTensor:
    if dtype not in ITEMSIZE or any(length < 0 for length in shape):
        raise UnsupportedError(f"tensor {name}: dtype {dtype}, shape {shape}")
    return LogicalTensor(_text(state), _text(name), dtype, tuple(shape), _text(family))


def _text(value: Node) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _mapping(value: Node) -> Mapping[str, Node]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} is no mapping")
    return value

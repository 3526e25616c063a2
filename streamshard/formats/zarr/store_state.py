"""The training state of a store: one pickle of inert nodes, read and written without running it.

Each part is checked by itself when it is read, then that the parts agree with each other: a
checkpoint read from shards is consistent by construction, but a store may come from an unknown
source.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.checkpoint import (
    Checkpoint,
    Dropped,
    LayerFile,
    ModelPart,
    ModuleEntry,
    OtherFile,
    ParamGroup,
    Uncut,
    require_tied_to_weights,
)
from streamshard.formats.deepspeed import names, states
from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import name_of, require_unrolled
from streamshard.formats.torch.torch_tensor import Storage, shape_of
from streamshard.model import (
    BLOB,
    FILE,
    ITEMSIZE,
    MASTER,
    MODULE,
    LogicalTensor,
    Note,
    NoteKind,
    Whole,
    ZeroLayout,
)

VERSION: Final = 1
_LIMIT_COUNT: Final = 1 << 53

ChunkShapes = Sequence[tuple[int, ...]]
"""Shape of the chunks of each logical tensor."""


def dump(
    checkpoint: Checkpoint,
    chunk_shapes: ChunkShapes,
    numbers: Mapping[int, int] | None = None,
) -> bytes:
    """Serialize a checkpoint, except the bytes of its logical tensors.

    `numbers`: tensor → its number in the result; by default all tensors keep their numbers.
    """

    def persistent_id(node: Node) -> Node | None:
        if not isinstance(node, Storage):
            return None
        tensor = node.blob
        return ("blob", node.dtype, node.numel, tensor if numbers is None else numbers[tensor])

    # Present only where they are needed.
    dropped = {} if checkpoint.dropped is None else {"dropped": _values(checkpoint.dropped)}
    kept = checkpoint.uncut
    uncut = {} if kept is None else {"uncut": (kept.why, kept.files)}
    layers = {"layers": list(map(_values, checkpoint.layers))} if checkpoint.layers else {}
    return inert_dump.dump(
        {
            "tag": checkpoint.tag,
            "layout": _values(checkpoint.layout),
            "tensors": [_values(tensor) for tensor in checkpoint.tensors],
            "chunk_shapes": list(chunk_shapes),
            "families": [
                _serialize_model_part(model_part) for model_part in checkpoint.model_parts
            ],
            "module_dtype": checkpoint.module_dtype,
            "files": [_values(file) for file in checkpoint.files],
            "notes": [(note.text, str(note.kind)) for note in checkpoint.notes],
            "is_bf16": checkpoint.is_bf16,
            "accelerate_step": checkpoint.accelerate_step,
            **dropped,
            **uncut,
            **layers,
        },
        persistent_id,
    )


_FLAT_LISTS: Final = "families", "tensors", "chunk_shapes"


def load(data: bytes) -> tuple[Checkpoint, ChunkShapes]:
    blobs: dict[tuple[str, int, int], Storage] = {}

    def persistent_load(identifier: Node) -> Storage:
        kind, dtype, numel, tensor = identifier
        if kind != "blob":
            raise CorruptFileError("a persistent id does not name a blob")
        # One object per blob, so that tensors that shared a storage share it again.
        key = (_dtype(dtype), _count(numel), _count(tensor))
        return blobs.setdefault(key, Storage(*key[:2], Whole(tensor)))

    try:
        root = inert_load.load(data, persistent_load)
        require_unrolled(_looked_into(root))
        shapes = [shape_of(shape) for shape in root["chunk_shapes"]]
        step = root["accelerate_step"]
        checkpoint = Checkpoint(
            tag=_tag(root["tag"]),
            layout=_layout(*root["layout"]),
            tensors=tuple(_tensor(*values) for values in root["tensors"]),
            model_parts=tuple(_read_model_part(model_part) for model_part in root["families"]),
            module_dtype=_dtype(root["module_dtype"]),
            files=tuple(_file(*values) for values in root["files"]),
            notes=tuple(Note(_text(text), NoteKind(_text(kind))) for text, kind in root["notes"]),
            is_bf16=root["is_bf16"] is True,
            accelerate_step=None if step is None else _count(step),
            dropped=_dropped(*root["dropped"]) if "dropped" in root else None,
            uncut=_uncut(*root["uncut"]) if "uncut" in root else None,
            layers=tuple(_layer(*values) for values in root.get("layers", ())),
        )
        _require_consistent(checkpoint)
        for dtype, numel, tensor in blobs:
            if numel * ITEMSIZE[dtype] != checkpoint.tensors[tensor].nbytes:
                raise CorruptFileError(f"blob {tensor} is not as long as what it holds")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        message = f"training state is not as streamshard writes it: {type(error).__name__}"
        raise CorruptFileError(f"{message}: {error}") from error
    return checkpoint, shapes


def require_readable(data: bytes) -> None:
    """Read back the bytes before they are written, so that no unreadable store is written."""
    try:
        load(data)
    except (CorruptFileError, UnsupportedError) as error:
        message = f"a store of this checkpoint could not be read back: {error}"
        raise UnsupportedError(f"{message}; 'streamshard repartition' needs no store") from error


def blobs_in(checkpoint: Checkpoint) -> set[int]:
    """Return the numbers of the tensors that hold storages of the training state."""
    numbers: set[int] = set()

    class Noting(dict[int, int]):
        def __missing__(self, tensor: int) -> int:
            numbers.add(tensor)
            return tensor

    dump(checkpoint, (), Noting())
    return numbers


def without(checkpoint: Checkpoint, left_out: Collection[int]) -> Checkpoint:
    """Return a checkpoint without some tensors and their files, which nothing else may need."""
    kept = [number for number in range(len(checkpoint.tensors)) if number not in left_out]
    tensors = tuple(checkpoint.tensors[number] for number in kept)
    kept_files = {tensor.name for tensor in tensors if tensor.state == FILE}
    files = tuple(file for file in checkpoint.files if file.path in kept_files)
    # Nodes deep inside the training state refer to tensors by number.
    numbers = {number: new for new, number in enumerate(kept)}
    smaller = replace(checkpoint, tensors=tensors, files=files)
    return load(dump(smaller, (), numbers))[0]


def _looked_into(root: Node) -> list[Node]:
    """List the interpreted values: all but copied ones. Of DeepSpeed's files: `LOOKED_INTO`.

    Of thousands of tensors each is refused at once if it is not a few short values.
    """
    nodes = [value for key, value in root.items() if key not in _FLAT_LISTS]
    for model_part in root["families"]:
        for key, value in model_part.items():
            carried = value if key in ("model_state", "optimizer_file") else {}
            nodes += [carried[known] for known in names.LOOKED_INTO if known in carried]
            nodes += [] if carried else [value]
    return nodes


def _values(noun: object) -> tuple[Any, ...]:
    return tuple(getattr(noun, field.name) for field in fields(noun))  # type: ignore[arg-type]


def _serialize_model_part(model_part: ModelPart) -> dict[str, Node]:
    return {
        "name": model_part.name,
        "groups": [
            {
                "params": group.params,
                "master_dtype": group.master_dtype,
                "states": group.documents,
                "number": group.number,
                "expert_parallel": group.expert_parallel,
                "expert_rank": group.expert_rank,
            }
            for group in model_part.groups
        ],
        # Only where it is so does an entry say that it is paused.
        "module": [_values(entry)[: None if entry.paused else -1] for entry in model_part.module],
        "model_state": model_part.model_state,
        "optimizer_file": model_part.optimizer_file,
        "param_ids": model_part.param_ids,
    }


def _read_model_part(serialized: Node) -> ModelPart:
    module = tuple(_entry(*values) for values in serialized["module"])
    require_tied_to_weights(module)
    return ModelPart(
        name=_model_part_name(serialized["name"]),
        groups=tuple(
            ParamGroup(
                params=tuple(map(name_of, group["params"])),
                master_dtype=_dtype(group["master_dtype"]),
                states=None
                if group["states"] is None
                else {name_of(k): _read_state(k, state) for k, state in group["states"].items()},
                number=_count(group["number"]),
                expert_parallel=_count(group["expert_parallel"], least=1),
                expert_rank=_count(group["expert_rank"]),
            )
            for group in serialized["groups"]
        ),
        module=module,
        model_state=_mapping(serialized["model_state"]),
        optimizer_file=_mapping(serialized["optimizer_file"]),
        param_ids={name_of(k): _count(v) for k, v in _mapping(serialized["param_ids"]).items()},
    )


def _read_state(key: str, document: Node) -> states.State:
    word, *values = document
    for kind in states.rare_kinds(key):
        state: states.State | None = kind.restored(word, values)
        if state is not None:
            return state
    if word == states.FLAT:
        (dtype,) = values
        return states.Elementwise(_dtype(dtype))
    if word == states.SCALAR:
        dtype, shape, data = values
        scalar = states.Scalar(_dtype(dtype), shape_of(shape), bytes.fromhex(data))
        if len(scalar.data) != math.prod(scalar.shape) * ITEMSIZE[scalar.dtype]:
            raise CorruptFileError(f"a {dtype}{list(scalar.shape)} of {len(scalar.data)} bytes")
        return scalar
    (value,) = values
    return states.Plain(value)


def _layout(stage: Node, world_size: Node, *others: Node) -> ZeroLayout:
    if stage not in (0, 1, 2, 3) or not all(isinstance(other, int) for other in others):
        raise UnsupportedError(f"ZeRO stage {show(stage)} with {show(others)} is not known")
    return ZeroLayout(int(stage), _count(world_size, least=1), *others)


def _tensor(state: Node, name: Node, dtype: Node, shape: Node, model_part: Node) -> LogicalTensor:
    if state == FILE and not names.is_inside(_text(name)):
        raise CorruptFileError(f"file {show(name)} leads out of the checkpoint")
    return LogicalTensor(
        name_of(state), name_of(name), _dtype(dtype), shape_of(shape), _model_part_name(model_part)
    )


def _model_part_name(value: Node) -> str:
    """Read a model part's name: the group around its arrays, unescaped in their paths."""
    if value != "" and not names.is_name(_text(value)):
        raise CorruptFileError(f"{show(value)} is not a name of a part of the model")
    return name_of(value)


def _entry(
    name: Node, kind: Node, dtype: Node, shape: Node, alias_of: Node, paused: Node = False
) -> ModuleEntry:
    # An entry that is kept as it is, such as `get_extra_state`, has neither dtype nor shape.
    dtype = dtype if dtype == "" else _dtype(dtype)
    known = name_of(name), _text(kind), dtype, shape_of(shape), name_of(alias_of)
    return ModuleEntry(*known, paused=paused is True)


def _uncut(why: Node, files: Node) -> Uncut:
    return Uncut(_text(why), tuple(map(_text, files)))


def _dropped(at: Node, why: Node, states: Node) -> Dropped:
    return Dropped(_text(at), _text(why), tuple(map(name_of, states)))


def _file(path: Node, mode: Node) -> OtherFile:
    if not names.is_inside(_text(path)):
        raise CorruptFileError(f"file {show(path)} leads out of the checkpoint")
    return OtherFile(path, _count(mode) & 0o777)


def _layer(name: Node, state: Node) -> LayerFile:
    if not names.is_name(_text(name)):
        raise CorruptFileError(f"{show(name)} is not the name of a layer's file")
    return LayerFile(name, _mapping(state))


def _tag(value: Node) -> str:
    if not names.is_tag(_text(value)):
        raise CorruptFileError(f"{show(value)} is not a tag")
    return str(value)


def _dtype(value: Node) -> str:
    if _text(value) not in ITEMSIZE:
        raise UnsupportedError(f"dtype {show(value)} is not known")
    return str(value)


def _count(value: Node, *, least: int = 0) -> int:
    if not isinstance(value, int) or not least <= value <= _LIMIT_COUNT:
        raise CorruptFileError(f"{show(value)} is not a count")
    return value


def _text(value: Node) -> str:
    if not isinstance(value, str):
        raise CorruptFileError(f"{show(value)} is not text")
    return value


def _mapping(value: Node) -> Mapping[str, Node]:
    if not isinstance(value, dict):
        raise CorruptFileError(f"{show(value)} is not a mapping")
    return value


def _require_consistent(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose parts refer to something missing."""
    index = checkpoint.tensor_index()
    if len(index) != len(checkpoint.tensors):
        raise CorruptFileError("two tensors have one name")
    if not checkpoint.model_parts:
        raise CorruptFileError("holds no part of a model")
    if checkpoint.dropped is not None:
        _require_no_states(checkpoint)
    kept = set() if checkpoint.uncut is None else {*checkpoint.uncut.files}
    if not kept <= {file.path for file in checkpoint.files}:
        raise CorruptFileError("lacks files of ranks whose states cannot be cut")
    for model_part in checkpoint.model_parts:
        if checkpoint.layout.stage:
            _require_whole_optimizer(model_part)
        else:
            _require_uncut(model_part)
        _require_tensors(model_part, checkpoint.tensors, index)
        _require_shapes(model_part, checkpoint)


def _require_no_states(checkpoint: Checkpoint) -> None:
    state_names = {tensor.state for tensor in checkpoint.tensors} - {MASTER, MODULE, BLOB, FILE}
    for model_part in checkpoint.model_parts:
        for group in model_part.groups:
            state_names |= {*(group.states or ())}
    if state_names:
        raise CorruptFileError(f"is said to hold weights only, and holds {show(min(state_names))}")


def _require_tensors(
    model_part: ModelPart,
    tensors: Sequence[LogicalTensor],
    index: Mapping[tuple[str, str, str], int],
) -> None:
    for group in model_part.groups:
        numels: dict[str, int] = {}
        for key, state in group.tensor_states.items():
            for param in group.params:
                row = index.get((model_part.name, key, param))
                if row is None:
                    raise CorruptFileError(f"{key} of {show(param)} is not there")
                numel = numels.setdefault(param, tensors[row].numel)
                if tensors[row].numel * state.block != numel:
                    raise CorruptFileError(f"{key} of {show(param)} is not as long as its weight")
    module_state = model_part.model_state.get(names.MODULE_STATE)
    extra = module_state.keys() if isinstance(module_state, dict) else ()
    for entry in model_part.module:
        own = {(model_part.name, state, entry.name) for state in (MODULE, MASTER)}
        found = entry.name in extra if entry.kind == "extra" else bool(own & index.keys())
        if entry.kind not in ("alias", "excluded") and not found:
            raise CorruptFileError(f"module's {show(entry.name)} is not there")


def _require_shapes(model_part: ModelPart, checkpoint: Checkpoint) -> None:
    """Require that the module's weights have as many elements as the tensors that hold them."""
    index = checkpoint.tensor_index()
    for entry in model_part.module:
        if entry.kind == "extra":
            continue
        name = entry.held_as
        numel = math.prod(entry.shape)
        for state in (MODULE, MASTER):
            tensor = index.get((model_part.name, state, name))
            if tensor is not None and checkpoint.tensors[tensor].numel != numel:
                message = f"module's {show(entry.name)} has {numel:,} elements, its {state} weights"
                raise CorruptFileError(f"{message} {checkpoint.tensors[tensor].numel:,}")
        if entry.dtype == "":
            raise CorruptFileError(f"module's {show(entry.name)} has no dtype")


def _require_uncut(model_part: ModelPart) -> None:
    """Require the entries of a model file at stage 0, where nothing is partitioned."""
    if model_part.groups or model_part.optimizer_file:
        raise CorruptFileError("is said to be of stage 0, and holds what a ZeRO stage has cut")
    if not {names.MODULE_STATE, names.WHOLE_OPTIMIZER} <= {*model_part.model_state}:
        raise CorruptFileError("holds no whole model file")


def _require_whole_optimizer(model_part: ModelPart) -> None:
    """Require the entries that every optimizer and every model file has."""
    state = model_part.optimizer_file.get(names.OPTIMIZER)
    wrapped = model_part.wrapped_optimizer if isinstance(state, dict) else None
    groups = wrapped.get("param_groups") if isinstance(wrapped, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CorruptFileError("holds no param groups of an optimizer")
    if {group.number for group in model_part.groups} != {*range(len(groups))}:
        raise CorruptFileError(f"{len(groups)} param groups are not those of the optimizer")
    expert_ranks: dict[int, list[int]] = {}
    for group in model_part.groups:
        expert_ranks.setdefault(group.number, []).append(group.expert_rank)
    for group in model_part.groups:
        if expert_ranks[group.number] != [*range(group.expert_parallel)]:
            raise CorruptFileError(f"param group {group.number} lacks an expert rank")
    if model_part.model_state and not {names.MODULE_STATE, names.PARAM_SHAPES} <= {
        *model_part.model_state
    }:
        raise CorruptFileError("holds no whole model file")
    if not isinstance(model_part.model_state.get(names.SHARED_PARAMS) or {}, dict):
        raise CorruptFileError(f"its '{names.SHARED_PARAMS}' is not a list of tied parameters")

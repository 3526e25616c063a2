"""Finds out which box of a tensor each rank holds, from torch's DTensors and ShardedTensors.

Checked with torch 2.13: `torch/distributed/tensor/_dtensor_spec.py` and `placement_types.py`, and
`torch/distributed/_shard/sharded_tensor`. Nothing of them is imported; their pickles are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.pickle.inert import Call, Global, Node, show
from streamshard.formats.pickle.node_checks import is_size
from streamshard.formats.torch.torch_tensor import Tensor, shape_of, tensor_of

_TORCH: Final = "torch.distributed"
_DTENSOR: Final = "DTensor"
_SHARDED_TENSOR: Final = "ShardedTensor"
_SHARD: Final = "Shard"
_STRIDED: Final = "_StridedShard"
REPLICATE: Final = "Replicate"
"""Kind of a placement that does not cut."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """What one dimension of a mesh of devices does to a tensor."""

    kind: str
    dim: int = -1
    """The tensor's dimension that it cuts; -1 if it does not cut."""
    factor: int = 1
    """Of a strided cut: how many parts later dimensions of the mesh made of it before."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor, in one rank's file."""

    offset: Shape
    tensor: Tensor
    copies: list[Tensor]
    """The same part in other ranks' files."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank's file holds of one tensor."""

    shape: Shape
    """Of the whole tensor."""
    local: Sequence[Tensor]
    """What the rank has of it: one tensor, for FSDP1 also none."""
    offsets: Sequence[Shape] | None = None
    """Where each begins; None if that follows from the mesh."""
    placements: tuple[Placement, ...] = ()
    coordinate: Shape = ()
    """The rank's place in the mesh."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain tensor, which the rank has whole."""
        return self.offsets is None and not self.placements

    @property
    def is_dtensor(self) -> bool:
        return bool(self.placements)


def part_of(node: Node) -> RankPart | None:
    """Interpret a node of a rank's file; None if it is no tensor."""
    plain = tensor_of(node)
    if plain is not None:
        return RankPart(plain.shape, [plain])
    cls, size, state = _wrapped(node)
    if cls == _DTENSOR:
        return _of_dtensor(size, state)
    return _of_sharded_tensor(state) if cls == _SHARDED_TENSOR else None


def is_tensor(node: Node) -> bool:
    """Tell whether a node is a tensor, plain or cut among ranks."""
    return isinstance(node, Call) and (
        _wrapped(node)[0] in (_DTENSOR, _SHARDED_TENSOR) or tensor_of(node) is not None
    )


def _wrapped(node: Node) -> tuple[str, Node, Node]:
    """Return class, size and state of a tensor's subclass that a pickle rebuilds."""
    if not isinstance(node, Call) or node.name != "torch._tensor._rebuild_from_type_v2":
        return "", None, None
    function, cls, args, state = (*node.args, None, None, None, None)[:4]
    is_own = isinstance(cls, Global) and cls.module.startswith(_TORCH)
    if not is_own or str(function) != "torch._utils._rebuild_wrapper_subclass":
        return "", None, None
    return cls.name, args[2], state


def entries_of(node: Node) -> Mapping[str, Node]:
    """Return the attributes of an object: its state, or the second part of one with slots."""
    state = node.state if isinstance(node, Call) else node
    if isinstance(state, tuple) and len(state) == 2:
        state = state[1]
    if not isinstance(state, dict):
        raise CorruptFileError(f"{show(node)} has no attributes")
    return state


def _is_of_torch(node: Node, name: str) -> bool:
    function = node.function if isinstance(node, Call) else None
    return (
        isinstance(function, Global)
        and function.name == name
        and function.module.startswith(_TORCH)
    )


def _of_dtensor(size: Node, state: Node) -> RankPart:
    attributes = entries_of(state)
    spec = entries_of(attributes["_spec"])
    local = tensor_of(attributes["_local_tensor"])
    coordinate = entries_of(spec["mesh"])["_coordinate_on_dim"]
    placements = tuple(map(_placement, spec["placements"]))
    if local is None or coordinate is None or len(coordinate) != len(placements):
        raise UnsupportedError("a DTensor of a rank outside of its mesh")
    for entry in spec.get("shard_order") or ():
        mesh_dims = entry.args[1]
        if list(mesh_dims) != sorted(mesh_dims):
            message = f"a DTensor that dimensions {show(mesh_dims)} of a mesh cut in this order"
            raise UnsupportedError(message)
    return RankPart(shape_of(size), [local], None, placements, tuple(map(_size, coordinate)))


def _placement(node: Node) -> Placement:
    for kind in (_SHARD, _STRIDED):
        if _is_of_torch(node, kind):
            held = entries_of(node)
            return Placement(kind, _size(held["dim"]), _size(held.get("split_factor", 1)))
    if not _is_of_torch(node, REPLICATE):
        raise UnsupportedError(f"a DTensor with the placement {show(node)}")
    return Placement(REPLICATE)


def _of_sharded_tensor(state: Node) -> RankPart:
    shards, metadata = state[:2]
    local, offsets = [], []
    for shard in shards:
        attributes = entries_of(shard)
        tensor = tensor_of(attributes["tensor"])
        if tensor is None:
            raise CorruptFileError("a shard that is no tensor")
        local.append(tensor)
        offsets.append(tuple(map(_size, entries_of(attributes["metadata"])["shard_offsets"])))
    return RankPart(shape_of(entries_of(metadata)["size"]), local, offsets)


def _size(node: Node) -> int:
    if not is_size(node):
        raise CorruptFileError(f"{show(node)} is not a place in a tensor or in a mesh")
    return int(node)


def boxes_of(what: str, parts: Sequence[RankPart]) -> list[Box]:
    """Return the boxes that the ranks hold of one tensor; what several hold is listed once."""
    try:
        return _boxes(parts)
    except (CorruptFileError, DisagreementError) as error:
        raise type(error)(f"{what}: {error.args[0]}") from error


def dtype_of(what: str, parts: Sequence[RankPart]) -> str:
    """Return the dtype in which the ranks hold one tensor."""
    dtypes = list(dict.fromkeys(tensor.dtype for part in parts for tensor in part.local))
    if len(dtypes) != 1:
        raise DisagreementError(f"{what} has the dtypes {', '.join(dtypes) or 'of no rank'}")
    return dtypes[0]


def _boxes(parts: Sequence[RankPart]) -> list[Box]:
    first = parts[0]
    for part in parts:
        if (part.shape, part.placements, part.offsets is None) != (
            first.shape, first.placements, first.offsets is None,
        ):  # fmt: skip
            raise DisagreementError("is cut in another way on other ranks")
    counts = [max(each) + 1 for each in zip(*(part.coordinate for part in parts), strict=True)]
    boxes: dict[Shape, Box] = {}
    for part in parts:
        offsets = part.offsets or ()
        if part.offsets is None:
            offset, sizes = box_of(part, counts)
            offsets = [offset]
            if part.local[0].shape != sizes:
                message = f"a rank holds {list(part.local[0].shape)} where {list(sizes)} belong"
                raise CorruptFileError(message)
        for offset, tensor in zip(offsets, part.local, strict=True):
            if tensor.numel and len(tensor.shape) == len(first.shape):
                box = boxes.setdefault(offset, Box(offset, tensor, []))
                if box.tensor is not tensor:
                    box.copies.append(tensor)
    return list(boxes.values())


def box_of(part: RankPart, counts: Sequence[int]) -> tuple[Shape, Shape]:
    """Return where a rank's part of a DTensor begins, and its lengths.

    `counts`: ranks along each dimension of the mesh.

    Dimensions of the mesh cut one after the other, as `torch.chunk` does; a strided one cuts what
    all later ones have cut already.
    """
    offset, sizes = [0] * len(part.shape), list(part.shape)
    placed = list(enumerate(part.placements))
    cuts = [(i, cut) for i, cut in placed if cut.kind == _SHARD]
    cuts += [(i, cut) for i, cut in reversed(placed) if cut.kind == _STRIDED]
    for number, cut in cuts:
        if cut.dim >= len(sizes):
            raise CorruptFileError(f"dimension {cut.dim} of {list(part.shape)} is cut")
        if cut.kind == _STRIDED:
            _require_factor(part, number, cut, counts)
        share = -(-sizes[cut.dim] // counts[number])
        start = min(part.coordinate[number] * share, sizes[cut.dim])
        offset[cut.dim] += start
        sizes[cut.dim] = min(share, sizes[cut.dim] - start)
    return tuple(offset), tuple(sizes)


def _require_factor(part: RankPart, number: int, cut: Placement, counts: Sequence[int]) -> None:
    """Refuse a strided cut of other parts than those that later dimensions of the mesh make."""
    later = 1
    for other, count in zip(part.placements[number + 1 :], counts[number + 1 :], strict=True):
        later *= count if other.dim == cut.dim else 1
    if later != cut.factor:
        message = f"a strided cut of {cut.factor} parts, where later dimensions of its mesh make"
        raise UnsupportedError(f"{message} {later}")

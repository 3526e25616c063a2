"""Makes torch's DTensors for another count of ranks, from those that ranks have saved.

The attributes of a mesh are those of torch 2.5 to 2.13 (`torch/distributed/device_mesh.py`,
`_mesh_layout.py`); those of a DTensor are in `torch/distributed/tensor/_dtensor_spec.py`. Others
are refused: they may depend on the count of ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np

from streamshard.errors import UnsupportedError
from streamshard.formats.fsdp_ranks.sharded_tensors import REPLICATE, RankPart, Shape, entries_of
from streamshard.formats.pickle.inert import Call, Global, Node, show, show_few
from streamshard.formats.pickle.node_checks import require_shape
from streamshard.formats.torch.torch_tensor import Storage, make_tensor, tensor_of
from streamshard.layout.selection import strides
from streamshard.model import Literal

_LOCAL: Final = "_local_tensor"
_SPEC: Final = "_spec"
_MESH: Final = "mesh"
_DEVICE: Final = Global("torch", "device")
_DEVICE_ARGUMENT: Final = 6
"""Place of the device among the arguments of `torch._utils._rebuild_wrapper_subclass`."""
_KEPT: Final = frozenset({"device_type", "_device_type", "_root_mesh", "_thread_id"})
_NAMES: Final = frozenset({"mesh_dim_names", "_mesh_dim_names"})
_LISTS: Final = frozenset({"_flatten_mesh_list", "_flatten_rank_map"})
_GROUPS: Final = frozenset({"_dim_group_names", "_dim_group_infos"})
"""Names of process groups, by dimension; since 2.8 without their ranks."""
_MADE: Final = frozenset({"_rank", "_flatten_mapping", "_hash"})
"""What a rank, the use of a mesh, and a process decide."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How many ranks lie along each dimension of a mesh; they are numbered row by row."""

    lengths: Shape

    @property
    def ranks(self) -> int:
        return math.prod(self.lengths)

    def coordinate(self, rank: int) -> Shape:
        """Return a rank's place."""
        return tuple(int(at) for at in np.unravel_index(rank, self.lengths))

    @classmethod
    def of(cls, node: Call) -> Self:
        attributes = entries_of(_mesh_of(node))
        shape = cls(_lengths(attributes))
        for key in _LISTS & attributes.keys():
            if attributes[key] != tuple(range(shape.ranks)):
                message = "a mesh of some of the ranks, or of ranks in another order than their own"
                raise UnsupportedError(message)
        return shape

    def for_ranks(self, ranks: int) -> "MeshShape":
        """Return the mesh of another count of ranks, as a job with the same settings makes it.

        With HSDP a replica keeps its size, which is verl's `fsdp_size`; a job that has no more
        ranks than that does without replicas (`create_device_mesh` of
        `verl/workers/fsdp_workers.py`, 0.8).
        """
        shards = self.lengths[-1]
        if len(self.lengths) == 1 or ranks <= shards:
            return MeshShape((ranks,))
        if ranks % shards:
            message = f"HSDP with {shards} ranks in each replica: {ranks} ranks are no multiple"
            raise UnsupportedError(f"{message} of that")
        return MeshShape((ranks // shards, shards))


def require_fsdp(part: RankPart) -> None:
    """Refuse a tensor that something else than FSDP or HSDP has cut."""
    *replicas, last = part.placements
    if len(replicas) > 1 or any(one.kind != REPLICATE for one in replicas):
        message = "cut along several dimensions of a mesh, as with tensor parallelism: how a job"
        raise UnsupportedError(f"{message} with other ranks cuts it, no file tells")
    if last.kind not in ("Shard", REPLICATE):
        raise UnsupportedError(f"a DTensor with the placement {last.kind}")


def require_ascending(node: Call) -> None:
    """Refuse a mesh in which ranks descend: torch's groups number them in ascending order.

    By these numbers FSDP2 cuts and gathers, but a DTensor says where its rank is in the mesh.
    """
    attributes = entries_of(_mesh_of(node))
    for key in _LISTS & attributes.keys():
        numbers, lengths = np.array(attributes[key], dtype=np.int64), _lengths(attributes)
        if (np.diff(numbers) > 0).all():
            continue
        ranks = numbers.reshape(lengths if numbers.size == math.prod(lengths) else -1)
        if any((np.diff(ranks, axis=axis) < 0).any() for axis in range(ranks.ndim)):
            message = f"a DTensor on a mesh of the ranks {show_few(numbers.tolist())}, in this"
            raise UnsupportedError(f"{message} order, in which FSDP2 does not cut")


def _mesh_of(node: Call) -> Call:
    mesh: Call = entries_of(entries_of(node.args[3])[_SPEC])[_MESH]
    return mesh


def _lengths(mesh: Mapping[str, Node]) -> Shape:
    if _MESH in mesh and (tensor := tensor_of(mesh[_MESH])) is not None:
        return tensor.shape
    layout = entries_of(mesh["_layout"])
    if "axes" in layout:
        return tuple(math.prod(require_shape(entries_of(a)["shape"])) for a in layout["axes"])
    shape = layout["shape"]
    return require_shape(shape if isinstance(shape, tuple) else (shape,))


def with_local(node: Call, local: Node) -> Call:
    """Return a DTensor with another local tensor."""
    function, cls, args, state = node.args
    changed = _changed(state, {**entries_of(state), _LOCAL: local})
    return replace(node, args=(function, cls, args, changed))


@dataclass(slots=True)
class MeshChange:
    """Puts the DTensors of a file on the mesh of another count of ranks."""

    shape: MeshShape
    rank: int
    _made: dict[int, tuple[Node, Node]] = field(default_factory=dict, init=False)
    """Nodes by the identity of those that they take the place of, which are kept for it."""

    def dtensor(self, node: Call, local: Node) -> Call:
        """Return a DTensor with its local tensor on the new mesh."""
        function, cls, args, state = node.args
        on_cpu = tuple(
            Call(_DEVICE, ("cpu",)) if n == _DEVICE_ARGUMENT else arg for n, arg in enumerate(args)
        )
        held = entries_of(state)
        made = _changed(state, {**held, _LOCAL: local, _SPEC: self._spec(held[_SPEC])})
        return replace(node, args=(function, cls, on_cpu, made))

    def _spec(self, node: Call) -> Call:
        attributes = entries_of(node)
        placements = attributes["placements"]
        left_out = len(placements) - len(self.shape.lengths)
        changed = {
            **attributes,
            _MESH: self._mesh(attributes[_MESH]),
            "placements": placements[left_out:],
            "_hash": None,
        }
        if changed.get("shard_order"):
            changed["shard_order"] = tuple(
                _moved(entry, left_out) for entry in changed["shard_order"]
            )
        return _with_entries(node, changed)

    def _mesh(self, node: Call) -> Call:
        pair = self._made.get(id(node))
        if pair is None:
            held = entries_of(node)
            made = {k: self._attribute(k, v) for k, v in held.items() if not self._is_lost(k, v)}
            pair = self._made[id(node)] = node, _with_entries(node, made)
        mesh: Call = pair[1]
        return mesh

    def _is_lost(self, key: str, node: Node) -> bool:
        """Tell whether an attribute names groups of some ranks, which each job numbers itself.

        A wrong name would let ranks talk to others than theirs.
        """
        return key in _GROUPS and max(len(node), len(self.shape.lengths)) > 1

    def _attribute(self, key: str, node: Node) -> Node:
        lengths, ranks = self.shape.lengths, range(self.shape.ranks)
        if key == "_root_mesh" and node is not None:
            raise UnsupportedError("a mesh that is a part of another one")
        if key in _KEPT:
            return node
        if key in _NAMES:
            return node and node[-len(lengths) :]
        if key in _LISTS:
            return tuple(ranks)
        if key in _GROUPS:
            return [_of_all(group, ranks) for group in node]
        if key == "_coordinate_on_dim":
            return type(node)(self.shape.coordinate(self.rank))
        if key == "_layout":
            return self._layout(node)
        if key in (_MESH, "_rank_map"):
            return _numbers(node, lengths if key == _MESH else (len(ranks),))
        if key in _MADE:
            return {"_rank": self.rank, "_flatten_mapping": {}, "_hash": None}[key]
        message = f"a mesh with the attribute {show(key)}: of a version of torch that is not known"
        raise UnsupportedError(message)

    def _layout(self, node: Call) -> Call:
        attributes, lengths = entries_of(node), self.shape.lengths
        steps = strides(lengths)
        if attributes.keys() == {"shape", "stride"}:
            return _with_entries(node, {"shape": lengths, "stride": steps})
        if attributes.keys() != {"axes"} or not attributes["axes"]:
            raise UnsupportedError(f"a mesh with a layout of {show_few(list(attributes))}")
        axis = attributes["axes"][-1]
        axes = [
            _with_entries(axis, {"shape": (n,) * (n > 1), "stride": (step,) * (n > 1)})
            for n, step in zip(lengths, steps, strict=True)
        ]
        return _with_entries(node, {"axes": tuple(axes)})


def _moved(entry: Call, left_out: int) -> Call:
    """Return an entry of the order of cuts without dimensions of the mesh that are left out."""
    dim, mesh_dims = entry.args
    return replace(entry, args=(dim, tuple(at - left_out for at in mesh_dims)))


def _of_all(group: Node, ranks: range) -> Node:
    """Return what names the group of all ranks: its name, or its tag, ranks and name."""
    return group if isinstance(group, str) else (group[0], list(ranks), *group[2:])


def _numbers(node: Node, shape: Shape) -> Call:
    """Return a tensor that counts up from 0, of the dtype of another one."""
    tensor = tensor_of(node)
    if tensor is None:
        raise UnsupportedError(f"a mesh whose ranks are {show(node)}")
    dtype = tensor.dtype
    data = np.arange(math.prod(shape), dtype=dtype).tobytes()
    return make_tensor(Storage(dtype, math.prod(shape), Literal(data)), shape)


def _with_entries(node: Call, entries: Mapping[str, Node]) -> Call:
    return replace(node, state=_changed(node.state, entries))


def _changed(state: Node, entries: Mapping[str, Node]) -> Node:
    """Return the state of an object with other attributes.

    A state is the attributes alone, or a pair whose second part they are.
    """
    return (state[0], dict(entries)) if isinstance(state, tuple) else dict(entries)

"""Writes files of FSDP's ranks for another count of ranks: `fsdp_ranks_reader` reads such files."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Self

import numpy as np

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats import strict_json
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.fsdp_ranks.device_meshes import MeshChange, MeshShape, require_fsdp
from streamshard.formats.fsdp_ranks.flat_parameters import group_of, is_flat
from streamshard.formats.fsdp_ranks.rank_names import EXTRA, MODEL, OPTIMIZER, rank_file
from streamshard.formats.fsdp_ranks.rank_trees import TreeShape
from streamshard.formats.fsdp_ranks.sharded_tensors import Shape, box_of, part_of
from streamshard.formats.pickle.inert import Call, Node
from streamshard.formats.torch.torch_tensor import Storage, make_tensor, tensor_of
from streamshard.formats.torch.zip_layout import FileImage, Serialized, serialize
from streamshard.layout.cutting import Segments, Share, partition_segments
from streamshard.sizes import show_ranks

_RNG: Final = "rng"
_RANK: Final = "rank"
_WORLD_SIZE: Final = "world_size"


@dataclass(frozen=True, slots=True)
class RankImages:
    """The files of all ranks of a job."""

    trees: Mapping[str, TreeShape]
    """What each rank saves of the model and of the optimizer."""
    extra: Sequence[Node]
    """The other state of the ranks that saved."""
    mesh: MeshShape

    @classmethod
    def of(cls, checkpoint: Checkpoint, ranks: int) -> Self:
        """Decide what the files of so many ranks are."""
        state = checkpoint.model_parts[0].model_state
        if MODEL in state and checkpoint.unrecorded:
            raise UnsupportedError(f"does not read {'; '.join(checkpoint.unrecorded)}")
        if MODEL not in state:
            message = "its tensors are ShardedTensors, as FSDP1 saves them without a device mesh;"
            raise UnsupportedError(f"{message} only DTensors can be written to files of ranks")
        trees = {kind: TreeShape.of(state[kind]) for kind in (MODEL, OPTIMIZER) if kind in state}
        meshes = set()
        for leaf in (leaf for template in trees.values() for leaf in template.leaves):
            part = part_of(leaf)
            if part is not None and part.is_dtensor:
                require_fsdp(part)
                if checkpoint.tensors[part.local[0].storage.blob].shape != part.shape:
                    raise UnsupportedError("holds a DTensor inside of another object")
                meshes.add(MeshShape.of(leaf))
        if len(meshes) > 1:
            raise UnsupportedError("its DTensors lie on meshes of different shapes")
        if not meshes:
            message = "it holds no DTensor, and so does not tell on which mesh FSDP2 cuts the model"
            raise UnsupportedError(message)
        mesh = meshes.pop()
        if any(is_flat(leaf) for template in trees.values() for leaf in template.leaves):
            _require_cut(mesh, ranks)
        if mesh.ranks != checkpoint.ranks:
            message = f"its DTensors lie on meshes of {mesh.ranks} of its {checkpoint.ranks} ranks,"
            raise UnsupportedError(f"{message} and no file tells which meshes other ranks make")
        return cls(trees, state[EXTRA], mesh.for_ranks(ranks))

    def images(self) -> Iterator[FileImage]:
        """Yield every file, rank by rank."""
        ranks = self.mesh.ranks
        for rank in range(ranks):
            for kind, template in self.trees.items():
                path = rank_file(kind, ranks, rank)
                yield FileImage(path, partial(self._serialized, template, rank))
            if self.extra:
                path = rank_file(EXTRA, ranks, rank)
                yield FileImage(path, partial(serialize, self._extra(rank)))

    def _serialized(self, template: TreeShape, rank: int) -> Serialized:
        change, storages = MeshChange(self.mesh, rank), dict[int, Storage]()
        leaves = [self._leaf(leaf, change, storages) for leaf in template.leaves]
        return serialize(template.filled(leaves))

    def _leaf(self, node: Node, change: MeshChange, storages: dict[int, Storage]) -> Node:
        """Return a rank's part of a DTensor; tied ones share a storage."""
        if is_flat(node):
            return self._flat(node, self.mesh.coordinate(change.rank)[-1])
        part = part_of(node) if isinstance(node, Call) else None
        if part is None or not part.is_dtensor:
            return node
        whole = part.local[0]
        tensor = whole.storage.blob
        placements = part.placements[len(part.placements) - len(self.mesh.lengths) :]
        coordinate = self.mesh.coordinate(change.rank)
        own = replace(part, placements=placements, coordinate=coordinate)
        offset, sizes = box_of(own, self.mesh.lengths)
        segments = partial(_box_segments, tensor, part.shape, offset, sizes)
        share = Share(np.array([tensor], dtype=np.int64), whole.dtype, segments, change.rank)
        storage = Storage(whole.dtype, math.prod(sizes), share)
        storage = storages.setdefault(tensor, storage)
        return change.dtensor(node, make_tensor(storage, sizes))

    def _flat(self, node: Call, shard: int) -> Call:
        members = [tensor for tensor in map(tensor_of, node.args) if tensor is not None]
        group = group_of([tensor.numel for tensor in members], self.mesh.lengths[-1])
        tensors = np.array([tensor.storage.blob for tensor in members], dtype=np.int64)
        segments = partial(partition_segments, group, tensors=tensors)
        share, numel = Share(tensors, members[0].dtype, segments, shard), group.partition_numel
        return make_tensor(Storage(members[0].dtype, numel, share), (numel,))

    def _extra(self, rank: int) -> Node:
        """Return the other state of a rank: its own, or rank 0's without random states."""
        is_new = rank >= len(self.extra)
        state: dict[Node, Node] = dict(self.extra[0 if is_new else rank])
        if is_new:
            state.pop(_RNG, None)
        changed = {_RANK: rank, _WORLD_SIZE: self.mesh.ranks}
        return {key: changed.get(key, node) for key, node in state.items()}

    def notes(self) -> Iterator[str]:
        """Say what is lost, and what is new."""
        ranks, saved = self.mesh.ranks, len(self.extra)
        if len(self.mesh.lengths) > 1:
            yield (
                "The meshes in the files name no process groups, which a job with replicas numbers "
                "itself: it trains on and saves, but cannot gather whole states of the optimizer."
            )
        if not saved:
            yield "There is no state of the learning rate scheduler in it, and no random states."
            return
        if saved < ranks:
            yield (
                f"Not in it: random states for the new {show_ranks(range(saved, ranks))}, which "
                "the job seeds."
            )
        if ranks < saved:
            yield f"Not in it: the random states of {show_ranks(range(ranks, saved))}."


def _require_cut(mesh: MeshShape, ranks: int) -> None:
    """Refuse what FSDP1 does not load."""
    if len(mesh.lengths) > 1:
        message = "FSDP1 with replicas: it loads DTensors by the names of process groups, which a"
        raise UnsupportedError(f"{message} job of other ranks numbers itself")
    if ranks == 1:
        message = "FSDP1 does not cut on one rank, and loads no DTensors there; write files for two"
        raise UnsupportedError(f"{message} ranks or more")


def _box_segments(
    tensor: int, shape: Shape, offset: Shape, sizes: Shape, *, rank: int, itemsize: int
) -> Segments:
    """Return the segments that fill a rank's part of a tensor, which is a box."""
    cut = [d for d, length in enumerate(shape) if sizes[d] != length]
    last = cut[-1] if cut else 0
    behind = math.prod(shape[last + 1 :])
    starts = np.zeros(1, dtype=np.int64)
    for d in range(last):
        starts = (starts[:, None] * shape[d] + offset[d] + np.arange(sizes[d])).reshape(-1)
    run = (sizes[last] if sizes else 1) * behind
    first = (starts * shape[last] + offset[last]) * behind if sizes else starts
    numbers = np.full_like(first, tensor)
    target = np.arange(len(first), dtype=np.int64) * run * itemsize
    return Segments(numbers, first, first + run, target)


def config_for(data: bytes, ranks: int) -> bytes:
    """Return verl's `fsdp_config.json` for another count of ranks."""
    try:
        config = strict_json.parse(data)
    except ValueError as error:
        raise CorruptFileError(f"is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise CorruptFileError(f"holds a {type(config).__name__} where a dict belongs")
    return json.dumps({**config, _WORLD_SIZE: ranks}, indent=4).encode()

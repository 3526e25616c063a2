"""Turns spelled torch files into work: every storage becomes a region with its copies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.engine.cast import cast_between
from streamshard.engine.checksums import Crc32, crc32
from streamshard.engine.work import Fixed, Region, Span, TargetFile
from streamshard.formats import torch_file
from streamshard.formats.checkpoint import Checkpoint, Family
from streamshard.formats.torch_tensor import Storage
from streamshard.formats.zero_writer import FileImage
from streamshard.model import (
    BLOB,
    FILE,
    ITEMSIZE,
    MASTER,
    Content,
    Copies,
    Literal,
    PartitionOf,
    ShardOf,
    ShardsOf,
    SubGroup,
    Whole,
    WholesOf,
    ZeroLayout,
)
from streamshard.operations.cut import flat_groups
from streamshard.operations.source import Source
from streamshard.plan.cutting import (
    Segments,
    coalesce,
    owned_segments,
    partition_segments,
    shard_segments,
    whole_segment,
)
from streamshard.plan.zero import FlatGroup, sub_groups

_SPAN_BYTES: Final = 256 << 20
"""Large files are shared out among workers in spans of about this size."""


@dataclass(frozen=True, slots=True)
class FamilyCut:
    """How a target's family is cut."""

    flat_groups: Sequence[FlatGroup]
    """One per param group (stages 1 and 2)."""
    sub_groups: Sequence[SubGroup]
    """Across all param groups (stage 3)."""


def cut_family(
    checkpoint: Checkpoint, family: Family, layout: ZeroLayout, module_dtype: str
) -> FamilyCut:
    """Cut one family as an engine of this layout does."""
    if layout.stage < 3:
        return FamilyCut(flat_groups(checkpoint, family, layout, module_dtype), ())
    numels = checkpoint.master_numels(family)
    units = sub_groups(
        [[numels[name] for name in group.params] for group in family.groups],
        world_size=layout.world_size,
        sub_group_size=layout.sub_group_size,
    )
    return FamilyCut((), units)


class NativeFiles:
    """Knows how a target is cut, and fills its files from a source."""

    def __init__(self, source: Source, world_size: int, cuts: Sequence[FamilyCut]) -> None:
        self._source = source
        self._world_size = world_size
        self._cuts = cuts
        self._tensors = source.checkpoint.tensors
        self._numels = np.array([tensor.numel for tensor in self._tensors], dtype=np.int64)
        self._members = _members(source.checkpoint)

    def lay_out(self, image: FileImage) -> torch_file.TorchLayout:
        """Lay out a file; its size and its pickle are known then."""
        return torch_file.lay_out(image.spelled, PurePosixPath(image.path).stem)

    def torch_target(self, image: FileImage) -> TargetFile:
        """Turn one spelled file into work."""
        layout = self.lay_out(image)
        spans: list[Span] = []
        parts: list[Fixed | Region] = []
        checksums: list[Crc32] = []
        start = held = 0
        for record in layout.records:
            checksum = Crc32()
            checksums.append(checksum)
            parts += self._parts(record, checksum, image)
            held += record.nbytes
            if held >= _SPAN_BYTES:
                spans.append(Span(start, parts))
                start, held, parts = record.end, 0, []
        spans.append(Span(start, parts))
        return TargetFile(
            path=image.path,
            spans=spans,
            ending=lambda: layout.ending([checksum.value for checksum in checksums]),
            ending_offset=layout.records[-1].end,
        )

    def other_targets(self, paths: Mapping[str, str]) -> Iterator[TargetFile]:
        """Turn the files that come along into work; `paths` says what each is to be called."""
        modes = {file.path: file.mode for file in self._source.checkpoint.files}
        for index, tensor in enumerate(self._tensors):
            if tensor.state == FILE and tensor.name in paths:
                copies = self._copies(whole_segment(index, tensor.numel), 1, 1)
                span = Span(0, [Region(tensor.nbytes, copies)])
                yield TargetFile(
                    paths[tensor.name],
                    [span],
                    ending_offset=tensor.nbytes,
                    mode=modes[tensor.name],
                )

    def _parts(
        self, record: torch_file.Record, checksum: Crc32, image: FileImage
    ) -> list[Fixed | Region]:
        """Spell a record: its header, its data, its descriptor."""
        storage = record.content
        content = storage.content if isinstance(storage, Storage) else storage
        if isinstance(content, Literal):
            checksum.value = crc32(content.data)
            return [Fixed(record.header() + content.data + record.descriptor(checksum.value))]
        if content is None or not isinstance(storage, Storage):
            raise TypeError(f"record {record.name} has nothing to fill it")
        source_dtype, target_dtype = self._dtypes(storage, content)
        source_itemsize, target_itemsize = ITEMSIZE[source_dtype], ITEMSIZE[target_dtype]
        segments = self._segments(content, image, target_itemsize)
        region = Region(
            content_bytes=storage.nbytes,
            copies=self._copies(segments, source_itemsize, target_itemsize),
            checksum=checksum,
            trailer=lambda: record.descriptor(checksum.value),
            trailer_bytes=len(record.descriptor(0)),
            source_itemsize=source_itemsize,
            target_itemsize=target_itemsize,
            cast=cast_between(source_dtype, target_dtype),
        )
        return [Fixed(record.header()), region]

    def _dtypes(self, storage: Storage, content: Content) -> tuple[str, str]:
        """Tell what a storage's elements are in the source, and what they are to become."""
        if isinstance(content, Whole | ShardOf):
            tensor = self._tensors[content.tensor]
            # A blob is bytes, whatever dtype its storage gives them.
            return tensor.dtype, tensor.dtype if tensor.state == BLOB else storage.dtype
        return storage.dtype, storage.dtype

    def _segments(self, content: Content, image: FileImage, itemsize: int) -> Segments:
        family = image.family
        if isinstance(content, Whole):
            return whole_segment(content.tensor, self._tensors[content.tensor].numel)
        if isinstance(content, PartitionOf | WholesOf):
            group = self._cuts[family].flat_groups[content.group]
            members = self._members[family, content.group, content.state]
            cut = partition_segments if isinstance(content, PartitionOf) else owned_segments
            return cut(group, content.rank, members, itemsize=itemsize)
        if isinstance(content, ShardsOf):
            unit = self._cuts[family].sub_groups[content.sub_group]
            members = self._members[family, unit.group, content.state]
            return self._shards(members[unit.first : unit.stop], content.rank, itemsize)
        if isinstance(content, ShardOf) and image.rank is not None:
            return self._shards(np.array([content.tensor]), image.rank, itemsize)
        raise TypeError(f"{content} is no range of logical tensors")

    def _shards(self, tensors: NDArray[np.int64], rank: int, itemsize: int) -> Segments:
        numels = self._numels[tensors]
        return shard_segments(numels, self._world_size, rank, tensors, itemsize=itemsize)

    def _copies(self, segments: Segments, source_itemsize: int, target_itemsize: int) -> Copies:
        copies = self._source.cutting.locate(segments, target_itemsize=target_itemsize)
        return coalesce(copies, itemsize=source_itemsize, target_itemsize=target_itemsize)


def _members(checkpoint: Checkpoint) -> dict[tuple[int, int, str], NDArray[np.int64]]:
    """Return (family, group, state) → logical tensor of each parameter, in the group's order."""
    index = checkpoint.tensor_index()
    return {
        (number, place, state): np.array(
            [index[family.name, state, name] for name in group.params], dtype=np.int64
        )
        for number, family in enumerate(checkpoint.families)
        for place, group in enumerate(family.groups)
        for state in (MASTER, *group.flat_states())
    }

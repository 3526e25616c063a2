"""Disks made of byte arrays: what each layout puts where, and what a plan's copies do.

Every element of every tensor has a number of its own, and padding has bytes that no element has, so
that a wrong byte anywhere shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamshard.layout.cutting import (
    Cutting,
    CuttingBuilder,
    Segments,
    partition_segments,
    shard_segments,
)
from streamshard.layout.zero import FlatGroup, flat_group, sub_groups
from streamshard.model import Copies, Slot
from tests.layout.brute import Owner, flatten, rank_of_flat, shard

HEADER = 5
"""Bytes in front of what a file holds: nothing may count on offset 0."""

Groups = Sequence[Sequence[int]]
"""Element counts of the parameters of each param group."""
Disk = list[bytes]


@dataclass(frozen=True, slots=True)
class Flat:
    """ZeRO-1/2: each param group flattened, a part for every rank."""

    world_size: int
    round_robin: bool = False
    unit: int = 1

    def owners(self, groups: Groups) -> Iterator[list[Owner | None]]:
        """Yield what each file holds, as (parameter, element)."""
        for ids, numels in _numbered(groups):
            _, owners = flatten(
                list(numels), self.world_size, round_robin=self.round_robin, unit=self.unit
            )
            for rank in range(self.world_size):
                part = rank_of_flat(owners, self.world_size, rank)
                yield [None if o is None else (ids[o[0]], o[1]) for o in part]

    def cut(self, groups: Groups, itemsize: int) -> Cutting:
        """Describe the files to the planner."""
        builder = CuttingBuilder([itemsize] * sum(map(len, groups)))
        for number, (ids, numels) in enumerate(_numbered(groups)):
            flat = self._flat(numels)
            first = builder.slot(_slot(number * self.world_size, self.world_size))
            for param, start in zip(ids, flat.starts.tolist(), strict=True):
                builder.assign(param, first, piece_numel=flat.partition_numel, origin=start)
        return builder.build()

    def segments(self, groups: Groups, itemsize: int) -> Iterator[Segments]:
        """Yield what fills each file, as the planner spells it."""
        for ids, numels in _numbered(groups):
            flat = self._flat(numels)
            for rank in range(self.world_size):
                yield partition_segments(flat, rank, np.array(ids, np.int64), itemsize=itemsize)

    def _flat(self, numels: Sequence[int]) -> FlatGroup:
        return flat_group(
            numels,
            world_size=self.world_size,
            round_robin=self.round_robin,
            alignment=self.unit,
        )


@dataclass(frozen=True, slots=True)
class Shards:
    """ZeRO-3: each parameter cut, a rank's shards of a sub-group one after the other."""

    world_size: int
    sub_group_size: int = 10**9

    def owners(self, groups: Groups) -> Iterator[list[Owner | None]]:
        for ids, numels in self._units(groups):
            for rank in range(self.world_size):
                yield [
                    None if element is None else (param, element)
                    for param, numel in zip(ids, numels, strict=True)
                    for element in shard(numel, self.world_size, rank)
                ]

    def cut(self, groups: Groups, itemsize: int) -> Cutting:
        builder = CuttingBuilder([itemsize] * sum(map(len, groups)))
        for number, (ids, numels) in enumerate(self._units(groups)):
            first = builder.slot(_slot(number * self.world_size, self.world_size))
            lead = 0
            for param, numel in zip(ids, numels, strict=True):
                share = -(-numel // self.world_size)
                builder.assign(param, first, piece_numel=share, lead=lead)
                lead += share * itemsize
        return builder.build()

    def segments(self, groups: Groups, itemsize: int) -> Iterator[Segments]:
        for ids, numels in self._units(groups):
            for rank in range(self.world_size):
                yield shard_segments(
                    np.array(numels, np.int64),
                    self.world_size,
                    rank,
                    np.array(ids, np.int64),
                    itemsize=itemsize,
                )

    def _units(self, groups: Groups) -> Iterator[tuple[list[int], list[int]]]:
        numbered = list(_numbered(groups))
        for unit in sub_groups(
            groups, world_size=self.world_size, sub_group_size=self.sub_group_size
        ):
            ids, numels = numbered[unit.group]
            yield ids[unit.first : unit.stop], list(numels[unit.first : unit.stop])


@dataclass(frozen=True, slots=True)
class Chunks:
    """A store: each tensor by itself, in chunks of equal length that are each one file."""

    numel: int

    def owners(self, groups: Groups) -> Iterator[list[Owner | None]]:
        for param, numel in enumerate(n for numels in groups for n in numels):
            for start in range(0, numel, self.numel):
                chunk = range(start, start + self.numel)
                yield [(param, element) if element < numel else None for element in chunk]

    def cut(self, groups: Groups, itemsize: int) -> Cutting:
        builder = CuttingBuilder([itemsize] * sum(map(len, groups)))
        files = 0
        for param, numel in enumerate(n for numels in groups for n in numels):
            count = -(-numel // self.numel)
            builder.assign(param, builder.slot(_slot(files, count)), piece_numel=self.numel)
            files += count
        return builder.build()

    def segments(self, groups: Groups, itemsize: int) -> Iterator[Segments]:
        for param, numel in enumerate(n for numels in groups for n in numels):
            for start in range(0, numel, self.numel):
                stop = min(start + self.numel, numel)
                yield Segments(*(np.array([n], np.int64) for n in (param, start, stop, 0)))


Layout = Flat | Shards | Chunks


def _numbered(groups: Groups) -> Iterator[tuple[list[int], Sequence[int]]]:
    """Number parameters across all groups."""
    first = 0
    for numels in groups:
        yield list(range(first, first + len(numels))), numels
        first += len(numels)


def _slot(first: int, count: int) -> Slot:
    files = np.arange(first, first + count, dtype=np.int64)
    return Slot(files, np.full(count, HEADER, np.int64), np.zeros(count, np.int64))


def number_of(owner: Owner, itemsize: int) -> bytes:
    """Spell an element so that no other is spelled alike."""
    param, element = owner
    return (1 + param * 1000 + element).to_bytes(8, "little")[:itemsize]


def lay(layout: Layout, groups: Groups, itemsize: int, *, padding: bytes = b"\0") -> Disk:
    """Write a layout's files by going through the list of owners."""
    return [
        b"\xee" * HEADER
        + b"".join(padding * itemsize if o is None else number_of(o, itemsize) for o in owners)
        for owners in layout.owners(groups)
    ]


def apply(copies: Copies, disk: Disk, nbytes: int) -> tuple[bytes, NDArray[np.int64]]:
    """Run copies into a region of zeros; also returns how often each byte was written."""
    region, touched = bytearray(nbytes), np.zeros(nbytes, np.int64)
    for file, source, target, count in zip(
        copies.file.tolist(), copies.source.tolist(), copies.target.tolist(),
        copies.nbytes.tolist(), strict=True,
    ):  # fmt: skip
        assert count > 0
        piece = disk[file][source : source + count]
        assert len(piece) == count
        assert 0 <= target <= nbytes - count
        region[target : target + count] = piece
        touched[target : target + count] += 1
    return bytes(region), touched

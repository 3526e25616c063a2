"""Content that the ranks of one machine need alike: each reads a part of it for all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from streamshard.engine.run.work import Region
from streamshard.io.node_memory import NodeMemory, Offer
from streamshard.native.files_on_demand import StorageContent

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank needs, and where the others may find memory for it."""

    path: str
    nbytes: int
    offer: Offer | None
    """None if there is nothing to share, or no memory."""

    def is_alike(self, other: "Wanted") -> bool:
        """Tell whether another rank of the same machine needs the same."""
        if self.offer is None or other.offer is None:
            return False
        return (self.path, self.nbytes, self.offer.machine) == (
            other.path, other.nbytes, other.offer.machine,
        )  # fmt: skip


class NodeShare:
    """Storages of a file, which ranks fill together: `ask`, `join` and `fill`, one after the other.

    All ranks do one of these before any does the next.

    `storages`: number in the file → what fills it.
    """

    def __init__(self, path: str, storages: Mapping[int, StorageContent], ranks: int) -> None:
        self._path = path
        self._storages = storages
        self._ranks = ranks
        self._places: dict[int, int] = {}
        """Number → offset of each storage."""
        self._nbytes = 0
        for number, storage in storages.items():
            self._places[number] = self._nbytes
            self._nbytes += -(-storage.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._memory: NodeMemory | None = None
        self._members: list[int] = []

    def ask(self) -> Wanted:
        """Say what this rank needs, and offer memory for it."""
        offer = None
        if self._nbytes:
            try:
                self._memory = NodeMemory.make(self._ranks, self._nbytes)
                offer = self._memory.offer()
            except OSError:
                self.close()
        return Wanted(self._path, self._nbytes, offer)

    def join(self, wanted: Sequence[Wanted], rank: int) -> bool:
        """Open the memory of the first rank of those that need the same; returns whether it is."""
        own = wanted[rank]
        members = [number for number, other in enumerate(wanted) if own.is_alike(other)]
        offer = wanted[members[0]].offer if len(members) > 1 else None
        if offer is None:
            return False
        if members[0] != rank:
            self.close()
            try:
                self._memory = NodeMemory.open(offer, self._ranks)
            except OSError:
                return False
        self._members = members
        return True

    def fill(
        self, have_joined: Sequence[bool], rank: int, fill: Callable[[Region, memoryview], None]
    ) -> None:
        """Fill this rank's part, if all that need the same have joined."""
        if self._memory is None or not all(have_joined[number] for number in self._members):
            self._members = []
        if self._memory is None or not self._members:
            self.close()
            return
        content = self._memory.content()
        for region, start in self._part(self._members.index(rank)):
            fill(region, content[start : start + region.nbytes])
        self._memory.finish(rank)

    def _part(self, member: int) -> list[tuple[Region, int]]:
        """Return the regions that one of the members reads, and where they begin."""
        regions = list[tuple[Region, int]]()
        for number, storage in self._storages.items():
            start = self._places[number]
            for region in storage.regions:
                regions.append((region, start))
                start += region.nbytes
        regions.sort(key=lambda pair: pair[0].nbytes, reverse=True)
        loads = [0] * len(self._members)
        part = list[tuple[Region, int]]()
        for pair in regions:
            least = loads.index(min(loads))
            loads[least] += pair[0].nbytes
            if least == member:
                part.append(pair)
        return part

    def maps(self) -> dict[int, memoryview]:
        """Map all storages, by their numbers; none if they are not shared after all."""
        memory = self._memory
        if memory is None or not memory.has(self._members):
            return {}
        return {n: memory.map(self._places[n], each.nbytes) for n, each in self._storages.items()}

    def close(self) -> None:
        """Close the memory; what is mapped stays."""
        if self._memory is not None:
            self._memory.close()
        self._memory = None

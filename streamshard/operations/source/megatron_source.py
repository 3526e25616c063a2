"""Reads Megatron's distributed checkpoints: one of them, or the newest of a run directory."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Final

from streamshard.errors import IncompleteError
from streamshard.formats.dcp import dcp_reader
from streamshard.formats.dcp.dcp_reader import Distributed
from streamshard.formats.deepspeed import names
from streamshard.formats.megatron import megatron_reader
from streamshard.io.entries import examine, is_directory, is_file
from streamshard.operations.source.directory_content import DirectoryContent
from streamshard.operations.source.distributed_source import DistributedReader
from streamshard.operations.source.source import Request


class _MegatronReader(DistributedReader):
    kind = "megatron"
    title = "Megatron's distributed checkpoint"
    completes = False

    def holds(self, directory: Path) -> bool:
        return megatron_reader.is_megatron(directory)

    def recognizes(self, request: Request) -> Path | None:
        root, tag = request.root, request.tag
        if tag is not None:
            return root / tag if names.is_tag(tag) and self.holds(root / tag) else None
        if self.holds(root):
            return root
        place = megatron_reader.latest_of(root)
        if place is None or (is_directory(place) and not _is_distributed(place)):
            return None
        if not is_directory(place):
            message = f"names {place.name}, which is not there; give another one"
            raise IncompleteError(message, path=root / megatron_reader.LATEST)
        return place

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        return None

    def index_of(self, place: Path, known: Set[str]) -> Distributed:
        if self.holds(place):
            return megatron_reader.open_megatron(place)
        return super().index_of(place, known)

    def items_of(self, place: Path) -> Mapping[Path, Sequence[tuple[int, int]]]:
        found, common = dict(super().items_of(place)), place / megatron_reader.COMMON
        if is_file(common):  # it is a whole file of torch.save, as items are
            found[common] = [(0, examine(common).nbytes)]
        return found


def _is_distributed(place: Path) -> bool:
    return bool(dcp_reader.parts_of(place))


READER: Final = _MegatronReader()

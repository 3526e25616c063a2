"""Writes files of FSDP's ranks for another count of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, Self

from streamshard.engine.run.phases import Progress
from streamshard.errors import Option, UnsupportedError, UsageError
from streamshard.formats.deepspeed.read.zero_reader import malformed
from streamshard.formats.fsdp_ranks import rank_names, rank_writer
from streamshard.formats.fsdp_ranks.rank_writer import RankImages
from streamshard.formats.pickle.node_checks import of_file
from streamshard.io.entries import identify, is_file, read_document
from streamshard.io.files import require_regular
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.native.target_files import layout_of
from streamshard.native.target_settings import MOST_RANKS
from streamshard.options import RepartitionOptions
from streamshard.registry import READ_BACK, load
from streamshard.sizes import counted
from streamshard.source.source import Request, Source
from streamshard.transfer.byte_accounting import ByteCounts
from streamshard.transfer.file_layout import FileLayout, copied_files, fixed_files
from streamshard.transfer.target_writer import Output, Pass, TargetWriter

FORMAT: Final = "fsdp-ranks"
_OF_ZERO: Final = (
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "like",
    "zero_stage",
    "ds_config_file",
    "fresh_states",
)
"""Options that say how a job of DeepSpeed cuts, and begins."""


@dataclass(frozen=True, slots=True)
class RankFilesWriter(TargetWriter):
    """Writes the files of all ranks, and what was next to them."""

    source: Source
    images: RankImages
    sidecars: Sequence[FileLayout]
    counts: ByteCounts

    @classmethod
    def of(cls, source: Source, images: RankImages) -> Self:
        """Count the bytes of the files."""
        sidecars, counts = list(_sidecars(source, images.mesh.ranks)), ByteCounts(source)
        counts.add_all(chain(map(layout_of, images.images()), sidecars))
        return cls(source, images, sidecars, counts)

    def passes(self) -> Sequence[Pass]:
        return [lambda: chain(map(layout_of, self.images.images()), self.sidecars)]

    def differences(self, place: Path, memory: MemoryPlan, progress: Progress) -> list[str]:
        written = Request(place, facts=self.source.facts)
        found: list[str] = load(READ_BACK)(written, self.source, memory, progress)
        return found


def prepare(options: RepartitionOptions, opened: Source) -> Output:
    """Decide what the files of the ranks are."""
    ranks = _ranks(options, opened)
    checkpoint, config = opened.checkpoint, opened.path / rank_names.CONFIG
    if is_file(config):
        require_regular(config, opened.path)
        opened = replace(opened, files=(*opened.files, identify(config)))
    with malformed(opened.path):
        images = RankImages.of(checkpoint, ranks)
        writer = RankFilesWriter.of(opened, images)
    return Output(
        source=opened,
        writer=writer,
        options={
            "verb": "repartition",
            "tag": checkpoint.tag,
            "format": FORMAT,
            "world_size": str(ranks),
        },
        source_world_size=checkpoint.ranks,
        world_size=ranks,
        notes=(*images.notes(), *checkpoint.remarks),
    )


def _ranks(options: RepartitionOptions, opened: Source) -> int:
    option = Option("format", FORMAT)
    if opened.kind.form != FORMAT:
        message = f"{option}: writes files of FSDP's ranks from such files alone"
        raise UnsupportedError(message, path=opened.path)
    for name in _OF_ZERO:
        if options.is_given(name):
            raise UsageError(f"{Option(name)}: is for DeepSpeed's files, not for {option}")
    facts = opened.facts
    if facts.cut_rules is not None or facts.ds_version is not None:
        keys = "source.cut_rules and target.ds_version"
        asked = Option("facts", what=keys)
        raise UsageError(f"{asked} are for DeepSpeed's files, not for {option}")
    if options.world_size is None:
        message = f"has files for {counted(opened.checkpoint.ranks, 'rank')} already; say with"
        message = f"{message} {Option('world_size')} for how many they are to be written"
        raise UsageError(message, path=opened.path)
    if not 0 < options.world_size <= MOST_RANKS:
        message = f"{Option('world_size', options.world_size)}: a job has 1 to {MOST_RANKS:,} ranks"
        raise UsageError(message)
    return options.world_size


def _sidecars(source: Source, ranks: int) -> Iterator[FileLayout]:
    """Lay out what is next to the ranks' files; only verl's own file tells the count of ranks."""
    checkpoint, config = source.checkpoint, source.path / rank_names.CONFIG
    if is_file(config):
        with of_file(config):
            data = rank_writer.config_for(read_document(config), ranks)
        yield from fixed_files({rank_names.CONFIG: data})
    yield from copied_files(checkpoint, partial(rank_names.path_of_file, directory=checkpoint.tag))

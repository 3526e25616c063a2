"""`if_needed`: finds out whether the target already holds what a run would write.

What a target records is compared with what the run would write: the names and sizes of its files,
and their beginnings, which hold the step, the settings, the names of the tensors and the first
elements. No file of the source may be newer than the target. With `verify`, every byte is compared;
also where facts that are in no checkpoint decide what the target holds, as its beginnings may not
tell these.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from streamshard.engine.run.phases import COMPARING, Progress, Silent
from streamshard.engine.scan.target_comparison import first_difference
from streamshard.errors import (
    IntegrityError,
    Option,
    SourceError,
    StreamshardError,
    TargetError,
    TargetExistsError,
)
from streamshard.formats.deepspeed import names
from streamshard.formats.zarr.packed_place import packed
from streamshard.io.entries import entries_below, examine, is_directory
from streamshard.io.files import target_errors
from streamshard.io.object_path import is_object
from streamshard.io.readable import Status
from streamshard.layout.memory_plan import BUFFER_BYTES, MemoryPlan
from streamshard.options import WritingOptions
from streamshard.source.source import open_source
from streamshard.source.unfinished import COMMITTED, JOURNAL
from streamshard.transfer.file_layout import Divider, Layout
from streamshard.transfer.report import Report, nothing_done
from streamshard.transfer.target import require_space
from streamshard.transfer.target_state import TargetState
from streamshard.transfer.target_writer import Output


@dataclass(frozen=True, slots=True)
class ExistingTarget:
    """The result that a run would have, and its place."""

    report: Report
    target: Path
    output: Output
    memory: MemoryPlan
    options: WritingOptions

    def found(self, progress: Progress | None = None) -> Report | None:
        """Return a report if the target holds what the run would write, else None."""
        difference, state = None, TargetState.of(self.target, self.output.template)
        if not state.is_settled:
            shown = progress or Silent()
            shown.start(self.report.bytes_written, COMPARING)
            try:
                whole = self.options.verify or any(map(self.options.is_given, ("facts", "like")))
                difference = self._difference(shown) if whole else self._other_record(shown)
            except (IntegrityError, SourceError, TargetError) as error:
                is_ours = self.output.packs or not isinstance(error, TargetError)
                if not is_ours or self._is_elsewhere(error):
                    raise
                difference = f"{error}"  # it is damaged, or another file is packed in it
            finally:
                shown.stop()
            if difference is None:
                return nothing_done(self.report, "target", self.report.target)
        try:
            state.require_free(overwrite=self.options.overwrite)
        except TargetExistsError as error:
            what = f"{self.target}: is not what this command makes: {difference}"
            error.__notes__ = [] if difference is None else [what]  # in place of other advice
            raise
        require_space(self.target, self.report.bytes_written)
        return None

    def _is_elsewhere(self, error: StreamshardError) -> bool:
        """Tell whether an error is about another file than the target, or one packed in it."""
        return error.path is None or self.target not in (error.path, *error.path.parents)

    def _other_names(self) -> str | None:
        """Describe a file that is missing, or that is there and should not; None if none is."""
        output, latest = self.output, self.output.latest
        if is_directory(self.target) == output.packs:
            return "it is a directory" if output.packs else "it is not a directory"
        with target_errors(self.target):
            there = {path for path, _ in self._files()}
            named = names.latest_of(self.target) if latest is not None else None
        if named != latest:
            shown = "there is no 'latest'" if named is None else f"its 'latest' names {named!r}"
            return f"{shown}, not {latest!r}"
        paths_to_write = output.writer.byte_counts().sizes.keys()
        for problem, paths in (
            ("is missing", paths_to_write - there),
            ("is not one of its files", there - paths_to_write),
        ):
            if paths:
                more = f", and {len(paths) - 1:,} more" if len(paths) > 1 else ""
                return f"{min(paths)} {problem}{more}"
        return None

    def _files(self) -> Iterator[tuple[str, Status]]:
        if self.output.packs:
            yield self.target.name, examine(self.target)
            return
        own = (COMMITTED, JOURNAL) if is_object(self.target) else ()
        for entry in entries_below(self.target):
            path = entry.path.relative_to(self.target)
            if not entry.is_directory and path.parts[0] not in own:
                yield path.as_posix(), entry.status()

    def _other_record(self, progress: Progress) -> str | None:
        """Describe a difference to what the target records; None if there is none."""
        if (other := self._other_names() or self._other_sizes()) is not None:
            return other
        if self.output.encode is not None:
            open_source(self.target)  # which compares the sizes with those that it records
        return self._other_bytes(self.output.writer.beginnings(), progress, to_end=False)

    def _other_sizes(self) -> str | None:
        """Describe a file of another size, or one of the source that is newer than the target."""
        sizes, oldest = self.output.writer.byte_counts().sizes, []
        for path, status in self._files():
            oldest.append(status.modified_ns)
            if self.output.encode is None and status.nbytes != sizes[path]:
                return f"{path} has {status.nbytes:,} bytes, not {sizes[path]:,}"
        # Times in buckets are of whole seconds.
        unit = 10**9 if is_object(self.target) or is_object(self.output.source.path) else 1
        for source in dict.fromkeys(file.path for file in self.output.source.files):
            if examine(source).modified_ns // unit > min(oldest) // unit:
                return f"{source} has changed since; {Option('verify', True)} compares bytes"
        return None

    def _difference(self, progress: Progress) -> str | None:
        if (other := self._other_names()) is not None:
            return other
        writer, latest = self.output.writer, self.output.latest
        if latest is not None:
            progress.advance(len(latest.encode()))  # no pass makes this file
        for layouts in writer.passes():
            if (other := self._other_bytes(layouts(), progress)) is not None:
                return other
        return None if writer.is_same_around(self.target) else "its files are packed in another way"

    def _other_bytes(
        self, layouts: Iterable[Layout], progress: Progress, *, to_end: bool = True
    ) -> str | None:
        source, memory = self.output.source, self.memory
        divider = Divider(source)
        path = first_difference(
            packed(self.target) if self.output.packs else self.target,
            (layout.divided(divider) for layout in layouts),
            source.files,
            workers=memory.workers,
            window_bytes=memory.window_bytes,
            scratch_bytes=BUFFER_BYTES,
            progress=progress.advance,
            to_end=to_end,
        )
        return None if path is None else f"{path} holds other bytes"

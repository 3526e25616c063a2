"""`if_needed`: finds out whether the target already holds what a run would write.

Nothing is recorded in a target for this. Every file is compared, byte by byte, with the bytes that
the run would write. That proves more than a name, a size or a date, whoever wrote the files, and
costs reading both sides once.
"""

from dataclasses import dataclass
from pathlib import Path

from streamshard.engine.run.phases import COMPARING
from streamshard.engine.scan.target_comparison import first_difference
from streamshard.errors import SourceError, StreamshardError, TargetError, TargetExistsError
from streamshard.formats.deepspeed import names
from streamshard.formats.zarr.packed_place import packed
from streamshard.io.entries import files_below, is_directory
from streamshard.io.files import target_errors
from streamshard.io.object_path import is_object
from streamshard.layout.memory_plan import SCRATCH_BYTES, MemoryPlan
from streamshard.operations.source.unfinished import COMMITTED, JOURNAL
from streamshard.operations.transfer.file_layout import Divider
from streamshard.operations.transfer.report import Progress, Report, Silent, nothing_done
from streamshard.operations.transfer.target import require_space
from streamshard.operations.transfer.target_state import TargetState
from streamshard.operations.transfer.target_writer import Output


@dataclass(frozen=True, slots=True)
class ExistingTarget:
    """The result that a run would have, and its place."""

    report: Report
    target: Path
    output: Output
    memory: MemoryPlan
    overwrite: bool

    def found(self, progress: Progress | None = None) -> Report | None:
        """Return a report if the target holds what the run would write, else None."""
        difference, state = None, TargetState.of(self.target, self.output.template)
        if not state.is_settled:
            shown = progress or Silent()
            shown.start(self.report.bytes_written, COMPARING)
            try:
                difference = self._difference(shown)
            except (SourceError, TargetError) as error:
                if self.output.is_packed_so is None or self._is_elsewhere(error):
                    raise
                difference = f"{error}"  # another file is packed in it, or the zip is damaged
            finally:
                shown.stop()
            if difference is None:
                return nothing_done(self.report, "target", self.report.target)
        try:
            state.require_free(overwrite=self.overwrite)
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
        root = self.target.parent if output.packs else self.target
        if is_directory(self.target) == output.packs:
            return "it is a directory" if output.packs else "it is not a directory"
        with target_errors(self.target):
            found = [self.target] if output.packs else files_below(self.target)
            there = {path.relative_to(root).as_posix() for path in found}
            if is_object(self.target):
                own = (COMMITTED, JOURNAL)
                there = {path for path in there if path.partition("/")[0] not in own}
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

    def _difference(self, progress: Progress) -> str | None:
        """Describe the first difference of the target; None if there is none."""
        output, latest, is_packed_so = self.output, self.output.latest, self.output.is_packed_so
        if (other := self._other_names()) is not None:
            return other
        root = self.target.parent if output.packs else self.target
        if latest is not None:
            progress.advance(len(latest.encode()))  # no pass makes this file
        source, divider = output.source, Divider(output.source)
        if is_packed_so is not None:
            root = packed(self.target)
        for layouts in output.writer.passes():
            path = first_difference(
                root,
                (layout.divided(divider) for layout in layouts()),
                source.files,
                workers=self.memory.workers,
                window_bytes=self.memory.window_bytes,
                scratch_bytes=SCRATCH_BYTES // 2,
                progress=progress.advance,
            )
            if path is not None:
                return f"{path} holds other bytes"
        if is_packed_so is not None and not is_packed_so(self.target):
            return "its files are packed in another way"
        return None

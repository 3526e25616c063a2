"""Lets the workers of an executor examine files by the thousand; see `streamshard.batches`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from streamshard.batches import BatchMapper
from streamshard.engine.jobs.executor import Host, current_executor, run_ordered
from streamshard.engine.jobs.source_proof import SourceProof
from streamshard.io.entries import identify
from streamshard.model import SourceFile

_BATCH_FILES: Final = 64
"""So many headers take about a second; fewer files than that are examined here."""

Function = Callable[[Sequence[Path]], Sequence[Any]]


class _NoTools:
    """What a worker needs, apart from the files: nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class _BatchTools:
    """Describes workers that examine files; see `Toolkit`."""

    files: SourceProof

    def prove(self) -> str:
        """Show that this process sees the files; see `Toolkit.prove`."""
        return self.files.prove()

    def accept(self, evidence: str) -> None:
        """Accept anything: nothing is written."""

    def make(self, host: Host) -> _NoTools:
        """Make no tools."""
        return _NoTools()


def on_workers() -> BatchMapper:
    """Return what applies functions to batches of paths on the workers of the current executor."""
    return BatchMapper(_map, _BATCH_FILES)


def _map(function: Function, batches: Sequence[Sequence[Path]]) -> Iterable[Sequence[Any]]:
    if len(batches) <= 1:
        return map(function, batches)
    files = [tuple(identify(path) for path in batch) for batch in batches]
    tools = _BatchTools(SourceProof.of([file for batch in files for file in batch]))
    jobs = (partial(_apply, function=function, files=batch) for batch in files)
    return run_ordered(jobs, tools, workers=current_executor().workers or 1, progress=_ignore)


def _apply(_: _NoTools, function: Function, files: tuple[SourceFile, ...]) -> Sequence[Any]:
    """Apply a function where each of the files is the one that the leading process sees."""
    SourceProof(files).prove()
    return function([file.path for file in files])


def _ignore(nbytes: int) -> None:
    pass

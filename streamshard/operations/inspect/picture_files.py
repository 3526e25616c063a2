"""The files that pictures are written to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.errors import Option, TargetError, TargetExistsError, UsageError
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import is_directory, is_file, lexists
from streamshard.io.files import target_errors
from streamshard.operations.inspect.inspect_report import FileSummary
from streamshard.operations.transfer.target import partial_of

_OVERWRITE: Final = Option("overwrite", True)


@dataclass(frozen=True, slots=True)
class PictureFiles:
    """The pictures to write, and their paths."""

    svg: Path | None
    html: Path | None
    overwrite: bool

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.svg, self.html) if path is not None)

    def require_free(self) -> None:
        """Refuse files that exist, unless they may be replaced."""
        if len(set(self.paths)) < len(self.paths):
            raise UsageError(f"{self.svg}: cannot be {Option('svg')} and {Option('html')} at once")
        for path in self.paths:
            with target_errors(path):
                if not is_directory(path.parent):
                    message = f"{path}: there is no directory {path.parent}; make it first"
                    raise TargetError(message)
                if lexists(path) and not self.overwrite:
                    raise TargetExistsError(f"{path}: exists; use {_OVERWRITE} to replace it")
                if lexists(path) and not is_file(path):
                    message = f"{path}: is not a file, so {_OVERWRITE} will not replace it"
                    raise TargetExistsError(message)

    def write(self, texts: Mapping[Path, str]) -> tuple[FileSummary, ...]:
        """Write complete files, or none."""
        return tuple(_write(path, text) for path, text in texts.items())


def _write(path: Path, text: str) -> FileSummary:
    data = text.encode()
    with target_errors(path):
        try:
            write_durably(path, data, partial_of(path))
        except BaseException:
            remove_file(partial_of(path), missing_ok=True)
            raise
    return FileSummary(str(path), len(data))

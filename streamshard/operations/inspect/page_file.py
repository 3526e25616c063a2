"""The file that a page is written to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamshard.errors import Option, TargetError, TargetExistsError
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import is_directory, is_file, lexists
from streamshard.io.files import target_errors
from streamshard.operations.inspect.inspect_report import FileSummary
from streamshard.operations.transfer.target import partial_of

_OVERWRITE: Final = Option("overwrite", True)


@dataclass(frozen=True, slots=True)
class PageFile:
    """Where a page goes."""

    path: Path
    overwrite: bool

    def require_free(self) -> None:
        """Refuse a file that exists, unless it may be replaced."""
        path = self.path
        with target_errors(path):
            if not is_directory(path.parent):
                message = f"{path}: there is no directory {path.parent}; make it first"
                raise TargetError(message)
            if lexists(path) and not self.overwrite:
                raise TargetExistsError(f"{path}: exists; use {_OVERWRITE} to replace it")
            if lexists(path) and not is_file(path):
                message = f"{path}: is not a file, so {_OVERWRITE} will not replace it"
                raise TargetExistsError(message)

    def write(self, text: str) -> FileSummary:
        """Write a complete file, or none."""
        path, data = self.path, text.encode()
        with target_errors(path):
            try:
                write_durably(path, data, partial_of(path))
            except BaseException:
                remove_file(partial_of(path), missing_ok=True)
                raise
        return FileSummary(str(path), len(data))

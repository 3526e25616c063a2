"""The file that a page is written to."""

from pathlib import Path

from streamshard.drawing.page import HEAD
from streamshard.errors import TargetError, TargetExistsError
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import is_directory, is_file, lexists, read_all
from streamshard.io.files import target_errors
from streamshard.operations.inspect.inspect_report import FileSummary
from streamshard.transfer.target import partial_of


def require_free(path: Path) -> None:
    with target_errors(path):
        if not is_directory(path.parent):
            message = f"{path}: there is no directory {path.parent}; make it first"
            raise TargetError(message)
        if lexists(path) and not (is_file(path) and read_all(path, len(HEAD)) == HEAD):
            message = "exists, and is no page that streamshard wrote, so it is not replaced"
            raise TargetExistsError(f"{path}: {message}; give another name")


def write_page(path: Path, data: bytes) -> FileSummary:
    """Write a complete file, or none."""
    with target_errors(path):
        try:
            write_durably(path, data, partial_of(path))
        except BaseException:
            remove_file(partial_of(path), missing_ok=True)
            raise
    return FileSummary(str(path), len(data))

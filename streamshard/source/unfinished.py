"""What says that a target is finished, and what that it is not.

On a disk a run writes to a path next to the target, where its journal lies until that says that
everything is there. In a bucket nothing can be renamed, so a run uploads to the target's own paths.
Its journal lies among them until a last object, the commit record, says that all of them are there.
Whatever lies next to that record, the target exists.
"""

import errno
from pathlib import Path
from typing import Final

from streamshard.engine.journals.journal import HEADER, Journal
from streamshard.errors import IncompleteError
from streamshard.formats.deepspeed import names
from streamshard.io.entries import is_file, names_in
from streamshard.io.files import source_errors
from streamshard.io.object_path import is_object
from streamshard.io.retry import ignored

JOURNAL: Final = f"{names.OWN_PREFIX}.journal"
"""File in a partial target, or path in a bucket, that records which parts are written."""
COMMITTED: Final = f"{names.OWN_PREFIX}.committed"
"""Object that is uploaded after all others of a target."""


def is_unfinished(target: Path) -> bool:
    """Tell whether a run is writing to a path, or was cut off there."""
    if not is_object(target):
        return has_journal(target) and not Journal(target / JOURNAL).is_whole
    found: list[str] = []
    with ignored({errno.ENOENT, errno.ENOTSUP}):  # nothing is there, or a web server lists nothing
        found = names_in(target)
    return JOURNAL in found and COMMITTED not in found and has_journal(target)


def has_journal(target: Path) -> bool:
    """Tell whether the journal of a run lies in a target, which may exist nevertheless."""
    journal = target / JOURNAL
    return is_file(journal / HEADER if is_object(target) else journal)


def require_finished(path: Path) -> None:
    """Refuse what a run has not written completely."""
    with source_errors(path):
        unfinished = is_unfinished(path)
    if unfinished:
        message = "unfinished: a run is writing it, or was cut off"
        raise IncompleteError(f"{message}; run the same command again to go on", path=path)

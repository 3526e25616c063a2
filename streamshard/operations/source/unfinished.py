"""Targets in a bucket: what says that one is finished, and what that one is not.

Nothing can be renamed there, so a run uploads to the target's own paths. Its journal lies among
them until a last object, the commit record, says that all of them are there.
"""

from pathlib import Path
from typing import Final

from streamshard.errors import IncompleteError
from streamshard.formats.deepspeed import names
from streamshard.io.entries import paths_in
from streamshard.io.objects.object_path import is_object

JOURNAL: Final = f"{names.OWN_PREFIX}.journal"
"""File in a partial target, or path in a bucket, that records which parts are written."""
COMMITTED: Final = f"{names.OWN_PREFIX}.committed"
"""Object that is uploaded after all others of a target."""


def is_unfinished(target: Path) -> bool:
    """Tell whether a run is uploading to a path, or was cut off there."""
    if not is_object(target):
        return False
    try:
        found = {path.name for path in paths_in(target)}
    except OSError:  # nothing is there, or the service lists nothing
        return False
    return JOURNAL in found and COMMITTED not in found


def require_finished(path: Path) -> None:
    """Refuse what a run has not uploaded completely.

    Raises
    ------
    IncompleteError
        The message says what to do.
    """
    if is_unfinished(path):
        message = f"{path}: unfinished: a run is writing it, or was cut off. The command that it"
        raise IncompleteError(f"{message} was made with goes on with it")

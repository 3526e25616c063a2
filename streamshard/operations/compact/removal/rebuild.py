"""Rebuilds a tag from its archive, and compares the result with the tag."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from streamshard.engine.run import resident_memory
from streamshard.errors import IntegrityError, NoSpaceError
from streamshard.formats.deepspeed import names
from streamshard.io.changes import remove
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import ObjectPath, is_object
from streamshard.io.objects.stray_uploads import abort_strays
from streamshard.operations.compact.archive import omissions
from streamshard.operations.compact.archive.proof import Means, content_equal, state_equal
from streamshard.operations.compact.archive.receipts import ArchivedTag
from streamshard.operations.repartition.repartition import plan_repartition
from streamshard.operations.source.source import Source, open_source

_REBUILT: Final = f"{names.OWN_PREFIX}.rebuilt"
_RUN: Final = "run"


def rebuilt_equal(
    source: Source, place: ArchivedTag, means: Means, *, tag_only: bool = False
) -> str:
    """Write native files from an archive, compare them with the tag, and remove them.

    Meanwhile they take as much space beside the archive as the tag itself, in a bucket too.

    Parameters
    ----------
    source
        The complete tag.
    tag_only
        Whether to ignore sidecars beside the tag, which may have changed since.
    """
    rebuilt_dir = place.directory / _REBUILT / _RUN
    remove_rebuilt(place.directory)
    with ExitStack() as stack:
        stack.callback(remove_rebuilt, place.directory)
        _rebuild(place, rebuilt_dir, means)
        resident_memory.restart_peak()
        with source_errors(rebuilt_dir):
            rebuilt = open_source(rebuilt_dir)
        if tag_only:
            rebuilt, source = omissions.tag_only(rebuilt), omissions.tag_only(source)
        if is_object(rebuilt_dir):  # which has no modes; the archive's were compared with the tag's
            rebuilt, source = _without_modes(rebuilt), _without_modes(source)
        try:
            state_equal(rebuilt, source)
            return content_equal(rebuilt, source, means)
        except IntegrityError as error:
            raise IntegrityError(f"{place.store}: does not give back its tag: {error}") from error


def _without_modes(source: Source) -> Source:
    files = tuple(replace(file, mode=0) for file in source.checkpoint.files)
    return replace(source, checkpoint=replace(source.checkpoint, files=files))


def remove_rebuilt(directory: Path) -> None:
    """Remove rebuilt files from a directory of archives; no other run may be active."""
    rebuilt = directory / _REBUILT
    with target_errors(rebuilt):
        remove(rebuilt)
        if isinstance(rebuilt, ObjectPath):
            abort_strays(rebuilt)


def _rebuild(place: ArchivedTag, rebuilt_dir: Path, means: Means) -> None:
    limits = means.limits
    try:
        plan = plan_repartition(
            place.store, rebuilt_dir, memory_limit=limits.memory_limit, workers=limits.workers
        )
        plan.run(means.progress)
    except NoSpaceError as error:
        message = "is archived, and stays until there is room to rebuild it from that once"
        raise NoSpaceError(f"{message}: {error}") from error
    except BaseException as error:
        error.__notes__ = []  # they say that files are kept to continue with, which is not so here
        raise

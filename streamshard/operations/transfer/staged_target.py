"""The two ways in which a target comes into being: by a rename, or by a commit record."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.io.objects.object_lock import lock_at
from streamshard.io.objects.object_path import ObjectPath
from streamshard.operations.transfer.run_identity import RunIdentity
from streamshard.operations.transfer.staging import PartialTarget
from streamshard.operations.transfer.target import LOCK
from streamshard.operations.transfer.uploaded_target import UploadedTarget

StagedTarget: TypeAlias = PartialTarget | UploadedTarget


def staged(
    target: Path,
    identity: RunIdentity,
    *,
    nbytes: int,
    sizes: Callable[[], Mapping[str, int]],
    overwrite: bool,
    lock: bool,
    template: Template | None = None,
) -> StagedTarget:
    """Return a target to be written, as a context manager.

    Parameters
    ----------
    nbytes
        Size of all its files.
    sizes
        Lists the files, relative to the target, with their sizes.
    lock
        Whether to keep other runs from writing it.
    template
        Names of the dumps, if the target is a directory of dumps.
    """
    place = target.absolute().with_name(f"{LOCK}.{target.name}")
    own = lock_at(place, target.absolute(), is_wanted=lock)
    if isinstance(target, ObjectPath):
        return UploadedTarget(
            target,
            own,
            identity,
            nbytes=nbytes,
            sizes=sizes,
            overwrite=overwrite,
            template=template,
        )
    return PartialTarget(
        target, own, identity, nbytes=nbytes, overwrite=overwrite, template=template
    )

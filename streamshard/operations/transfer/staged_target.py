"""The two ways in which a target comes into being: by a rename, or by a commit record."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias

from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.io.objects.object_path import ObjectPath
from streamshard.operations.transfer.run_identity import RunIdentity
from streamshard.operations.transfer.staging import PartialTarget
from streamshard.operations.transfer.uploaded_target import UploadedTarget

StagedTarget: TypeAlias = PartialTarget | UploadedTarget


def staged(
    target: Path,
    identity: RunIdentity,
    *,
    nbytes: int,
    paths: Callable[[], Collection[str]],
    overwrite: bool,
    template: Template | None = None,
) -> StagedTarget:
    """Return a target to be written, as a context manager.

    Parameters
    ----------
    nbytes
        Size of all its files.
    paths
        Lists the files, relative to the target.
    template
        Names of the dumps, if the target is a directory of dumps.
    """
    if isinstance(target, ObjectPath):
        return UploadedTarget(
            target, identity, nbytes=nbytes, paths=paths, overwrite=overwrite, template=template
        )
    return PartialTarget(target, identity, nbytes=nbytes, overwrite=overwrite, template=template)

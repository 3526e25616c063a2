"""The ways in which a target comes into being: by a rename, or by a commit record."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self

from streamshard.engine.run.runner import StagedFiles
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.io.changes import lock_at
from streamshard.operations.transfer.run_identity import RunIdentity
from streamshard.operations.transfer.target import LOCK
from streamshard.operations.transfer.target_state import TargetKind


class StagedTarget(Protocol):
    """A target while it is being written; a context manager."""

    path: Path
    """Where its files are until it is complete."""
    notes: tuple[str, ...]
    is_done: bool
    """Whether the target exists, and is what this run would make."""

    @property
    def partial(self) -> StagedFiles:
        """Its files, and the journal of what is written."""

    @property
    def is_written(self) -> bool:
        """Whether an earlier run wrote everything."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that an earlier run wrote."""

    def complete(self) -> Path:
        """Complete what is to be read back; returns the directory that it lies in."""

    def commit(self, require: Callable[[], None], latest: str | None = None) -> None:
        """Make the target exist, with this tag in its `latest` file if one is given.

        `require`: what raises an error if the source has changed, before the target exists.
        """

    def __enter__(self) -> Self:
        """Take the lock, and find what an earlier run wrote."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Keep what was written if there is an error, and release the lock."""


def staged(
    target: Path,
    identity: RunIdentity,
    *,
    nbytes: int,
    sizes: Callable[[], Mapping[str, int]],
    lock: bool,
    verify: bool,
    template: Template | None = None,
) -> StagedTarget:
    """Return a target to be written, as a context manager.

    `nbytes`: size of all its files.
    `sizes`: lists the files, relative to the target, with their sizes.
    `lock`: whether to keep other runs from writing it.
    `verify`: whether what is written is read back before the target exists.
    `template`: names of the dumps, if the target is a directory of dumps.
    """
    place = target.absolute().with_name(f"{LOCK}.{target.name}")
    own = lock_at(place, target.absolute(), is_wanted=lock)
    made: StagedTarget = TargetKind.of(target).staged(
        target, own, identity, nbytes=nbytes, sizes=sizes, verify=verify, template=template
    )
    return made

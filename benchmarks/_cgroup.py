"""Memory cgroups: the kernel kills what takes more than the group may have."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoCgroupError(Exception):
    """No group can be made, or none with a limit."""


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """Make a group below this process's own; version 1 and 2 name their files differently.

    Raises
    ------
    NoCgroupError
        That is not possible here.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            parent, limit_file = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        elif not controllers and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            parent, limit_file = Path("/sys/fs/cgroup"), "memory.max"
        else:
            continue
        group = parent / own.lstrip("/") / f"streamshard-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            raise NoCgroupError(f"no memory cgroup can be made here: {error}") from error
        try:
            try:
                (group / limit_file).write_text(str(limit))
            except OSError as error:
                raise NoCgroupError(f"no memory limit can be set here: {error}") from error
            yield group
        finally:
            group.rmdir()
        return
    raise NoCgroupError("this machine has no memory cgroups")


def hits_of_limit(group: Path) -> int:
    """Count how often the kernel had to take pages back for the group to stay within its limit."""
    if (group / "memory.failcnt").exists():
        return int((group / "memory.failcnt").read_text())
    events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
    return int(events["max"])


def inside(group: Path) -> tuple[str, ...]:
    """Return what to put before a command so that it runs in a group."""
    return "sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"

"""The memory of this process, as the kernel counts it."""

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return the current resident memory; the peak so far if the system does not tell."""
    return _status_bytes("VmRSS") or _rusage_bytes()


def peak_bytes() -> int:
    """Return the highest resident memory since the start or since the last `restart_peak`."""
    return _status_bytes("VmHWM") or _rusage_bytes()


def restart_peak() -> None:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        # Then the peak is that of the whole process: too high, never too low.
        return


def _status_bytes(key: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def _rusage_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int:
    """Return the memory that this process may use: the machine's, or its cgroup's if smaller."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """Yield the memory limits of this process's cgroups, version 1 or 2, and of their parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        inside = root / group.lstrip("/")
        for place in (inside, *inside.parents):
            try:
                yield int((place / name).read_text())
            except (OSError, ValueError):
                continue  # no such file at this level, or "max"

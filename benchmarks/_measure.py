"""Runs programs and measures them; prints what came of it."""

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

_LAUNCHER: Final = """
import json, os, sys, time
began = time.perf_counter()
child = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(child, 0)
seconds = time.perf_counter() - began
with open(sys.argv[1], "w") as stream:
    json.dump([seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024], stream)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Starts one program from a small process: Linux counts what the parent held into the child's
`ru_maxrss`, and the parent of this one has torch in memory."""

STREAMSHARD: Final = (sys.executable, "-m", "streamshard")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a program did."""

    exit_code: int
    seconds: float
    cpu_seconds: float
    """Seconds of processor time, which a machine that is not idle leaves as they are."""
    peak_bytes: int
    """Highest resident memory as the kernel reports it of a process that has ended."""
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        """Read the JSON document on stdout; a program without one says on stderr why."""
        if not self.stdout:
            raise RuntimeError(f"no report, exit code {self.exit_code}: {self.stderr}")
        document: dict[str, Any] = json.loads(self.stdout)
        return document


def measure(*command: str | Path) -> Measured:
    """Run a program to its end; its failure is a result like any other."""
    with tempfile.NamedTemporaryFile("r") as result:
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, result.name]
        done = subprocess.run(
            [*launcher, *map(str, command)], capture_output=True, text=True, check=False
        )
        seconds, cpu_seconds, peak_bytes = json.load(result)
    return Measured(done.returncode, seconds, cpu_seconds, peak_bytes, done.stdout, done.stderr)


def succeed(*command: str | Path) -> Measured:
    """Run a program that must not fail."""
    done = measure(*command)
    if done.exit_code:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr}")
    return done


def warm(root: Path) -> None:
    """Read all files below a directory, so that the page cache holds what it can of them."""
    buffer = bytearray(1 << 20)
    for path in files_in(root):
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def files_in(root: Path) -> list[Path]:
    """List the files below a directory; a file is all there is of itself."""
    return [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())


def machine() -> str:
    """Say what this was measured on, when, and with which versions."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "isal", "zarr"))
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"{_cpu()}, {cores} cores, {memory:.0f} GiB; {platform.system()} {platform.release()}; "
        f"Python {platform.python_version()}, {packages}; {today}"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a head, in Markdown, numbers to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        first, *rest = row
        cells = [
            first.ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)),
        ]
        print(f"| {' | '.join(cells)} |")


def ratio_cell(times: Sequence[float], others: Sequence[float]) -> str:
    """Return the median of the ratios of each round, and between which they lie."""
    ratios = [time / other for time, other in zip(times, others, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

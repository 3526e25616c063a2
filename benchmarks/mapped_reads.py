"""Which is the faster way to the checksums of a file: to read it into a buffer, or to map it?

    python -m benchmarks.mapped_reads --size 1GB

Both go through the file by windows of a MiB. One reads a window into a buffer that is used again;
the other has the system put the pages of the window in place, takes the checksum where they are,
and lets go of them. Two ways also write what they read into the page cache, one of them straight
out of the map. Warm: the page cache holds the file; cold: it has forgotten it. "Asked ahead": the
system is told of every window 4 MiB before it is read, as streamshard does. Every round goes each
way once, in another order; shown are medians and the range, and the CPU time, which other programs
on the machine disturb least.

Then whole commands, each with maps and without: files that changed within the last minute are read.
"""

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from benchmarks._fabricate import fabricate
from benchmarks._measure import (
    STREAMSHARD,
    Measured,
    files_in,
    machine,
    print_table,
    ratio_cell,
    succeed,
    warm,
)
from benchmarks._model import transformer
from streamshard import sizes
from streamshard.checksums import crc32
from streamshard.io import page_cache
from streamshard.io.memory_map import FileMap
from streamshard.io.readable import open_to_read, read_into
from streamshard.io.writable import write_all

WINDOW: Final = 1 << 20
AHEAD: Final = 4 << 20
COMMANDS_HEAD: Final = ("command", "read, s", "map, x", "map, x of CPU", "MiB: read, map")


@dataclass(frozen=True, slots=True)
class Share:
    """A thread's part of a file, whole windows, except for the file's last."""

    descriptor: int
    start: int
    stop: int
    is_asked_ahead: bool
    target: int
    """Descriptor of the file to write the windows to; -1 if they are only read."""

    def write(self, window: memoryview, start: int) -> None:
        """Write a window into the page cache, if there is a file to write to."""
        if self.target >= 0:
            write_all(self.target, window, start)

    def windows(self) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the windows."""
        if self.is_asked_ahead:
            self._ask(self.start, AHEAD)
        for start in range(self.start, self.stop, WINDOW):
            if self.is_asked_ahead:
                self._ask(start + AHEAD, WINDOW)
            yield start, min(start + WINDOW, self.stop)

    def _ask(self, start: int, nbytes: int) -> None:
        if start < self.stop:
            nbytes = min(nbytes, self.stop - start)
            os.posix_fadvise(self.descriptor, start, nbytes, os.POSIX_FADV_WILLNEED)


def read_only(share: Share) -> list[int]:
    """Read, and do nothing with it: what any way through a buffer takes at least."""
    buffer = memoryview(bytearray(WINDOW))
    for start, stop in share.windows():
        read_into(share.descriptor, buffer[: stop - start], start)
    return []


def through_buffer(share: Share) -> list[int]:
    """Read every window into a buffer, and take its checksum there."""
    buffer, found = memoryview(bytearray(WINDOW)), []
    for start, stop in share.windows():
        window = buffer[: stop - start]
        read_into(share.descriptor, window, start)
        found.append(crc32(window))
        share.write(window, start)
    return found


def mapped(share: Share) -> list[int]:
    """Take the checksums of a map, whose pages are put in place window by window."""
    whole, found = FileMap(share.descriptor, share.stop), []
    for start, stop in share.windows():
        window = whole.window(start, stop - start)
        found.append(crc32(window))
        share.write(window, start)
    whole.release()
    return found


@dataclass(frozen=True, slots=True)
class Way:
    """A way through the file."""

    name: str
    work: Callable[[Share], list[int]]
    """Returns the checksum of every window, or nothing."""
    is_asked_ahead: bool = False
    writes: bool = False


WAYS: Final = (
    Way("pread alone, no checksum", read_only),
    Way("pread + CRC-32", through_buffer),
    Way("map + CRC-32", mapped),
    Way("pread + CRC-32, asked ahead", through_buffer, is_asked_ahead=True),
    Way("map + CRC-32, asked ahead", mapped, is_asked_ahead=True),
    Way("pread + CRC-32 + write", through_buffer, writes=True),
    Way("map + CRC-32 + write", mapped, writes=True),
)


@dataclass(frozen=True, slots=True)
class Pass:
    """What going through the file once took."""

    seconds: float
    cpu_seconds: float
    checksums: list[int]


Passes = dict[tuple[str, int], list[Pass]]
"""All rounds, by way and count of threads."""


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="1GB", help="size of the file [1GB]")
    parser.add_argument("--short", action="store_true", help="64MB, two rounds")
    parser.add_argument("--runs", type=int, default=7, help="rounds [7]")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="[1 2]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    size, runs = ("64MB", 2) if given.short else (given.size, given.runs)
    print(machine())
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        path = Path(directory) / "file"
        nbytes = sizes.parse(size)
        make_file(path, nbytes)
        for is_cold in (False, True):
            passes = measure(path, nbytes, given.threads, runs, is_cold=is_cold)
            head = [f"{count} thread{'s' * (count > 1)}, MB/s" for count in given.threads]
            head.append(f"CPU s/GB, {given.threads[0]} thread{'s' * (given.threads[0] > 1)}")
            print()
            table = [_row(way.name, nbytes, given.threads, passes) for way in WAYS]
            print_table(["cold" if is_cold else "warm", *head], table)
        path.unlink()
        print()
        print_table(COMMANDS_HEAD, commands(Path(directory), nbytes, runs))
    return 0


def make_file(path: Path, nbytes: int) -> None:
    """Write a file of random bytes to the disk."""
    random = np.random.default_rng(0)
    with path.open("wb") as stream:
        for start in range(0, nbytes, WINDOW):
            stream.write(random.bytes(min(WINDOW, nbytes - start)))
        stream.flush()
        os.fsync(stream.fileno())


def copy_of(path: Path) -> Path:
    """Return where the ways that write make a copy."""
    return path.with_name("copy")


def measure(path: Path, nbytes: int, threads: list[int], runs: int, *, is_cold: bool) -> Passes:
    """Go through the file in all ways, in an order that is another in every round."""
    found: Passes = {}
    wanted = once(path, nbytes, WAYS[1], 1).checksums
    # What one way leaves behind of memory, in small or large pieces, the next one feels.
    turns = [(way, count) for way in WAYS for count in threads]
    shuffled = np.random.default_rng(0)
    for _ in range(runs):
        for number in shuffled.permutation(len(turns)).tolist():
            way, count = turns[number]
            if is_cold:
                page_cache.drop_file(path)
            copy_of(path).unlink(missing_ok=True)
            os.sync()  # what is left to write would slow the next way down
            done = once(path, nbytes, way, count)
            if done.checksums not in ([], wanted):
                raise RuntimeError(f"{way.name}: other checksums")
            found.setdefault((way.name, count), []).append(done)
    return found


def once(path: Path, nbytes: int, way: Way, threads: int) -> Pass:
    """Go through the file in one way."""
    step = -(-nbytes // threads // WINDOW) * WINDOW
    found: dict[int, list[int]] = {}

    def work(start: int) -> None:
        descriptor = open_to_read(path)
        target = os.open(copy_of(path), os.O_WRONLY | os.O_CREAT) if way.writes else -1
        try:
            stop = min(start + step, nbytes)
            found[start] = way.work(Share(descriptor, start, stop, way.is_asked_ahead, target))
        finally:
            os.close(descriptor)
            if way.writes:
                os.close(target)

    running = [threading.Thread(target=work, args=(start,)) for start in range(0, nbytes, step)]
    began, cpu_began = time.perf_counter(), time.process_time()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    if len(found) < len(running):
        raise RuntimeError(f"{way.name}: a thread has failed")
    checksums = [checksum for start in sorted(found) for checksum in found[start]]
    return Pass(seconds, cpu_seconds, checksums)


def commands(root: Path, nbytes: int, runs: int) -> list[list[str]]:
    """Run whole commands, through a buffer and through maps; returns the table's rows."""
    source, target, made = root / "source", root / "target", root / "made"
    fabricate(source, transformer(nbytes, stage=2), stage=2, world_size=8)
    succeed(*STREAMSHARD, "repartition", source, target, "--world-size", "6")
    rows = []
    for name, command in (
        ("repartition", ("repartition", source, made, "--world-size", "6")),
        ("convert, zstd", ("convert", source, made, "--codec", "zstd")),
        ("verify", ("verify", source)),
        ("verify --against", ("verify", target, "--against", source)),
    ):
        for is_cold in (False, True):
            times = []
            for _ in range(runs):
                both = [
                    _command(command, made, is_mapped=is_mapped, is_cold=is_cold)
                    for is_mapped in (False, True)
                ]
                times.append((both[0], both[1]))
            rows.append([f"{name}, {'cold' if is_cold else 'warm'}", *_compared(times)])
    return rows


def _command(
    command: tuple[str | Path, ...], made: Path, *, is_mapped: bool, is_cold: bool
) -> Measured:
    shutil.rmtree(made, ignore_errors=True)
    os.sync()
    modified = time.time() - 3600 * is_mapped
    for root in (part for part in command if isinstance(part, Path) and part.exists()):
        for path in files_in(root):
            os.utime(path, (modified, modified))
            if is_cold:
                page_cache.drop_file(path)
        if not is_cold:
            warm(root)
    return succeed(*STREAMSHARD, *command, "-q")


def _compared(times: list[tuple[Measured, Measured]]) -> list[str]:
    through, seen = zip(*times, strict=True)
    memory = [max(done.peak_bytes for done in some) / (1 << 20) for some in (through, seen)]
    return [
        f"{median(done.seconds for done in through):.2f}",
        ratio_cell([done.seconds for done in seen], [done.seconds for done in through]),
        ratio_cell([done.cpu_seconds for done in seen], [done.cpu_seconds for done in through]),
        f"{memory[0]:.0f}, {memory[1]:.0f}",
    ]


def _row(name: str, nbytes: int, threads: list[int], passes: Passes) -> list[str]:
    cells = []
    for count in threads:
        rates = [nbytes / done.seconds / 1e6 for done in passes[name, count]]
        cells.append(f"{median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})")
    cpu = median(done.cpu_seconds for done in passes[name, threads[0]]) / nbytes * 1e9
    return [name, *cells, f"{cpu:.3f}"]


if __name__ == "__main__":
    sys.exit(main())

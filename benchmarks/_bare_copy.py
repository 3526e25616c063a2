"""What the machine itself can do: the same bytes read and written past the page cache, no more."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import local

from benchmarks._measure import files_in
from streamshard.io.durability import sync_tree
from streamshard.io.writable import BLOCK_BYTES, aligned

_STEP_BYTES = 1 << 20
_SPAN_BYTES = 128 << 20


def bare_copy(source: Path, target: Path) -> float:
    """Copy a directory with one thread per core, past the page cache; returns the seconds.

    Each thread reads a mebibyte into one huge page, writes it, and goes on; then all is synced.
    """
    own, began = local(), time.perf_counter()

    def copy(reads: int, writes: int, start: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = aligned(2 * _STEP_BYTES)[:_STEP_BYTES]
        for at in range(start, start + _SPAN_BYTES, _STEP_BYTES):
            count = os.preadv(reads, [own.buffer], at)
            if not count:
                return
            # The last block is written whole, and cut off after.
            whole = -(-count // BLOCK_BYTES) * BLOCK_BYTES
            if os.pwrite(writes, own.buffer[:whole], at) < whole:
                raise OSError(f"short write to {target}")

    opened, jobs = list[tuple[int, int, int]](), []
    for path in files_in(source):
        made = target / path.relative_to(source)
        made.parent.mkdir(parents=True, exist_ok=True)
        reads = os.open(path, os.O_RDONLY)
        writes = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        nbytes = path.stat().st_size
        opened.append((reads, writes, nbytes))
        jobs += [partial(copy, reads, writes, start) for start in range(0, nbytes, _SPAN_BYTES)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
    for reads, writes, nbytes in opened:
        os.ftruncate(writes, nbytes)
        os.close(reads)
        os.close(writes)
    sync_tree(target)
    return time.perf_counter() - began

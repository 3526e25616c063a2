"""How do time, memory and disk compare with DeepSpeed's own converters on the same files?

    python -m benchmarks.versus_deepspeed --size 1GB

`ds_to_universal` is what DeepSpeed offers for another number of ranks, `zero_to_fp32` for taking
the weights out. Memory is that of the whole tree of processes, shared pages counted once, above
what a Python does that has imported the same packages and nothing else. Temporary disk is what was
written next to the result and removed again.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._fabricate import fabricate
from benchmarks._layout import TAG
from benchmarks._measure import STREAMSHARD, machine, print_table, warm
from benchmarks._model import transformer
from streamshard import sizes

FROM, TO = 8, 6
SHORT = "64MB"
HEAD = ("program", "stage", "seconds", "x ours", "peak above floor MiB", "temporary disk MiB")
_EVERY_SECONDS = 0.02
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Watched:
    """What a tree of processes did."""

    seconds: float
    peak_bytes: int
    temporary_bytes: int
    """Most that lay in the watched directory at once, less what is left there."""


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="1GB", help="size of the checkpoint [1GB]")
    parser.add_argument("--short", action="store_true", help=SHORT)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage [both 2 and 3]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    size = sizes.parse(SHORT if given.short else given.size)
    print(machine())
    rows = []
    for stage in [given.stage] if given.stage else [2, 3]:
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            rows += compare(Path(directory), size, stage)
    print_table(HEAD, rows)
    return 0


def compare(root: Path, nbytes: int, stage: int) -> list[list[str]]:
    """Run each program once on one checkpoint; returns the table's rows."""
    source, target = root / "source", root / "target"
    model = transformer(nbytes, stage=stage)
    # The universal conversion breaks off at parameters without a dimension.
    groups = tuple({name: shape for name, shape in g.items() if shape} for g in model.groups)
    fabricate(source, replace(model, groups=groups), stage=stage, world_size=FROM)
    universal = (sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal")
    places = ("--input_folder", str(source / TAG), "--output_folder", str(target / "out"))
    result = str(target / "out")
    programs = {
        f"repartition {FROM} -> {TO}": (
            *(*STREAMSHARD, "repartition", str(source), result, "--world-size", str(TO)),
        ),
        "convert --codec none": (*STREAMSHARD, "convert", str(source), result),
        "ds_to_universal": (*universal, *places, "--inject_missing_state"),
        "zero_to_fp32": (
            *(sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(source), str(target)),
        ),
    }
    rows, ours = [], 0.0
    for name, command in programs.items():
        package = command[2].partition(".")[0]
        floor_bytes = watch((sys.executable, "-c", f"import {package}"), target).peak_bytes
        warm(source)
        found = watch(command, target)
        ours = ours or found.seconds
        memory = [found.peak_bytes - floor_bytes, found.temporary_bytes]
        times = [f"{found.seconds:.1f}", f"{found.seconds / ours:.1f}"]
        rows.append([name, str(stage), *times, *(f"{value / _MIB:.0f}" for value in memory)])
    return rows


def watch(command: tuple[str, ...], target: Path) -> Watched:
    """Run a program in a session of its own, and look at all that belongs to it until it ends."""
    target.mkdir()
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        peak_bytes = most_bytes = 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, sum(_memory_of_session(process.pid)))
            most_bytes = max(most_bytes, _size_of(target))
            time.sleep(_EVERY_SECONDS)
        seconds = time.perf_counter() - began
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{command}: {said.read()[-2000:].decode(errors='replace')}")
    left_bytes = _size_of(target)
    shutil.rmtree(target)
    return Watched(seconds, peak_bytes, max(0, most_bytes - left_bytes))


def _memory_of_session(session: int) -> Iterator[int]:
    """Yield what each process of a session has in memory, pages that several have shared out."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != session:
                continue
            lines = (process / "smaps_rollup").read_text().splitlines()
        except (OSError, ValueError):
            continue  # it has ended
        yield sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _size_of(directory: Path) -> int:
    """Add up what lies below a directory now; what goes away meanwhile does not count."""
    total = 0
    for place, _, files in os.walk(directory):
        for file in files:
            with suppress(FileNotFoundError):
                total += Path(place, file).stat().st_size
    return total


if __name__ == "__main__":
    sys.exit(main())

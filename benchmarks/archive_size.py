"""How much room does an archive of a really trained checkpoint take, and how long does it take?

    python -m benchmarks.archive_size --steps 400

Trains the demo's model with DeepSpeed at stage 2 on one CPU rank, once with all of its weights and
once with half of them frozen, saves both twice, and lets `compact` archive each first save, then
each second one next to it. Then trains it with smaller learning rates, saves eight times as often,
and stores the states of each save in other ways, also as the change since the first save. Then
trains a wider model of the same kind, of which a checkpoint takes a gigabyte, for fewer steps, and
measures how fast its states are encoded and decoded, compared with the codec by itself on all
cores. That takes 12 GB of disk.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import _archive_codecs, _archive_speed
from benchmarks._measure import STREAMSHARD, machine, print_table, succeed

HEAD = ("archive", "source MB", "archive MB", "of the source", "shared MB", "left MB")
TARGET = 0.78
RATES = ("1e-3", "1e-4", "1e-5")
SAVES = 8


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=400, help="steps of training [400]")
    parser.add_argument(
        "--hidden", type=int, default=8000, help="width of the larger model's layers [8000]"
    )
    parser.add_argument("--large-steps", type=int, default=30, help="its steps of training [30]")
    parser.add_argument("--runs", type=int, default=3, help="rounds of encoding and decoding [3]")
    parser.add_argument("--short", action="store_true", help="a few steps")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    steps = 20 if given.short else given.steps
    print(machine())
    rows = []
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        for what in ("all trained", "half frozen"):
            place = Path(directory) / what.split()[0]
            place.mkdir()
            saves = [steps, steps + steps // 10]
            run = _trained(place, saves, freeze=what == "half frozen")
            rows += [[f"{what}, step {step}", *_archived(run, step)] for step in saves]
        print_table(HEAD, rows)
        print(f"at most {TARGET} of the source: {float(rows[0][3]) <= TARGET}")
        for rate in RATES:
            place = Path(directory) / rate
            place.mkdir()
            _compare_codecs(place, steps, rate)
        hidden, large_steps, rounds = (
            (256, 2, 1) if given.short else (given.hidden, given.large_steps, given.runs)
        )
        place = Path(directory) / "large"
        place.mkdir()
        run = _trained(place, [large_steps], freeze=False, hidden=hidden)
        nbytes, rates = _archive_speed.speeds(run, f"global_step{large_steps}", rounds)
    what = f"{nbytes / 1e6:.0f} MB of tensors after {large_steps} steps, hidden {hidden:,}"
    print(f"\n{what}, {rounds} rounds, {len(os.sched_getaffinity(0))} threads; synced")
    print_table(_archive_speed.HEAD, rates)
    return 0


def _compare_codecs(directory: Path, steps: int, rate: str) -> None:
    """Train with one learning rate, archive all saves, and store their states in other ways."""
    saves = [max(1, steps * number // SAVES) for number in range(1, SAVES + 1)]
    run = _trained(directory, saves, freeze=False, rate=rate)
    told = _compacted(run)
    archives = run.with_name("archive")
    of_source = mean(told[step]["archive_bytes"] / told[step]["source_bytes"] for step in saves)
    print(f"\nlearning rate {rate}, saves at {saves}; archives take {of_source:.3f} of the source")
    both = [(archives / f"global_step{step}.zarr", told[step]["source_bytes"]) for step in saves]
    print_table(_archive_codecs.HEAD, _archive_codecs.compare(both))


def _trained(
    directory: Path,
    saves: list[int],
    *,
    freeze: bool,
    hidden: int | None = None,
    rate: str | None = None,
) -> Path:
    """Train on one rank; returns the run directory.

    Parameters
    ----------
    hidden
        Width of the layers; by default the demo's, and then there are two tags more that are newer.
    """
    command = [sys.executable, "-m", "benchmarks._train", "--save-to", "run"]
    newer = [] if hidden else [saves[-1] + 1, saves[-1] + 2]
    command += ["--save-at", *map(str, [*saves, *newer])]
    threads = str(len(os.sched_getaffinity(0)))
    command += ["--hidden", str(hidden), "--threads", threads] if hidden else []
    command += ["--lr", rate] if rate else []
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    # DeepSpeed wants an address and a port, and uses neither.
    environment |= {"LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path.cwd())}
    command += ["--freeze"] if freeze else []
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
    return directory / "run"


def _archived(run: Path, step: int) -> list[str]:
    """Archive all that may be; returns what is told of one step."""
    told = _compacted(run)[step]
    own = told["archive_bytes"] - told["shared_bytes"]
    return [
        f"{told['source_bytes'] / 1e6:.1f}",
        f"{told['archive_bytes'] / 1e6:.1f}",
        f"{own / told['source_bytes']:.3f}",
        f"{told['shared_bytes'] / 1e6:.1f}",
        f"{own / 1e6:.1f}",
    ]


def _compacted(run: Path) -> dict[int, dict[str, Any]]:
    """Archive all that may be; returns what is told of each step."""
    archive = run.with_name("archive")
    command = ("compact", run, archive, "--keep-last", "2", "--min-age", "0s", "--json")
    report = succeed(*STREAMSHARD, *map(str, command)).report
    return {tag["step"]: tag for tag in report["tags"]}


if __name__ == "__main__":
    sys.exit(main())

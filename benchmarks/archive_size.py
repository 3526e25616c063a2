"""How much room does an archive of a really trained checkpoint take, and how long does it take?

    python -m benchmarks.archive_size --steps 400

Trains the demo's model with DeepSpeed at stage 2 on one CPU rank, once with all of its weights and
once with half of them frozen, saves both twice, and lets `compact` archive each first save, then
each second one beside it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numcodecs import blosc

from benchmarks._measure import STREAMSHARD, files_in, machine, print_table, succeed, warm

HEAD = ("archive", "source MB", "archive MB", "of the source", "shared MB", "left MB")
TARGET = 0.78


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=400, help="steps of training [400]")
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
        rates = _rates(Path(directory) / "all" / "run", saves[0])
    print_table(HEAD, rows)
    print(f"at most {TARGET} of the source: {float(rows[0][3]) <= TARGET}")
    print(rates)
    return 0


def _trained(directory: Path, saves: list[int], *, freeze: bool) -> Path:
    """Train on one rank; returns the run directory, with two tags more that are newer."""
    command = [sys.executable, "-m", "benchmarks._train", "--save-to", "run"]
    command += ["--save-at", *map(str, [*saves, saves[-1] + 1, saves[-1] + 2])]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    # DeepSpeed wants an address and a port, and uses neither.
    environment |= {"LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path.cwd())}
    command += ["--freeze"] if freeze else []
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
    return directory / "run"


def _archived(run: Path, step: int) -> list[str]:
    """Archive all that may be up to a step; returns what is told of that step."""
    archive = run.with_name("archive")
    command = ("compact", run, archive, "--keep-last", "2", "--min-age", "0s", "--json")
    report = succeed(*STREAMSHARD, *map(str, command)).report
    (told,) = [tag for tag in report["tags"] if tag["step"] == step]
    own = told["archive_bytes"] - told["shared_bytes"]
    return [
        f"{told['source_bytes'] / 1e6:.1f}",
        f"{told['archive_bytes'] / 1e6:.1f}",
        f"{own / told['source_bytes']:.3f}",
        f"{told['shared_bytes'] / 1e6:.1f}",
        f"{own / 1e6:.1f}",
    ]


def _rates(run: Path, step: int) -> str:
    """Tell how fast a checkpoint is encoded and decoded, beside the codec by itself."""
    tag = run / f"global_step{step}"
    store, target = run.with_name("store.zarr"), run.with_name("target")
    warm(tag)
    convert = ("convert", str(tag), str(store), "--codec", "zstd", "--json")
    encoded = succeed(*STREAMSHARD, *convert).report
    repartition = ("repartition", str(store), str(target), "--json")
    decoded = succeed(*STREAMSHARD, *repartition).report
    source_bytes = sum(path.stat().st_size for path in files_in(tag))
    content = np.fromfile(max(files_in(tag), key=lambda path: path.stat().st_size), dtype="<f4")
    blosc.set_nthreads(len(os.sched_getaffinity(0)))
    codec = blosc.Blosc(cname="zstd", clevel=5, shuffle=blosc.Blosc.BITSHUFFLE)
    began = time.perf_counter()
    packed = codec.encode(content)
    between = time.perf_counter()
    codec.decode(packed)
    both = between - began, time.perf_counter() - between
    alone = [f"{content.nbytes / seconds / 1e6:.0f}" for seconds in both]
    ours = [f"{source_bytes / run_['seconds'] / 1e6:.0f}" for run_ in (encoded, decoded)]
    rates = {"encoding": (ours[0], alone[0]), "decoding": (ours[1], alone[1])}
    return "MB/s, ours and the codec's by itself, on all cores: " + json.dumps(rates)


if __name__ == "__main__":
    sys.exit(main())

"""How small do stores of really trained states become, and what does it cost?

    python -m benchmarks.codecs --steps 400

Trains the demo's model with DeepSpeed on one CPU rank, or takes a checkpoint that exists: what is
made up compresses as its maker likes. Ratios are to the store without compression.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks._measure import STREAMSHARD, files_in, machine, print_table, succeed, warm
from streamshard.options import CODECS

HEAD = ("codec", "MB", "of the size", "convert s", "repartition s", "x none", "x none")


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--source", type=Path, help="a checkpoint [train one]")
    parser.add_argument("--steps", type=int, default=400, help="steps of training [400]")
    parser.add_argument("--runs", type=int, default=5, help="rounds [5]")
    parser.add_argument("--short", action="store_true", help="a few steps, two rounds")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    steps, runs = (5, 2) if given.short else (given.steps, given.runs)
    print(machine())
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        source = given.source or _trained(Path(directory), steps)
        rows = _compare(source, Path(directory), runs)
    print(f"{given.source or f'{steps} steps of the demo'}, {runs} rounds")
    print_table(HEAD, rows)
    return 0


def _trained(directory: Path, steps: int) -> Path:
    """Train for some steps on one rank; returns the run directory."""
    options = ["--zero-stage=2", "--first=1", f"--last={steps}", f"--save-at={steps}"]
    command = [sys.executable, "-m", "streamshard.demo.rank", *options, "--save-to=run"]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    # DeepSpeed wants an address and a port, and uses neither.
    environment |= {"LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path.cwd())}
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
    return directory / "run"


def _compare(source: Path, directory: Path, runs: int) -> list[list[str]]:
    """Convert with each codec, and back, once per round; returns the table's rows."""
    store, target = directory / "store.zarr", directory / "target"
    there: dict[str, list[float]] = {codec: [] for codec in CODECS}
    back: dict[str, list[float]] = {codec: [] for codec in CODECS}
    nbytes: dict[str, int] = {}
    for _ in range(runs):
        for codec in CODECS:
            warm(source)
            convert = ("convert", source, store, "--codec", codec, "--json")
            there[codec].append(succeed(*STREAMSHARD, *convert).report["seconds"])
            repartition = ("repartition", store, target, "--world-size", "2", "--json")
            back[codec].append(succeed(*STREAMSHARD, *repartition).report["seconds"])
            nbytes[codec] = sum(path.stat().st_size for path in files_in(store))
            shutil.rmtree(store)
            shutil.rmtree(target)
    whole = nbytes["none"]
    return [
        [
            codec,
            f"{nbytes[codec] / 1e6:.1f}",
            f"{nbytes[codec] / whole:.2f}",
            f"{median(there[codec]):.2f}",
            f"{median(back[codec]):.2f}",
            *(f"{_ratio(times[codec], times['none']):.2f}" for times in (there, back)),
        ]
        for codec in CODECS
    ]


def _ratio(times: list[float], others: list[float]) -> float:
    return median(time / other for time, other in zip(times, others, strict=True))


if __name__ == "__main__":
    sys.exit(main())

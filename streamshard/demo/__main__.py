"""Tell the demo: train on 4 ranks, reshard the checkpoint, resume on 2, compare the losses."""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_STEPS_BEFORE = 20
_STEPS_AFTER = 8
_LAST_STEP = _STEPS_BEFORE + _STEPS_AFTER
TOLERANCE = 0.005
"""How far apart the two runs' losses may be.

4 ranks and 2 ranks add bf16 gradients in different orders. That alone changed the losses by less
than 0.001; losing any one of Adam's states, or its step count, changed them by 0.02 and more.
"""
_TRAINING_SECONDS = 300.0
"""A hard limit, far above the 15 seconds that one start of 4 ranks takes on 2 cores."""


class DemoError(Exception):
    """Raised when a part of the demo fails; its message is all the user needs."""


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m streamshard.demo", description=__doc__)
    parser.add_argument(
        "--zero-stage", type=int, choices=(1, 2, 3), default=3, help="3 unless given"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep all files in DIR, a new directory"
    )
    options = parser.parse_args()
    if options.keep is not None and options.keep.exists():
        parser.error(f"{options.keep} exists; name a new directory to keep")
    missing = [name for name in ("torch", "deepspeed") if find_spec(name) is None]
    if missing:
        print(_how_to_install(missing), file=sys.stderr)
        return 2
    try:
        with _work_dir(options.keep) as work_dir:
            _show(work_dir, options.zero_stage)
    except (DemoError, OSError) as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def _how_to_install(missing: list[str]) -> str:
    return "\n".join(
        [
            f"the demo trains with DeepSpeed on CPU; not installed here: {', '.join(missing)}.",
            "Install torch first, then DeepSpeed, whose build looks for it:",
            f"    {sys.executable} -m pip install torch setuptools",
            f"    DS_BUILD_OPS=0 {sys.executable} -m pip install --no-build-isolation deepspeed",
        ]
    )


@contextlib.contextmanager
def _work_dir(keep: Path | None) -> Iterator[Path]:
    """Provide a directory for checkpoints and logs; remove it at the end unless `keep` is given."""
    if keep is None:
        work_dir = Path(tempfile.mkdtemp(prefix="streamshard-demo-"))
        try:
            yield work_dir
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)
        return
    keep.mkdir(parents=True)
    yield keep.resolve()
    print(f"\nKept in {keep}: run/, store.zarr/, resharded/ and the ranks' logs.")


def _show(work_dir: Path, zero_stage: int) -> None:
    """Train, reshard and resume, and print each step."""
    stage = f"--zero-stage={zero_stage}"
    print(f"Training a small language model on 4 CPU ranks: ZeRO stage {zero_stage}, bf16, AdamW.")
    save = ["--save-to=../run", f"--save-at={_STEPS_BEFORE}"]
    whole = _train(work_dir / "train", 4, stage, "--first=1", f"--last={_LAST_STEP}", *save)
    print(f"  step {1:3}: loss {whole[1]:.4f}")
    print(f"  step {_STEPS_BEFORE:3}: loss {whole[_STEPS_BEFORE]:.4f}, checkpoint saved in run/")
    print(
        f"  step {_LAST_STEP:3}: loss {whole[_LAST_STEP]:.4f}, "
        "the uninterrupted run goes on to here"
    )

    _command(work_dir, "inspect", "run")
    _command(work_dir, "convert", "run", "store.zarr")
    _command(work_dir, "inspect", "store.zarr")
    _command(work_dir, "repartition", "store.zarr", "resharded", "--world-size", "2")

    print('\nResuming on 2 CPU ranks, with a plain engine.load_checkpoint("resharded").')
    steps = [f"--first={_STEPS_BEFORE + 1}", f"--last={_LAST_STEP}"]
    resumed = _train(work_dir / "resume", 2, stage, *steps, "--load-from=../resharded")
    _compare(whole, resumed)


def _compare(whole: dict[int, float], resumed: dict[int, float]) -> None:
    """Print both runs' losses side by side; raise if they differ too much."""
    print("\n  step   4 ranks, uninterrupted   2 ranks, resumed   difference")
    for step, loss in resumed.items():
        difference = round(loss - whole[step], 4) + 0.0  # no minus before a zero
        print(f"  {step:4}   {whole[step]:22.4f}   {loss:16.4f}   {difference:+10.4f}")
    apart = max(abs(loss - whole[step]) for step, loss in resumed.items())
    # `not <=` instead of `>`, so that a NaN fails too: every comparison with NaN is false.
    if not apart <= TOLERANCE:
        raise DemoError(f"the losses are {apart:.4f} apart, more than the {TOLERANCE} of rounding")
    print(f"\nSame training on half the ranks: the losses are within {apart:.4f} of each other.")
    print("bf16 gradients added in another order do that. Lost optimizer state does 0.02 and more.")


def _command(work_dir: Path, *args: str) -> None:
    """Run one streamshard command, shown as a user would type it."""
    line = " ".join(["streamshard", *args])
    print(f"\n$ {line}", flush=True)
    command = [sys.executable, "-m", "streamshard", *args]
    done = subprocess.run(command, cwd=work_dir, env=_environment(), check=False)
    if done.returncode != 0:
        raise DemoError(f"`{line}` ended with exit code {done.returncode}")


def _environment() -> dict[str, str]:
    """Let a process that runs elsewhere find this package, installed or not."""
    package_dir = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_dir, os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def _train(log_dir: Path, world_size: int, *args: str) -> dict[int, float]:
    """Train on this many ranks, with their output in log files; return each step's loss."""
    log_dir.mkdir()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        ranks.extend(_start_rank(log_dir, rank, world_size, *args) for rank in range(world_size))
        finished = _all_end_well(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if not finished:
        raise DemoError(_last_words(log_dir, world_size))
    losses = json.loads((log_dir / "losses.json").read_text())
    return {int(step): loss for step, loss in losses.items()}


def _start_rank(log_dir: Path, rank: int, world_size: int, *args: str) -> subprocess.Popen[bytes]:
    environment = _environment() | {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        # DeepSpeed wants an address and a port; the ranks meet at a file and use neither.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "streamshard.demo.rank", *args]
    with (log_dir / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=log_dir, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _all_end_well(ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Wait for all ranks, or for the first to fail: the others would wait for it in vain."""
    deadline = time.monotonic() + _TRAINING_SECONDS
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if any(codes):
            return False
        if None not in codes:
            return True
        time.sleep(0.05)
    return False


def _last_words(log_dir: Path, world_size: int) -> str:
    logs = [log_dir / f"rank{rank}.log" for rank in range(world_size)]
    ends = [f"--- {log.name}\n{log.read_text(errors='replace')[-2000:].strip()}" for log in logs]
    return "\n".join([f"training on {world_size} ranks did not finish; it said last:", *ends])


if __name__ == "__main__":
    sys.exit(main())

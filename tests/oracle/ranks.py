"""Start the ranks of one world size once and let them do many jobs, one after the other."""

import atexit
import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tests.oracle import jobs as work
from tests.oracle.rank_server import Start, marker_path, request_path

COLLECTIVE_SECONDS = 300.0
JOB_SECONDS = 600.0
"""Hard limits, far above what is measured; a rank that waits for a dead one fails first."""
LAUNCHED = {
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
"""Environment of ranks that a launcher starts, beside the test's own."""
IN_EVERY_RANK = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    # Kernels would be compiled for minutes.
    "TORCHDYNAMO_DISABLE": "1",
    # DeepSpeed orders some param groups of experts like a set of strings.
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
}
WITH_OLDER = {
    # Before 0.16 DeepSpeed does not tell torch that its files hold more than tensors.
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
}


@dataclass(frozen=True)
class Finished:
    """How one job ended."""

    job: object
    seconds: float
    error: str | None
    """The failing rank's traceback and the end of its output."""


def run_jobs(
    world_size: int,
    jobs: Sequence[object],
    workdir: Path,
    do: Callable[[Any], None] = work.run,
    deepspeed_at: Path | None = None,
) -> list[Finished]:
    """Run `jobs` in order on `world_size` ranks, each by calling `do`; one result for each.

    The ranks import DeepSpeed from `deepspeed_at` where that is given, else the installed one.
    A job that fails takes its ranks with it; the jobs after it get new ones. What the ranks leave
    on disk decides, not their exit codes: a process may crash with all its work done.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    finished: list[Finished] = []
    while len(finished) < len(jobs):
        rest = list(jobs[len(finished) :])
        start_dir = Path(tempfile.mkdtemp(prefix=f"world{world_size}_", dir=workdir))
        crash = start_ranks(world_size, rest, do, start_dir, deepspeed_at)
        done = _done(rest, start_dir)
        finished += done
        if len(done) < len(rest):
            finished.append(Finished(rest[len(done)], 0.0, _complaint(start_dir, crash)))
    return finished


def start_ranks(
    world_size: int,
    jobs: list[object],
    do: Callable[[Any], None],
    start_dir: Path,
    deepspeed_at: Path | None = None,
    *,
    survives: bool = False,
) -> str:
    """Start ranks once and wait for their end; the reason when it is a bad one, else ''."""
    older = deepspeed_at is not None
    environment = {**os.environ, **IN_EVERY_RANK, **(WITH_OLDER if older else {})}
    start = Start(
        world_size,
        jobs,
        do,
        start_dir,
        environment,
        JOB_SECONDS,
        has_older=older,
        survives=survives,
    )
    request_path(start_dir).write_bytes(pickle.dumps(start))
    server = _server(deepspeed_at)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{json.dumps(str(start_dir))}\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the server that forks ranks has ended"
    error: str = json.loads(answer)
    return error


def require_success(finished: Sequence[Finished]) -> None:
    """Raise with every failed job's error."""
    errors = [f"{one.job}\n{one.error}" for one in finished if one.error is not None]
    assert not errors, "\n\n".join(errors)


def older_deepspeed(version: str) -> Path:
    """Where an older DeepSpeed is; a test that needs it is skipped where it is not."""
    home = os.environ.get("OLD_DEEPSPEEDS")
    if home is None:
        pytest.skip(f"OLD_DEEPSPEEDS names no place of {version}: `nox -s oracle` installs it")
    place = Path(home) / f"deepspeed-{version}"
    assert (place / "deepspeed").is_dir(), f"{place}: no DeepSpeed in it"
    return place


@cache
def _server(deepspeed_at: Path | None) -> subprocess.Popen[str]:
    """Start the process that forks the ranks; it ends with its standard input."""
    found_in = [*([] if deepspeed_at is None else [str(deepspeed_at)]), *sys.path]
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.oracle.rank_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **IN_EVERY_RANK, "PYTHONPATH": os.pathsep.join(found_in)},
    )
    atexit.register(server.communicate)
    return server


def _done(jobs: list[object], start_dir: Path) -> list[Finished]:
    """The jobs that every rank completed, in order."""
    done = []
    for index, job in enumerate(jobs):
        marker = marker_path(start_dir, index)
        if not marker.exists():
            break
        done.append(Finished(job, json.loads(marker.read_text())["seconds"], None))
    return done


def _complaint(start_dir: Path, crash: str) -> str:
    parts = [crash or "the ranks ended without a word"]
    parts += [
        f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
        for log in sorted(start_dir.glob("rank*.log"))
    ]
    return "\n".join(parts)


def be_rank(rank: int, start: Start) -> None:
    """Live the life of one rank, in a process that was forked for it."""
    _redirect_output(start.start_dir / f"rank{rank}.log")
    try:
        _join_group(rank, start.world_size, start.start_dir)
        if start.has_older:
            _wait_for_every_gather()
        for index, job in enumerate(start.jobs):
            started = time.monotonic()
            start.do(job)
            if rank == 0:
                _mark_done(marker_path(start.start_dir, index), time.monotonic() - started)
        distributed.barrier()
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    # Past the interpreter's teardown, where gloo's threads now and then abort a finished process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect_output(log: Path) -> None:
    """Send stdout and stderr, native code's included, to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _wait_for_every_gather() -> None:
    """Let no gather of stage 3 go on unnoticed.

    Older versions launch several and wait for the last alone, while gloo finishes them in any
    order: now and then a parameter is used half gathered.
    """
    comm: Any = importlib.import_module("deepspeed.comm")
    gather = comm.all_gather_into_tensor

    def gather_and_wait(*args: object, **kwargs: object) -> object:
        work = gather(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    comm.all_gather_into_tensor = gather_and_wait


def _join_group(rank: int, world_size: int, start_dir: Path) -> None:
    """Make this process a DeepSpeed rank on CPU."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        # DeepSpeed wants them set; the ranks meet at a file, so that no port can be taken.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    import deepspeed  # type: ignore[import-untyped,unused-ignore]
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-untyped,unused-ignore]

    # Without its shared-memory all-reduce there is nothing to compile under a lock that a killed
    # process leaves behind, and no buffer to leak in /dev/shm; gloo does the reductions.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch computes in fp16 on any CPU; DeepSpeed only asks whether it is fast.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(
        dist_backend="gloo",
        init_method=f"file://{start_dir / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )


def _mark_done(marker: Path, seconds: float) -> None:
    """Written whole or not at all: the marker's existence is the message."""
    partial = marker.with_suffix(".partial")
    partial.write_text(json.dumps({"seconds": seconds}))
    partial.replace(marker)

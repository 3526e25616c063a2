"""A process that has imported what ranks need, and forks them.

A rank that starts from nothing imports for three seconds, six with an older DeepSpeed. A fork has
it all at once, and what the server had when it froze its objects is not looked through again each
time that a job collects garbage.
"""

import gc
import importlib
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# The first optimizer, the first compiled function and the first ZeRO-3 engine import these.
_IMPORTS: Final = (
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "deepspeed",
    "deepspeed.module_inject",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.bf16_optimizer",
    "tests.oracle.jobs",
)
_MAY_LACK: Final = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""Modules that older versions of DeepSpeed do not have."""
_LOOK_SECONDS: Final = 0.02


@dataclass(frozen=True)
class Start:
    """Ranks to fork, and what they do."""

    world_size: int
    jobs: list[object]
    do: Callable[[Any], None]
    start_dir: Path
    """For the ranks' output and for a marker of each job that is done."""
    environment: dict[str, str]
    patience_seconds: float
    """How long no job may be done before the ranks are killed."""
    has_older: bool
    """Whether the server has an older DeepSpeed than the installed one."""
    survives: bool
    """Whether the other ranks go on when one has failed."""


def request_path(start_dir: Path) -> Path:
    """Where a pickled `Start` is, whose directory is sent to the server."""
    return start_dir / "start.pickle"


def marker_path(start_dir: Path, job: int) -> Path:
    """What rank 0 leaves when a job is done."""
    return start_dir / f"job{job}.json"


def _serve() -> None:
    """Fork the ranks of each directory that is read; answer how they ended ('' for well), in JSON.

    Everything is over with the standard input.
    """
    # What modules print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in _IMPORTS:
        importlib.import_module(name)
    for name in _MAY_LACK:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _freeze()
    for line in sys.stdin:
        start: Start = pickle.loads(request_path(Path(json.loads(line))).read_bytes())
        # What a kind of job needs, which the server would not need for others.
        for name in getattr(sys.modules[start.do.__module__], "IMPORTS", ()):
            importlib.import_module(name)
        _freeze()
        answers.write(f"{json.dumps(_carry_out(start))}\n")
        answers.flush()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def _carry_out(start: Start) -> str:
    running = {_fork(start, rank): rank for rank in range(start.world_size)}
    done, last_change, error = 0, time.monotonic(), ""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status)
        if pid:
            rank = running.pop(pid)
            if code and not error:
                error = f"rank {rank} ended with exit code {code}"
        if marker_path(start.start_dir, done).exists():
            done, last_change = done + 1, time.monotonic()
        if time.monotonic() - last_change > start.patience_seconds:
            error = "the ranks made no progress and were killed"
        if error and not start.survives:
            for other in running:
                os.kill(other, signal.SIGKILL)
        if not pid:
            time.sleep(_LOOK_SECONDS)
    return error


def _fork(start: Start, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ.clear()
        os.environ.update(start.environment)
        ranks: Any = importlib.import_module("tests.oracle.ranks")
        ranks.be_rank(rank, start)
    return pid


if __name__ == "__main__":
    # The class by the name under which the tests pickle it.
    importlib.import_module("tests.oracle.rank_server")._serve()

"""Runs engines of DeepSpeed 0.9 and 0.12 with today's torch, and keeps what they save.

    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation --target DIR/deepspeed-0.12.6 \\
        deepspeed==0.12.6
    OLD_DEEPSPEEDS=DIR python -m tests.oracle.old_engines 0.12.6

writes to `old_saves/0.12.6.tar.xz` what each case saved on `SAVED` ranks. What is kept there also
has what the same version saved again on `RESUMED` ranks, after it had loaded what `repartition`
wrote for it at that time, and all that it held had been compared with the engine that trained.
0.9.5 needs "pydantic<2" in the same directory.
"""

import logging
import os
import socket
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.elastic.agent.server import api

from tests.oracle.cases import BF16, BF16_OPTIMIZER, ROUND_ROBIN
from tests.oracle.jobs import Train, run
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.unpacking import unpack

SAVED, RESUMED = 3, 2
"""Counts of ranks."""
ROUND_ROBIN_1 = Case(
    "z1-round-robin", 1, "bf16", {"zero_optimization": {"round_robin_gradients": True}}
)
CASES = {
    # Before 0.11.1 an engine with a BF16_Optimizer at stage 1 fails when it saves.
    "0.9.5": (ROUND_ROBIN_1, ROUND_ROBIN, BF16[2]),
    "0.12.6": (ROUND_ROBIN_1, ROUND_ROBIN, BF16[2], BF16_OPTIMIZER),
}
KEPT = Path(__file__).with_name("old_saves")
_DIRECTORY = "STREAMSHARD_TEST_DEEPSPEED"
"""Environment variable of the ranks: where their DeepSpeed is."""


def do(job: Train) -> None:
    """Do a job in this rank, whose DeepSpeed was made to run when this module was imported."""
    run(job)


def make(version: str, directory: Path) -> None:
    """Let engines of a version save."""
    cases = CASES[version]
    deepspeed = Path(os.environ["OLD_DEEPSPEEDS"]) / f"deepspeed-{version}"
    os.environ[_DIRECTORY] = str(deepspeed)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        train = [Train(case, directory / case.name / "saved", None) for case in cases]
        require_success(run_jobs(SAVED, train, work / "ranks", do, deepspeed))


def unpacked(version: str, directory: Path) -> Path:
    """Unpack what engines of a version saved; returns the directory with one for each case."""
    unpack(KEPT / f"{version}.tar.xz", directory)
    return directory


def _make_it_run() -> None:
    """Give an old DeepSpeed what torch and numpy had when it was new, and gloo for oneCCL."""
    lent: Any = api
    lent.log, lent._get_socket_with_port = logging.getLogger("elastic"), socket.socket
    vars(np).setdefault("BUFSIZE", 8192)
    for name in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):
        sys.modules.setdefault(name, ModuleType(name))
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.insert(0, os.environ[_DIRECTORY])
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import engine

    accelerator = get_accelerator()
    accelerator._communication_backend_name = "gloo"
    # They take the CPU for a device with streams and events.
    cpu: Any = type(accelerator)
    cpu.Event = cpu.Stream = property(lambda cpu: lambda *args, **kwargs: _Idle())
    cpu.stream = cpu.current_stream = cpu.default_stream = lambda *args: _Idle()
    tensors: Any = torch.Tensor
    tensors.record_stream = lambda tensor, stream: None
    engine.split_half_float_double_sparse = lambda found: [
        (dtype, [one for one in found if one.dtype == dtype])
        for dtype in dict.fromkeys(one.dtype for one in found)
    ]
    cpu.memory_stats = lambda cpu, device=None: {"num_alloc_retries": 0}
    save: Any = engine.DeepSpeedEngine.save_checkpoint
    gather: Any = distributed.all_gather_into_tensor

    def save_plainly(
        *args: object, exclude_frozen_parameters: bool = False, **kwargs: object
    ) -> object:
        assert not exclude_frozen_parameters, "0.9 has no such option"
        return save(*args, **kwargs)

    def gather_into_views(
        output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        with torch.no_grad():  # torch now minds that the parts of a split are written to
            return gather(output_tensor.data, input_tensor.data, *args, **kwargs)

    engine.DeepSpeedEngine.save_checkpoint = save_plainly
    distributed.all_gather_into_tensor = gather_into_views


class _Idle:
    """A stream or an event, whose methods do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


if __name__ != "__main__" and __name__ != "__mp_main__" and _DIRECTORY in os.environ:
    _make_it_run()

if __name__ == "__main__":
    (_, wanted) = sys.argv
    from tests.oracle import old_engines

    with tempfile.TemporaryDirectory() as place:
        old_engines.make(wanted, Path(place))
        KEPT.mkdir(exist_ok=True)
        with tarfile.open(KEPT / f"{wanted}.tar.xz", "w:xz") as packed:
            packed.add(place, ".")

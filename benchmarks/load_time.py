"""How long does a load on another number of ranks take, and how much private memory?

    python -m benchmarks.load_time --size 1GB

Real DeepSpeed engines on CPU: 4 ranks save, 2 ranks load. A plain load of converted files is
compared with direct loads of the shards and of a store with zstd, and with conversion and load
together. The size is what each of the 2 ranks loads. Page cache warm; every round does each once,
and ratios are taken within a round. Memory is the most by which the private memory of a rank grows,
in a round of its own. Then planning is timed for many parameters, for one rank of 48, without
engines. What lies in --directory is used again, and stays: --runs 0 makes it and loads nothing.
"""

import argparse
import json
import math
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import deepspeed
import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn

import streamshard.deepspeed
from benchmarks._fabricate import fabricate
from benchmarks._measure import machine, print_table, ratio_cell, warm
from benchmarks.plan_at_scale import model as model_of
from streamshard import sizes
from streamshard.native.files_on_demand import FilesOnDemand
from streamshard.native.resharding import resharding_of
from streamshard.source.source import open_source

FROM, TO = 4, 2
SHORT, SHORT_PARAMS = "32MB", 200
HEAD = ("load", "stage", "seconds", "x plain", "CPU s per rank", "x plain", "private MiB per rank")
PLAIN, DIRECT, STORE, TOTAL = (
    "plain, of converted files", "direct, of shards", "direct, of a store",
    "convert, then plain",
)  # fmt: skip
_LAYERS: Final = 8
_STEPS: Final = 3
"""Steps of training, after which moments have as many different bits as those of a real job."""
_EVERY_SECONDS: Final = 0.002
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks do."""

    root: Path
    stage: int
    width: int
    rounds: int = 0

    @property
    def source(self) -> Path:
        """What is loaded."""
        return self.root / "source"

    @property
    def store(self) -> Path:
        """The same in a store."""
        return self.root / "store"


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="1GB", help="what each rank loads [1GB]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT}, two rounds")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage [both 2 and 3]")
    parser.add_argument("--runs", type=int, default=5, help="rounds [5]")
    parser.add_argument("--params", type=int, default=4000, help="parameters to plan for [4000]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    size, runs = (SHORT, 2) if given.short else (given.size, given.runs)
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}")
    rows = []
    for stage in [given.stage] if given.stage else [2, 3]:
        with _directory(given.directory, f"load-stage{stage}") as directory:
            width = math.isqrt(sizes.parse(size) // (6 if stage == 3 else 8) // _LAYERS)
            rows += _compare(Job(directory, stage, width, runs))
    print_table(HEAD, rows)
    with _directory(given.directory, "plan") as directory:
        _plan(directory, SHORT_PARAMS if given.short else given.params)
    return 0


@contextmanager
def _directory(given: Path | None, name: str) -> Iterator[Path]:
    """Make a directory to work in, which goes at the end if none was given."""
    if given is not None:
        (given / name).mkdir(parents=True, exist_ok=True)
        yield given / name
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def _compare(job: Job) -> list[list[str]]:
    """Save with some ranks, load with others; returns the table's rows."""
    if not job.store.exists():
        _start(FROM, job, _save)
        streamshard.convert(job.source, job.store, codec="zstd")
    if not job.rounds:
        return []
    _start(TO, job, _load)
    found = json.loads((job.root / "found.json").read_text())
    seconds, cpu, peaks = found["seconds"], found["cpu"], found["peaks"]
    seconds[TOTAL] = [sum(pair) for pair in zip(seconds[TOTAL], seconds[PLAIN], strict=True)]
    cpu[TOTAL] = [sum(pair) for pair in zip(cpu[TOTAL], cpu[PLAIN], strict=True)]
    return [
        [
            name, str(job.stage),
            f"{median(seconds[name]):.2f}", ratio_cell(seconds[name], seconds[PLAIN]),
            f"{median(cpu[name]):.2f}", ratio_cell(cpu[name], cpu[PLAIN]),
            f"{peaks[PLAIN if name == TOTAL else name] / _MIB:.0f}",
        ]
        for name in (PLAIN, DIRECT, STORE, TOTAL)
    ]  # fmt: skip


def _start(world_size: int, job: Job, do: Callable[[Job], None]) -> None:
    """Do something on real ranks."""
    meeting = job.root / f"meeting-{world_size}"
    meeting.unlink(missing_ok=True)
    spawn(_rank, (world_size, job, do, meeting), nprocs=world_size)  # type: ignore[no-untyped-call]


def _rank(rank: int, world_size: int, job: Job, do: Callable[[Job], None], meeting: Path) -> None:
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed's calls of torch
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is to be compiled
    deepspeed.init_distributed(
        dist_backend="gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
    )
    do(job)
    distributed.barrier()
    os._exit(0)  # past the interpreter's teardown, where gloo's threads now and then abort


def _engine(job: Job) -> Any:  # noqa: ANN401
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(job.width, job.width) for _ in range(_LAYERS)))
    config = {
        "train_batch_size": FROM,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": job.stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}},
    }
    return deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=config, dist_init_required=False
    )[0]


def _save(job: Job) -> None:
    engine = _engine(job)
    for _ in range(_STEPS):
        batch = torch.randn(FROM // distributed.get_world_size(), job.width, dtype=torch.bfloat16)
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    engine.save_checkpoint(str(job.source))


def _load(job: Job) -> None:
    """Load in each way, in each round; rank 0 leaves what that took."""
    engine, converted = _engine(job), job.root / "converted"
    ways: dict[str, tuple[Path, Callable[[Path], object]]] = {
        PLAIN: (converted, lambda path: engine.load_checkpoint(str(path))),
        DIRECT: (job.source, lambda path: streamshard.deepspeed.load_checkpoint(engine, path)),
        STORE: (job.store, lambda path: streamshard.deepspeed.load_checkpoint(engine, path)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, TOTAL)}
    cpu: dict[str, list[float]] = {name: [] for name in seconds}
    peaks: dict[str, int] = {}
    for number in range(job.rounds + 1):
        before = time.process_time()
        seconds[TOTAL].append(_convert(job.source, converted))
        cpu[TOTAL].append(time.process_time() - before)
        for name, (path, load) in ways.items():
            if distributed.get_rank() == 0:
                warm(path)
            distributed.barrier()
            began, before = time.perf_counter(), time.process_time()
            if number:
                load(path)
            else:
                with _peak() as peak:
                    load(path)
                peaks[name] = int(_largest(peak[0]))
            cpu_seconds = time.process_time() - before
            distributed.barrier()
            seconds[name].append(time.perf_counter() - began)
            cpu[name].append(_largest(cpu_seconds))
    if distributed.get_rank() == 0:
        both = (
            {name: found[1:] for name, found in each.items()} for each in (seconds, cpu)
        )  # the first is the round in which memory is measured
        said = dict(zip(("seconds", "cpu"), both, strict=True), peaks=peaks)
        (job.root / "found.json").write_text(json.dumps(said))


def _convert(source: Path, converted: Path) -> float:
    """Write files for this job as a user would before it, with the other ranks idle."""
    began = time.perf_counter()
    if distributed.get_rank() == 0:
        shutil.rmtree(converted, ignore_errors=True)
        began = time.perf_counter()
        streamshard.repartition(source, converted, world_size=TO)
    seconds = time.perf_counter() - began
    distributed.barrier()
    return seconds


def _largest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return float(found)


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Measure by how much private memory grows at most; the list holds it at the end."""
    before, most, is_over = _private_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(_EVERY_SECONDS):
            most[0] = max(most[0], _private_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


def _private_bytes() -> int:
    """Return what this process has in memory that is of no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def _plan(root: Path, params: int, ranks: Sequence[int] = (64, 48)) -> None:
    """Time what comes before a load of many parameters, on rank 0 and on each rank."""
    source, target = ranks
    rows = []
    for stage in (2, 3):
        run = root / f"stage{stage}-{params}"
        if not run.exists():
            fabricate(run, model_of(params), stage=stage, world_size=source, sparse=True)
        times = [time.perf_counter()]
        resharding = resharding_of(open_source(run), target)
        times.append(time.perf_counter())
        sent = pickle.dumps(resharding)
        times.append(time.perf_counter())
        received = pickle.loads(sent)  # noqa: S301 - it is our own
        times.append(time.perf_counter())
        files = FilesOnDemand(received)
        own = [path for path in files.paths if "optim_states" in path][-1]
        for path in (files.paths[0], own):
            files.content(path)
        times.append(time.perf_counter())
        steps = [f"{b - a:.2f}" for a, b in pairwise(times)]
        rows.append([f"{params} parameters", str(stage), *steps, f"{len(sent) / _MIB:.1f}"])
    head = ("plan", "stage", "open s", "send s", "receive s", "plan own files s", "sent MiB")
    print()
    print_table(head, rows)


if __name__ == "__main__":
    sys.exit(main())

"""Loads whose memory and maps are looked at. Runs inside every rank."""

import ctypes
import gc
import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from streamshard.deepspeed import LoadReport, resharding
from tests.oracle import jobs, models
from tests.oracle.models import Case
from tests.oracle.truth import gather_truth

_EVERY_SECONDS = 0.002
WIDTH, BODIES = 512, 2


class WideModel(nn.Module):
    """Matrices of 1 MiB and more, which are mapped where they lie in one piece; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, WIDTH)
        self.body = nn.Sequential(*(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(BODIES)))
        self.frozen = nn.Linear(WIDTH, 2 * WIDTH)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, models.VOCABULARY)
        self.gain = nn.Parameter(torch.rand(1))
        self.mix = nn.Parameter(torch.rand(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.gain + self.mix.sum()
        inner = torch.stack([torch.tanh(one(hidden)) for one in self.body]).sum(0)
        hidden = hidden + inner.view(*hidden.shape[:-1], 4, WIDTH).sum(-2)
        hidden = hidden + self.frozen(hidden).view(*hidden.shape[:-1], 2, WIDTH).sum(-2)
        logits = self.head(hidden).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class LargeModel(WideModel):
    """Enough elements for a checkpoint of some 150 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(10)))


class Holder:
    """An object of the job's own in the client state, with tensors in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def held_state() -> dict[str, Any]:
    """Make a client state with large tensors in an object, and two that share their storage."""
    large = torch.arange(1 << 20, dtype=torch.float32)
    return {"holder": Holder(large), "view": large[5:], "list": [large.double()]}


@dataclass(frozen=True)
class SaveHeld:
    """Train an engine for a step and save it with the client state above."""

    case: Case
    save_dir: Path
    truth_path: Path | None = None


def save(job: SaveHeld) -> None:
    engine = jobs.start_engine(job.case, seed=11)
    jobs.take_step(engine, job.case, 0)
    engine.save_checkpoint(str(job.save_dir), client_state=held_state())
    if job.truth_path is not None:
        jobs.write_truth(gather_truth(engine, held_state()), job.truth_path)
    engine.destroy()
    distributed.barrier()


@dataclass(frozen=True)
class MeasuredLoad:
    """Load a checkpoint, and say what memory that took, and what is mapped then."""

    case: Case
    source: Path
    results: Path
    """Directory for `{rank}.json` of each rank, and `truth.pt`."""
    is_plain: bool = False
    """Whether DeepSpeed loads by itself."""
    has_function: bool = False
    """Whether a `custom_load_fn` loads the weights."""
    is_overwritten: bool = False
    """Whether all files of the source are overwritten and cut off when it is loaded."""


def load(job: MeasuredLoad) -> None:
    engine = jobs.start_engine(job.case, seed=77, scale=1.7)
    options = {"custom_load_fn": _load_weights} if job.has_function else {}
    gc.collect()
    distributed.barrier()
    loads: AbstractContextManager[list[LoadReport]]
    loads = nullcontext([]) if job.is_plain else resharding()
    with loads as reports, _peak_of_private_memory() as peak:
        _, state = engine.load_checkpoint(str(job.source), **options)
    # Each rank of stage 3 has fragments of its own.
    fragments = state.get("frozen_param_fragments") or {}
    kept = {name: fragment.clone() for name, fragment in fragments.items()}
    mapped = [line for line in _maps() if f"{job.source}/" in line]
    distributed.barrier()
    if job.is_overwritten and distributed.get_rank() == 0:
        _ruin(job.source)
    distributed.barrier()
    said = {
        "peak_bytes": peak[0],
        "maps": mapped,
        "mapped_bytes": [list(report.mapped_bytes) for report in reports],
        "read_bytes": [list(report.read_bytes) for report in reports],
        "is_shared": _address(state["view"]) == _address(state["holder"].tensor),
        "is_kept": all(torch.equal(kept[name], fragments[name]) for name in kept),
    }
    job.results.mkdir(parents=True, exist_ok=True)
    (job.results / f"{distributed.get_rank()}.json").write_text(json.dumps(said))
    truth = gather_truth(engine, {key: state[key] for key in held_state()})
    jobs.write_truth(truth, job.results / "truth.pt")
    engine.destroy()
    del engine, state, fragments, kept, truth
    gc.collect()
    distributed.barrier()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _load_weights(src: dict[str, Any], dst: nn.Module) -> None:
    dst.load_state_dict(src)


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def _ruin(source: Path) -> None:
    """Overwrite the first half of each file, and cut off the other."""
    for path in source.rglob("*"):
        if path.is_file():
            half = path.stat().st_size // 2
            with path.open("r+b") as file:
                file.write(b"\xff" * half)
                file.truncate(half)


@contextmanager
def _peak_of_private_memory() -> Iterator[list[int]]:
    """Measure by how much private memory grows at most; the list holds it at the end.

    The kernel keeps a peak of resident memory alone, with what is mapped and shared in it.
    """
    ctypes.CDLL(None).malloc_trim(0)  # what jobs before have left would be used again
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
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024

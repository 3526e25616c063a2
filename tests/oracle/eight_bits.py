"""Lets engines train with an optimizer of bitsandbytes in 8 bits, and keeps what they save.

    pip install --no-deps --target DIR bitsandbytes==0.50.2
    PYTHONPATH=DIR python -m tests.oracle.eight_bits

writes `old_saves/bitsandbytes.tar.xz`: what engines of each stage saved on each number of ranks.
All ranks have the same batches, and the mean over two or four equal gradients is exact: so engines
hold the same however they are cut. Each also loads what is made of the others' files, saves the
same again, and trains on to the same bits.
"""

import tarfile
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

import streamshard
from tests.oracle.files import file_differences
from tests.oracle.ranks import require_success, run_jobs
from tests.unpacking import unpack

Cut: TypeAlias = tuple[int, int]
"""Stage and number of ranks."""
KEPT = Path(__file__).parent / "old_saves" / "bitsandbytes.tar.xz"
STEPS, FURTHER = 3, 2
CUTS = [(2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 4)]
"""Stage 2 rounds otherwise as soon as it has to reduce."""
ALIKE = [{(2, 2), (2, 4)}, {(2, 1), (3, 1), (3, 2), (3, 4)}]
"""Those that hold the same."""
PAIRS = [(source, target) for source in CUTS for target in CUTS if source != target]
ASKEW = [(2, 8), (3, 8)]
"""Where partitions of 1,152 elements, or shards of 384, end within a block."""


class Model(nn.Module):
    """Two matrices of whole blocks in one param group, and a norm that is too small for 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96, bias=False)
        self.down = nn.Linear(96, 32, bias=False)
        self.norm = nn.LayerNorm(1024, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        """Return a loss."""
        found: Tensor = self.down(torch.relu(self.up(batch)))
        normed: Tensor = self.norm(found.reshape(1, 1024)) ** 3
        return normed.float().mean() + found.float().abs().mean()


@dataclass(frozen=True)
class Run:
    """Train, from what was saved if `load` is given, and save."""

    stage: int
    save: Path
    load: Path | None = None
    steps: int = STEPS
    reshards: bool = False
    """Whether what is loaded is cut for these ranks as it is loaded."""


def do(job: Run) -> None:
    """Do a job in this rank."""
    import deepspeed
    from bitsandbytes.optim import AdamW8bit

    from streamshard.deepspeed import load_checkpoint

    torch.manual_seed(3)
    model = Model()
    matrices = [model.up.weight, model.down.weight]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [model.norm.weight]}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": job.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = AdamW8bit(groups, lr=1e-2, weight_decay=0.0, min_8bit_size=1025)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if job.load is not None:
        load = partial(load_checkpoint, engine) if job.reshards else engine.load_checkpoint
        assert load(str(job.load))[0] is not None
    for _ in range(job.steps):
        seed = torch.Generator().manual_seed(engine.global_steps)
        engine.backward(engine(torch.randn(32, 64, generator=seed).bfloat16()))
        engine.step()
    engine.save_checkpoint(str(job.save))


def make(directory: Path, work: Path) -> None:
    """Let all engines save, load what is made of each other's files, and compare."""

    def run(jobs: list[tuple[int, Run]]) -> None:
        for world_size in sorted({ranks for ranks, _ in jobs}):
            own = [job for ranks, job in jobs if ranks == world_size]
            require_success(run_jobs(world_size, own, work / "ranks", do))

    run([(cut[1], Run(cut[0], place(directory, cut))) for cut in (*CUTS, *ASKEW)])
    run([(cut[1], Run(cut[0], place(work, cut), place(directory, cut), FURTHER)) for cut in CUTS])
    loads: list[tuple[int, Run]] = []
    for source, target in PAIRS:
        (stage, ranks), name = target, f"{source}-{target}"
        run_dir = place(directory, source)
        streamshard.repartition(
            run_dir, work / name, world_size=ranks, zero_stage=stage, verify=True
        )
        loads += [
            (ranks, Run(stage, work / f"{name}-again", work / name, 0)),
            (ranks, Run(stage, work / f"{name}-on", work / name, FURTHER)),
            (ranks, Run(stage, work / f"{name}-live", run_dir, 0, reshards=True)),
        ]
    for cut in ASKEW:
        store, name = work / f"{cut}.zarr", f"{cut}-same"
        streamshard.convert(place(directory, cut), store)
        streamshard.repartition(store, work / name)
        loads.append((cut[1], Run(cut[0], work / f"{name}-again", work / name, 0)))
    run(loads)
    for cut in ASKEW:
        again = work / f"{cut}-same-again"
        assert not (found := differences(again, place(directory, cut))), (again, found)
    for source, target in PAIRS:
        name = f"{source}-{target}"
        compared = [(work / f"{name}-{end}", work / name) for end in ("again", "live")]
        if any({source, target} <= alike for alike in ALIKE):
            compared += [(work / name, place(directory, target))]
            compared += [(work / f"{name}-on", place(work, target))]
        for one, wanted in compared:
            assert not (found := differences(one, wanted)), (one, found)


def place(directory: Path, cut: Cut) -> Path:
    """Return where what an engine saves lies."""
    return directory / f"z{cut[0]}-{cut[1]}"


def differences(one: Path, other: Path) -> list[str]:
    """List where the files of two runs differ, but for the count of samples of unlike batches."""
    found = file_differences(*(run / (run / "latest").read_text() for run in (one, other)))
    return [line for line in found if "['global_samples']" not in line]


def unpacked(directory: Path) -> Path:
    """Unpack what the engines saved."""
    unpack(KEPT, directory)
    return directory


if __name__ == "__main__":
    from tests.oracle import eight_bits

    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as scratch:
        eight_bits.make(Path(kept), Path(scratch))
        with tarfile.open(KEPT, "w:xz") as packed:
            packed.add(kept, ".")

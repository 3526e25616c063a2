"""Does a merge of the last checkpoints stand in for a decay of the learning rate?

    python -m benchmarks.merge_vs_decay

A real DeepSpeed engine on one CPU rank trains a small model on the bytes of this package's modules,
at a constant learning rate, and saves as it goes. Of the last five checkpoints merges are made.
Beside them a decayed run goes on from the first of the five, for as many steps as the constant one,
while its learning rate falls as 1 - sqrt to nothing. All losses are over the same bytes of modules
that no run has seen, and by an engine that has loaded what is asked about.
"""

import argparse
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Final, NoReturn

import deepspeed
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import streamshard
from benchmarks._measure import machine, print_table
from streamshard.demo import rank as demo

BATCH: Final = 64
CONTEXT: Final = 16
RATE: Final = 2e-3
WARMUP: Final = 50
CHECKPOINTS: Final = 5
HEAD = ("weights", "held-out loss", "of each seed", "below that seed's last checkpoint")
LAST, DECAYED = "last checkpoint, constant rate", "decayed run, 1-sqrt"
MERGES: Final = ("mean", "1-sqrt", "cosine", "ema:0.9")


class Job:
    """A training run of one seed."""

    def __init__(self, seed: int, *, trained: torch.Tensor) -> None:
        torch.manual_seed(seed)
        self._seed, self._text = seed, trained
        model = nn.Sequential(
            nn.Embedding(demo.BYTES, 32),
            nn.Flatten(),
            nn.Linear(CONTEXT * 32, 256),
            nn.GELU(),
            nn.Linear(256, 256),
            nn.GELU(),
            nn.Linear(256, demo.BYTES),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
        config = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
        }
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def train(self, step: int, rate: float) -> None:
        """Take a step; the same one sees the same bytes in any run of the seed."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        drawn = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        starts = torch.randint(len(self._text) - CONTEXT, (BATCH, 1), generator=drawn)
        self.engine.backward(self._loss(self._text[starts + torch.arange(CONTEXT + 1)]))
        self.engine.step()

    def loss(self, run: Path, tag: str | None, text: torch.Tensor) -> float:
        """Load a checkpoint, and return its loss on a text."""
        loaded, _ = self.engine.load_checkpoint(str(run), tag)
        if loaded is None:
            raise RuntimeError(f"{run}: not loaded")
        windows = text.unfold(0, CONTEXT + 1, 7)
        with torch.no_grad():
            sums = [self._loss(part).item() * len(part) for part in torch.split(windows, 4096)]
        return sum(sums) / len(windows)

    def _loss(self, samples: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.engine(samples[:, :-1]).float(), samples[:, -1])


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to train on, and those to judge by: of every tenth module."""
    modules = sorted(Path(streamshard.__file__).parent.rglob("*.py"))
    held = [path for number, path in enumerate(modules) if number % 10 == 5]
    seen = [path for number, path in enumerate(modules) if number % 10 != 5]
    first, second = (
        torch.tensor(list(b"".join(path.read_bytes() for path in some))) for some in (seen, held)
    )
    return first, second


def losses(
    seed: int, root: Path, trained: torch.Tensor, held: torch.Tensor, *, steps: int, every: int
) -> Mapping[str, float]:
    """Train, merge and decay with one seed; return all held-out losses."""
    run, job = root / f"run-{seed}", Job(seed, trained=trained)
    first = steps - (CHECKPOINTS - 1) * every
    for step in range(1, steps + 1):
        job.train(step, RATE * min(1, step / WARMUP))
        if step >= first and (steps - step) % every == 0:
            job.engine.save_checkpoint(str(run), tag=f"global_step{step}")
    found = {LAST: job.loss(run, None, held)}
    for weights in MERGES:
        out = root / f"merged-{seed}-{weights}"
        streamshard.merge(run, out, last=CHECKPOINTS, weights=weights)
        found[f"merged, {weights}"] = job.loss(out, None, held)
    job.engine.load_checkpoint(str(run), f"global_step{first}")
    for step in range(first + 1, steps + 1):
        part = (step - first) / (steps - first)
        job.train(step, RATE * (1 - math.sqrt(part)))
    job.engine.save_checkpoint(str(root / f"decayed-{seed}"), tag="decayed")
    found[DECAYED] = job.loss(root / f"decayed-{seed}", None, held)
    return found


def main() -> NoReturn:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=3000, help="steps of a run [3000]")
    parser.add_argument("--every", type=int, default=150, help="steps between saves [150]")
    parser.add_argument("--seeds", type=int, default=3, help="runs [3]")
    parser.add_argument("--short", action="store_true", help="a short form, as a check")
    given = parser.parse_args()
    steps, every, seeds = given.steps, given.every, given.seeds
    if given.short:
        steps, every, seeds = 120, 10, 1
    root = Path(tempfile.mkdtemp())
    before = Path.cwd()
    os.chdir(root)
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    demo._join_ranks()
    try:
        both = texts()
        found = [losses(seed, root, *both, steps=steps, every=every) for seed in range(seeds)]
    finally:
        os.chdir(before)
        shutil.rmtree(root)
    print(f"{machine()}\n{seeds} seeds, {steps:,} steps, the last five saves {every} apart\n")
    rows = []
    for name in found[0]:
        own, gains = [one[name] for one in found], [one[LAST] - one[name] for one in found]
        spread = f"{min(own):.3f} to {max(own):.3f}"
        gain = "" if name == LAST else f"{min(gains):.3f} to {max(gains):.3f}"
        rows.append((name, f"{mean(own):.3f}", spread, gain))
    print_table(HEAD, rows)
    os._exit(0)  # past the interpreter's teardown, where gloo's threads now and then abort


if __name__ == "__main__":
    main()

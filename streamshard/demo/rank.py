"""One rank of the demo's training; the demo starts several, in a directory that they share."""

import argparse
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy

GLOBAL_BATCH = 256
CONTEXT = 16
WIDTH = 64
HIDDEN = 512
BYTES = 256


def main() -> None:
    """Train from the first step to the last; write each step's loss to `losses.json`."""
    parser = argparse.ArgumentParser(prog="python -m streamshard.demo.rank", description=__doc__)
    parser.add_argument("--zero-stage", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--save-to")
    parser.add_argument("--load-from")
    options = parser.parse_args()

    _join_ranks()
    engine = _engine(options.zero_stage)
    if options.load_from and engine.load_checkpoint(options.load_from)[0] is None:
        sys.exit(f"DeepSpeed found no checkpoint in {options.load_from}")
    losses = {}
    for step in range(options.first, options.last + 1):
        losses[step] = _train_step(engine, step)
        if step == options.save_at:
            engine.save_checkpoint(options.save_to)
    if distributed.get_rank() == 0:
        Path("losses.json").write_text(json.dumps(losses))


def _join_ranks() -> None:
    """Meet the other ranks, the same way on any machine."""
    torch.set_num_threads(1)
    # DeepSpeed's own all-reduce for CPU is compiled on first use, under a lock that a killed
    # process leaves behind, and leaks its buffers in /dev/shm. With it off, gloo does the work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo",
        # The ranks meet at a file, as another program could occupy a port.
        init_method=f"file://{Path('rendezvous').resolve()}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=5),
    )


def _engine(zero_stage: int) -> deepspeed.DeepSpeedEngine:
    """Make a small language model, which guesses the byte after CONTEXT bytes, and its engine."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(BYTES, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, HIDDEN),
        nn.LayerNorm(HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.LayerNorm(HIDDEN),
        nn.GELU(),
        nn.Linear(HIDDEN, BYTES),
    )
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    warmup = {"warmup_max_lr": 3e-3, "warmup_num_steps": 40}
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // distributed.get_world_size(),
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": zero_stage},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _train_step(engine: deepspeed.DeepSpeedEngine, step: int) -> float:
    """Train on this rank's part of the step's batch; return the loss over the whole batch."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    samples = _batch(step).chunk(world_size)[rank]
    loss = cross_entropy(engine(samples[:, :-1]).float(), samples[:, -1])
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    distributed.all_reduce(total)
    return total.item() / world_size


def _batch(step: int) -> torch.Tensor:
    """Draw the step's samples, the same ones for any number of ranks."""
    text = "".join(f"{number} times {number} is {number**2}. " for number in range(100, 1000))
    every_byte = torch.tensor(list(text.encode()))
    seeded = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (GLOBAL_BATCH, 1), generator=seeded)
    return every_byte[starts + torch.arange(CONTEXT + 1)]


if __name__ == "__main__":
    code = 0
    try:
        main()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's teardown, where gloo's threads sometimes abort a finished process.
    os._exit(code)

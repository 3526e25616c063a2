"""Trains the demo's model on one CPU rank, if asked to with half of its weights frozen."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

import deepspeed
import torch
from torch import nn

from streamshard.demo import rank as demo


def main() -> NoReturn:
    """Train up to the last of the steps, and save at each of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save-to", type=Path, required=True)
    parser.add_argument("--save-at", type=int, nargs="+", required=True)
    parser.add_argument("--freeze", action="store_true", help="train the later layers only")
    parser.add_argument("--hidden", type=int, default=demo.HIDDEN, help="width of its layers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    given = parser.parse_args()
    demo._join_ranks()
    torch.set_num_threads(given.threads)
    engine = _engine(given.hidden, given.lr, freeze=given.freeze)
    for step in range(1, max(given.save_at) + 1):
        demo._train_step(engine, step)
        if step in given.save_at:
            engine.save_checkpoint(str(given.save_to))
    os._exit(0)  # past the interpreter's teardown, where gloo's threads now and then abort


def _engine(hidden: int, lr: float, *, freeze: bool) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    width = demo.CONTEXT * demo.WIDTH
    model = nn.Sequential(
        nn.Embedding(demo.BYTES, demo.WIDTH),
        nn.Flatten(),
        nn.Linear(width, hidden),
        nn.LayerNorm(hidden),
        nn.GELU(),
        nn.Linear(hidden, hidden),
        nn.LayerNorm(hidden),
        nn.GELU(),
        nn.Linear(hidden, demo.BYTES),
    )
    if freeze:
        model[2].requires_grad_(False)  # more than half of all weights
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        "train_batch_size": demo.GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": demo.GLOBAL_BATCH,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


if __name__ == "__main__":
    main()

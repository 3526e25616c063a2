"""A training script as users write it: it knows nothing of streamshard, nor of other world sizes.

What tests add: it logs what it does, waits at steps that it may not pass yet, and one rank may die
while it saves.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-untyped,unused-ignore]
import torch
from torch import distributed, nn

from tests.oracle.truth import Engine

GLOBAL_BATCH = 12
WIDTH = 8
CONFIG: dict[str, Any] = {
    # Sizes for 3 ranks.
    "train_batch_size": GLOBAL_BATCH,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 2000, "allgather_bucket_size": 2000},
}


def main() -> None:
    """Train from the last save to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    run = Run(options.dir)

    engine = new_engine(CONFIG)
    found = run.latest()
    _, state = engine.load_checkpoint(run.saves)
    start = 0 if state is None else state["step"]
    run.log(start=start, latest=found)
    for step in range(start + 1, options.steps + 1):
        run.wait_for_permission(step)
        run.log(step=step, loss=train(engine, step))
        if step % options.save_every == 0:
            run.save(engine, step)
    run.log(end=options.steps)
    distributed.barrier()
    distributed.destroy_process_group()


def new_engine(config: dict[str, Any]) -> Engine:
    """Make an engine of the job's model."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 19), nn.Tanh(), nn.Linear(19, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(engine: Engine, step: int) -> float:
    """Take one step on a global batch that only the number of the step decides."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    samples = torch.randn(GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    total = torch.zeros(())
    for batch in samples[rank::ranks].chunk(engine.gradient_accumulation_steps()):
        assert len(batch) == engine.train_micro_batch_size_per_gpu()
        loss = (engine(batch) - batch.sin().sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        total += loss.detach() * len(batch)
    assert engine.global_steps == step
    distributed.all_reduce(total)
    return total.item() / GLOBAL_BATCH


class Run:
    """The directory that one job, all its restarts and its test share."""

    def __init__(self, directory: Path) -> None:
        self.saves = directory / "saves"
        self._log = directory / "log.jsonl"
        self._permission = directory / "may-go-to"
        self._death = directory / "dies-in-save-of"

    def latest(self) -> str | None:
        path = self.saves / "latest"
        return path.read_text() if path.exists() else None

    def log(self, **entry: object) -> None:
        """Append a line; every rank says when it starts, rank 0 all else."""
        rank = distributed.get_rank()
        if rank == 0 or "start" in entry or "died" in entry:
            entry |= {"rank": rank, "ranks": distributed.get_world_size()}
            with self._log.open("a") as file:
                file.write(f"{json.dumps(entry)}\n")

    def wait_for_permission(self, step: int) -> None:
        """Go on when the test lets the job take this step."""
        if distributed.get_rank() == 0:
            while int(self._permission.read_text()) < step:
                time.sleep(0.02)
        distributed.barrier()

    def save(self, engine: Engine, step: int) -> None:
        """Save a checkpoint; at a step that the test names, the last rank dies in the middle."""
        last = distributed.get_world_size() - 1
        dies = self._death.exists() and self._death.read_text() == str(step)
        if dies and distributed.get_rank() == last > 0:
            engine.checkpoint_engine.save = self._die
        engine.save_checkpoint(self.saves, client_state={"step": step})
        self.log(saved=step)

    def _die(self, state: object, path: str, *_: object) -> None:
        """Write half of a file, and lose the machine when rank 0 has written its own."""
        torch.save(state, path)
        os.truncate(path, Path(path).stat().st_size // 2)
        before = self.latest()
        deadline = time.monotonic() + 10.0
        while not Path(path.replace(f"rank_{distributed.get_rank()}_", "rank_0_")).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        deadline = time.monotonic() + 1.0
        while self.latest() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        self._death.unlink()
        self.log(died=os.getpid(), before=before, latest=self.latest())
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # gloo reduces alone: nothing to compile, and nothing in /dev/shm to leave behind.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    main()

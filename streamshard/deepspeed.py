"""Resume on another number of GPUs without converting: what a training job imports.

::

    path, client_state = streamshard.deepspeed.load_checkpoint(engine, "runs/7b")

    with streamshard.deepspeed.resharding():
        trainer.train(resume_from_checkpoint=True)

    streamshard.deepspeed.load_optimizer(engine.optimizer, "ckpt/optimizer.{rank:02d}.pt")

`python -m streamshard.deepspeed train.py ARGS…` runs a script as if all of it stood under
`resharding()`.
"""

from streamshard.live.loading import LoadReport
from streamshard.live.optimizer_loads import load_optimizer
from streamshard.live.resharding_loads import load_checkpoint, resharding

__all__ = ["LoadReport", "load_checkpoint", "load_optimizer", "resharding"]

if __name__ == "__main__":
    from streamshard.live.launch import launch

    launch()

"""Resume on another number of GPUs without converting: what a training job imports.

::

    path, client_state = streamshard.deepspeed.load_checkpoint(engine, "runs/7b")

    with streamshard.deepspeed.resharding():
        trainer.train(resume_from_checkpoint=True)

`python -m streamshard.deepspeed train.py ARGS…` runs a script as if all of it stood under
`resharding()`; `--save-start DIR` before the script saves what the job is before its first step.
"""

from streamshard.live.loading import LoadReport
from streamshard.live.resharding_loads import load_checkpoint, resharding

__all__ = ["LoadReport", "load_checkpoint", "resharding"]

if __name__ == "__main__":
    from streamshard.live.launch import launch

    launch()

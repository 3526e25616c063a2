"""What the jobs of all frameworks share: the model, its data, the way the ranks report."""

import gc
import hashlib
import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import distributed
from torch.nn import functional

from tests.oracle.truth import Engine, gather_truth

Seen: TypeAlias = dict[str, Any]
"""What one rank reports; plain values."""

IMPORTS = ("accelerate", "lightning", "peft", "transformers.trainer")
"""Imported once for all ranks, before they are forked."""
VOCABULARY = 37
SAMPLES = 48
SEQUENCE = 7


class FrameworkJob(Protocol):
    """Something that the ranks of one world size do together."""

    def run(self) -> None:
        """Do it, in every rank."""


def run(job: FrameworkJob) -> None:
    job.run()


def zero_config(stage: int) -> dict[str, Any]:
    """The ZeRO section of a DeepSpeed configuration, with what users leave to the frameworks."""
    config: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": "auto",
        # DeepSpeed allocates whole buckets: its default would take gigabytes here.
        "allgather_bucket_size": 2000,
    }
    if stage == 3:
        config |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return config


def language_model() -> Any:  # noqa: ANN401
    """A GPT-2 of two layers: tied embeddings, and dropout that draws random numbers."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=14,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def samples() -> list[dict[str, torch.Tensor]]:
    """The data set, a list of samples."""
    tokens = torch.randint(
        VOCABULARY, (SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(5)
    )
    return [{"input_ids": row, "labels": row} for row in tokens]


def sample_numbers(tokens: torch.Tensor) -> list[int]:
    """Tell which samples of the data set a batch is made of."""
    known = [row["input_ids"].tolist() for row in samples()]
    return [known.index(row) for row in tokens.tolist()]


def start_generators_apart(seed: int) -> None:
    """Give every rank random numbers of its own; the frameworks seed all ranks alike."""
    torch.manual_seed(1000 * seed + distributed.get_rank())


def generator_digest(state: torch.Tensor | None = None) -> str:
    """Name a state of torch's generator, by default what it is in now."""
    state = torch.random.get_rng_state() if state is None else state
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()[:16]


def write_truth(engine: Engine, path: Path) -> None:
    """Gather what all ranks hold, and write it. A collective call."""
    truth = gather_truth(engine, {})
    if distributed.get_rank() == 0:
        truth.save(path)


def write_seen(mine: Seen, path: Path) -> None:
    """Write what every rank saw, as a list in order of the ranks. A collective call."""
    per_rank: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(per_rank, mine)
    if distributed.get_rank() == 0:
        path.write_text(json.dumps(per_rank))


@contextmanager
def framework_process() -> Iterator[None]:
    """Make the process one that ``accelerate launch`` started; afterwards leave it as it was.

    The frameworks take a machine without GPUs for one without ranks, unless their process state,
    which all of them share, was made before, and with the backend named.
    """
    environment, linear = dict(os.environ), functional.linear
    os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_DEEPSPEED": "true"}
    state: Any = importlib.import_module("accelerate.state")
    state.PartialState(backend="gloo")
    try:
        yield
    finally:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
        # Stage 3 replaces it for the whole process and never puts it back.
        functional.linear = linear
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()
    distributed.barrier()

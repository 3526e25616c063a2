"""The model, optimizer, data and client state that every case trains."""

import argparse
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import distributed, nn
from torch.nn import functional

from tests.oracle.truth import Engine

VOCABULARY = 37
WIDTH = 13
HIDDEN = 29
SEQUENCE = 7

GLOBAL_BATCH = 60
"""Samples per step at every world size: divisible by 1 to 6, so each rank has an equal slice."""


class Topology:
    """What a job is divided by beside data parallelism: a model made for it, started and fed."""

    @property
    def ranks_of_a_replica(self) -> int:
        """How many ranks next to each other see the same samples."""
        return 1

    def config(self) -> Mapping[str, Any]:
        """Return what it adds to the DeepSpeed configuration."""
        return {}

    def start(self, case: "Case", seed: int, scale: float) -> Engine:
        """Make an engine of the ranks that there are; `scale` as in `param_groups`."""
        raise NotImplementedError

    def step(self, engine: Engine, step: int) -> None:
        """Take one optimizer step on this rank's share of the global batch."""
        engine.backward(engine(self.batch(step)))
        engine.step()

    def batch(self, step: int) -> torch.Tensor:
        """Return the tokens of this rank's replica of the model in one step."""
        ranks = self.ranks_of_a_replica
        return batch_of(
            distributed.get_rank() // ranks, distributed.get_world_size() // ranks, step
        )

    def finish(self, engine: Engine) -> None:
        """Destroy the engine, and have DeepSpeed forget the groups of ranks that it was made of."""
        engine.destroy()
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        # What DeepSpeed does when all of torch's process groups are destroyed; it keeps them for as
        # long as the process lives, and takes them for those of the next engine. Older ones cannot.
        getattr(groups, "_release_process_group_references", lambda: None)()


@dataclass(frozen=True)
class Case:
    """One way to train: what a user would write into the DeepSpeed configuration."""

    name: str
    zero_stage: int
    dtype: Literal["bf16", "fp16", "fp32"]
    ds_overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Merged, key by key, over the common configuration."""
    zero_init: bool = False
    """Build the model under ``deepspeed.zero.Init`` (stage 3 only)."""
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = torch.optim.AdamW
    """Makes the optimizer of the param groups; None where the configuration names one."""
    one_group: bool = False
    """All parameters in one param group: not every optimizer survives more in DeepSpeed."""
    exclude_frozen: bool = False
    """Save with ``exclude_frozen_parameters``, load with ``load_module_strict=False``."""
    model: Callable[[], nn.Module] | None = None
    """Makes the model, where it is not a `TinyLanguageModel`."""
    topology: Topology | None = None
    """None for data parallelism alone."""
    warms_up: bool = True
    """Whether the engine gets a learning rate scheduler, if the configuration names none."""

    @property
    def keeps_scaler(self) -> bool:
        """Whether it saves a loss scaler, which BF16_Optimizer has no need of."""
        return "grad_accum_dtype" not in self.ds_overrides.get("data_types", {})

    def groups(self, model: nn.Module, scale: float) -> list[dict[str, Any]]:
        """The param groups to train; see `param_groups` for `scale`."""
        groups = param_groups(model, scale)
        if self.one_group:
            params = [param for group in groups for param in group["params"]]
            groups = [{**groups[0], "params": params}]
        return groups

    def ds_config(self) -> dict[str, Any]:
        """The DeepSpeed configuration: no entry depends on the world size."""
        config: dict[str, Any] = {
            "train_batch_size": GLOBAL_BATCH,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.5,
            "steps_per_print": 10**9,
            "zero_optimization": {
                "stage": self.zero_stage,
                # DeepSpeed allocates whole buckets: its defaults would take gigabytes here.
                "reduce_bucket_size": 2000,
                "allgather_bucket_size": 2000,
                "stage3_prefetch_bucket_size": 2000,
                # Below the matrices, above the vectors: both persistent and released parameters.
                "stage3_param_persistence_threshold": 40,
            },
        }
        if self.dtype == "bf16":
            # No data_types.grad_accum_dtype: with fp32 there, stage 1 becomes BF16_Optimizer.
            config["bf16"] = {"enabled": True}
        elif self.dtype == "fp16":
            # The first step overflows and is skipped; the scale then grows after two good steps.
            config["fp16"] = {
                "enabled": True,
                "initial_scale_power": 13,
                "loss_scale_window": 2,
                "hysteresis": 1,
            }
        if self.topology is not None:
            config = merged(config, self.topology.config())
        return merged(config, self.ds_overrides)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `over` laid over it, nested mappings key by key."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


class Block(nn.Module):
    """A residual block whose middle layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.middle = nn.Linear(HIDDEN, 19)
        self.down = nn.Linear(19, WIDTH)
        self.middle.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.middle(torch.tanh(self.up(self.norm(hidden)))))
        out: torch.Tensor = hidden + self.down(inner)
        return out


class TinyLanguageModel(nn.Module):
    """About 3,000 elements in every shape that makes partitioning awkward.

    Odd sizes, an embedding tied with the output head, frozen layers, one- and two-element
    parameters (together a param group that some ranks own nothing of), three kinds of buffers.
    """

    running: torch.Tensor
    calls: torch.Tensor
    ramp: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.rand(1) + 0.5)
        self.mix = nn.Parameter(torch.rand(2))
        self.frozen_shift = nn.Parameter(torch.rand(5), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        # Random, so that a fresh engine with another seed cannot hold the saved values by accident.
        self.register_buffer("running", torch.rand(WIDTH, dtype=torch.float32))
        self.register_buffer("calls", torch.randint(1000, (3,)))
        self.register_buffer("ramp", torch.linspace(-1, 1, SEQUENCE), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.gain
        hidden = hidden + self.mix.sum() * self.ramp.to(hidden.dtype)[:, None]
        hidden = hidden + self.running.to(hidden.dtype) + self.frozen_shift.sum()
        for block in self.blocks:
            hidden = block(hidden)
        # From the call count, not from the data: the buffers are then the same on every rank.
        self.calls += 1
        self.running.mul_(0.75).add_(0.01 * self.calls[0].to(self.running.dtype).fmod(7))
        logits = self.head(hidden).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class FullyTrainedModel(nn.Module):
    """A model in which nothing is frozen, a buffer or tied."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(1) + 0.5)
        self.mix = nn.Parameter(torch.rand(2))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.embed(tokens) * self.gain + self.mix.sum()))
        logits = self.head(self.norm(hidden)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def param_groups(model: nn.Module, scale: float = 1.0) -> list[dict[str, Any]]:
    """Three param groups that differ in every hyper-parameter; `scale` perturbs them all.

    The last one holds 3 elements, fewer than twice any world size but 1: ranks own only padding.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    scalars = [param for name, param in named if name.rpartition(".")[2] in ("gain", "mix")]
    biases = [param for name, param in named if name.endswith("bias") or ".norm." in name]
    taken = {id(param) for param in scalars + biases}
    matrices = [param for _, param in named if id(param) not in taken]
    return [
        _group("matrices", matrices, lr=3e-3 * scale, weight_decay=0.1 * scale, betas=(0.9, 0.95)),
        _group("biases", biases, lr=1e-3 * scale, weight_decay=0.0, betas=(0.8, 0.99)),
        _group("scalars", scalars, lr=2e-3 * scale, weight_decay=0.05 * scale, betas=(0.85, 0.9)),
    ]


def _group(role: str, params: list[nn.Parameter], **hyper_parameters: object) -> dict[str, Any]:
    # `role` is a key of our own: param groups carry whatever the user put there.
    return {"params": params, "role": role, **hyper_parameters}


class KernellessAdam(torch.optim.AdamW):
    """Stands in for DeepSpeed's FusedAdam, whose kernel would have to be built."""


def fused_adam_without_kernel(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An AdamW that DeepSpeed takes for its FusedAdam, for which it flattens the masters."""
    # The class of the optimizer alone decides how an engine without ZeRO wraps it.
    engine: Any = importlib.import_module("deepspeed.runtime.engine")
    engine.FusedAdam = KernellessAdam
    return KernellessAdam(groups)


def warm_up(step: int) -> float:
    """The learning-rate factor of every param group."""
    return min(1.0, (step + 1) / 7)


def global_batch(step: int) -> torch.Tensor:
    """The tokens of one step: a function of the step alone, whatever the world size."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE), generator=generator)


def batch_of(replica: int, replicas: int, step: int) -> torch.Tensor:
    """Return the tokens of one replica of the model in one step."""
    share = GLOBAL_BATCH // replicas
    return global_batch(step)[share * replica : share * (replica + 1)]


class TrainingNotes:
    """A user's own class in the client state: whoever converts the checkpoint cannot import it."""

    def __init__(self, author: str, seen: torch.Tensor) -> None:
        self.author = author
        self.seen = seen


def client_state(step: int, part: int = 0) -> dict[str, Any]:
    """What the user passes to ``save_checkpoint``: each value pickles in another way.

    `part` is the model-parallel rank: each of them keeps a generator of its own, and saves it.
    """
    generator = torch.Generator().manual_seed(step + 100 * part)
    shared = torch.arange(24, dtype=torch.float64) + step
    return {
        "epoch": step,
        "run": {"name": "first light", "tags": ["a", "b"], "nothing": None, "bounds": (1, 2.5)},
        "best_loss": np.float64(3.25 + step),
        "rows": np.arange(6, dtype=np.int32).reshape(2, 3),
        "args": argparse.Namespace(lr=3e-3, layers=2, resume=True),
        "sampler_rng": torch.randint(255, (16,), generator=generator),
        "view_head": shared[:10],
        "view_tail": shared.view(4, 6)[:, 1::2],
        "notes": TrainingNotes("someone", torch.tensor([1.5, -0.0, float("nan")])),
    }

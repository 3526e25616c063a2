"""Pipeline parallelism, alone and with tensor parallelism inside the stages."""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import distributed, nn
from torch.nn import functional

from tests.oracle.models import VOCABULARY, WIDTH, Block, Case, Topology, batch_of
from tests.oracle.topology.engine import initialize
from tests.oracle.topology.shared_block import SharedBlock
from tests.oracle.truth import Engine

# DeepSpeed has no types.
Pipe: TypeAlias = Any

STAGES = 2


@dataclass(frozen=True)
class Pipeline(Topology):
    """The layers on two stages, each on `tensor` ranks that share its matrices."""

    tensor: int = 1
    stages: int = STAGES
    extra: bool = False
    """Whether there is a third layer of the smallest parameters, so that three stages have some."""
    told: bool = False
    """Whether the ranks of a stage share one model's hidden units, and their files tell how."""
    norms: bool = False
    """Whether layers share two norms too, one of which the second stage alone has."""
    method: str = "uniform"
    """How layers are put on stages; by default as many on each."""
    micro_batches: int = 2
    """How many a step is."""
    dual: bool = False
    """Whether it is DeepSpeed's DualPipeV: each rank has two stages, of both ends of the model."""

    def config(self) -> Mapping[str, Any]:
        # Between stages a tensor is sent in as many equal parts as ranks share a stage, if not
        # told otherwise; the odd sizes here do not allow it.
        whole = {"pipe_partitioned": False, "grad_partitioned": False}
        return {"gradient_accumulation_steps": self.micro_batches, "pipeline": whole}

    def start(self, case: Case, seed: int, scale: float) -> Engine:
        pipe: Pipe = importlib.import_module("deepspeed.pipe")
        topology: Any = importlib.import_module("deepspeed.runtime.pipe.topology")
        replicas = distributed.get_world_size() // (self.stages * self.tensor)
        if self.tensor == 1 and not self.told:
            grid = topology.PipeDataParallelTopology(self.stages, replicas)
        else:
            grid = topology.PipeModelDataParallelTopology(self.stages, self.tensor, replicas)
        torch.manual_seed(seed)
        kind = pipe.DualPipeVModule if self.dual else pipe.PipelineModule
        model = kind(
            self._layers(pipe),
            topology=grid,
            loss_fn=_loss,
            partition_method=self.method,
            seed_layers=True,
            seed_fn=_seed,
            base_seed=1000 * seed,
        )
        if self.told:
            _divide(model, self.tensor)
        elif self.tensor > 1:
            _join(model)
        return initialize(case, model, self._groups(case, model, seed, scale))

    def _groups(
        self, case: Case, model: nn.Module, seed: int, scale: float
    ) -> Iterable[dict[str, Any]]:
        return case.groups(model, scale)

    def _layers(self, pipe: Pipe) -> list[object]:
        block = SharedBlock if self.told or self.tensor > 1 else Block

        def norm(key: str) -> list[object]:
            tied = {"tied_weight_attr": ["weight", "bias"]}
            return [pipe.TiedLayerSpec(key, nn.LayerNorm, WIDTH, **tied)] if self.norms else []

        return [
            pipe.TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH),
            *norm("norm"),
            pipe.LayerSpec(Scale),
            pipe.LayerSpec(block),
            _double,
            *([pipe.LayerSpec(Scale)] if self.extra else []),
            # Here the second stage begins.
            pipe.LayerSpec(block),
            pipe.LayerSpec(Scale),
            *norm("behind"),
            *norm("norm"),
            pipe.LayerSpec(nn.LayerNorm, WIDTH),
            pipe.TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=logits_of),
        ]

    def step(self, engine: Engine, step: int) -> None:
        """Take one step; the stages and ranks of a replica see the same samples."""
        grid = engine.grid
        tokens = batch_of(grid.get_data_parallel_rank(), grid.get_data_parallel_world_size(), step)
        parts = tokens.chunk(self.micro_batches)
        engine.train_batch(iter([(part, part) for part in parts]))


def _seed(seed: int) -> None:
    # DeepSpeed's own function fails where layers were counted with NumPy.
    torch.manual_seed(int(seed))


def _double(hidden: torch.Tensor) -> torch.Tensor:
    """A layer without parameters, which has no file."""
    return 2 * hidden


def logits_of(embed: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, embed.weight)


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits = logits.float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Scale(nn.Module):
    """The one- and two-element parameters, on every stage: all must have as many param groups."""

    running: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(1) + 0.5)
        self.mix = nn.Parameter(torch.rand(2))
        self.register_buffer("running", torch.rand(WIDTH))
        self.register_buffer("calls", torch.randint(1000, (3,)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        # Not the same for all features: that would be lost in the next norm, gradient and all.
        shift = self.mix.sum() * self.running.to(hidden.dtype)
        out: torch.Tensor = hidden * self.gain + shift
        return out


def _join(model: Pipe) -> None:
    """Give every shared block its group of ranks, and units of its own on each of them."""
    grid = model.mpu()
    for layer in model.modules():
        if isinstance(layer, SharedBlock):
            layer.group = grid.get_slice_parallel_group()
            with torch.no_grad():
                layer.up.weight.mul_(1 + grid.get_slice_parallel_rank())
                layer.down.weight.div_(3 + grid.get_slice_parallel_rank())


def _divide(model: Pipe, ranks: int) -> None:
    """Give each rank of a stage its part of the hidden units, and tell the engine how."""
    grid = model.mpu()
    for layer in model.modules():
        if isinstance(layer, SharedBlock):
            layer.group = grid.get_slice_parallel_group() if ranks > 1 else None
            cuts = ((layer.up, "weight", 0), (layer.up, "bias", 0), (layer.down, "weight", 1))
            for held, name, dimension in cuts:
                whole = getattr(held, name).detach()
                own = whole.tensor_split(ranks, dimension)[grid.get_slice_parallel_rank()]
                setattr(held, name, nn.Parameter(own.clone()))
                # So that the norm for clipping counts the gradients of all ranks.
                getattr(held, name).tensor_model_parallel = True
    if ranks > 1:
        # As Megatron does, which gives it to `save_checkpoint` in its client state.
        model.universal_checkpoint_info = CUT


CUT = {
    "tp_replicated_parameter_patterns": [
        r"tied_modules\.embed\.weight",
        r"\d+\.gain",
        r"\d+\.mix",
        r"\d+\.norm\.weight",
        r"\d+\.norm\.bias",
        r"\d+\.weight",
        r"\d+\.bias",
    ],
    "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
}
"""What is not in the lists is cut along its first dimension."""

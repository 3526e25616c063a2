"""DeepSpeed's rarer features, each as far as it runs on CPU.

Where DeepSpeed asks for a GPU, a stand-in does what the GPU would, and nothing that decides what is
saved. Runs inside every rank.
"""

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from tests.oracle.cases import BF16, Resharding
from tests.oracle.models import (
    GLOBAL_BATCH,
    SEQUENCE,
    Block,
    Case,
    TinyLanguageModel,
    global_batch,
)
from tests.oracle.odd_engines import quantizer
from tests.oracle.topology.engine import batch_of, finish, initialize
from tests.oracle.truth import Engine

SAMPLES = 10 * GLOBAL_BATCH
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Feature:
    """Data parallelism with one of the rarer features switched on."""

    overrides: Config = field(default_factory=dict, hash=False)
    stand_in: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, hash=False)
    drops_tokens: bool = False
    """Wrap the blocks in what random-LTD drops tokens with."""
    has_dataset: bool = False
    """Draw the batches from DeepSpeed's own loader."""

    def config(self) -> Config:
        """Return what switches the feature on."""
        return self.overrides

    def start(self, case: Case, seed: int, scale: float) -> Engine:
        """Make an engine, and what the feature needs besides."""
        stand_ins = ExitStack()
        stand_ins.enter_context(self.stand_in())
        torch.manual_seed(seed)
        model = (case.model or TinyLanguageModel)()
        data = {"training_data": Samples()} if self.has_dataset else {}
        engine = initialize(case, model, case.groups(model, scale), **data)
        engine.stand_ins = stand_ins
        return engine

    def step(self, engine: Engine, step: int) -> None:
        """Take one step on this rank's share of the batch."""
        self._before_step(engine)
        if self.has_dataset:
            if not hasattr(engine, "batches"):  # only now, as loading sets the sampler
                engine.batches = iter(engine.training_dataloader)
            tokens = next(engine.batches)
        else:
            tokens = batch_of(distributed.get_rank(), distributed.get_world_size(), step)
        engine.backward(engine(tokens))
        engine.step()

    def _before_step(self, engine: Engine) -> None:
        """Do what is to be done between loading, if there is any, and training."""
        for param in engine.module.parameters():
            # DeepSpeed 0.19.8 goes on with the copies of frozen weights that hpZ made before.
            if not param.requires_grad and hasattr(param, "ds_secondary_tensor"):
                param.ds_secondary_tensor = None
        if self.drops_tokens and not hasattr(engine, "drops_tokens"):
            routing = "deepspeed.runtime.data_pipeline.data_routing"
            importlib.import_module(f"{routing}.helper").convert_to_random_ltd(engine, Block)
            engine.drops_tokens = True

    def finish(self, engine: Engine) -> None:
        """End the engine."""
        finish(engine)
        engine.stand_ins.close()


class Samples(torch.utils.data.Dataset[Tensor]):
    """Samples that DeepSpeed's sampler chooses from."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return global_batch(index // GLOBAL_BATCH)[index % GLOBAL_BATCH]


class Nothing(nn.Module):
    """Parameters of no elements."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)


class WithNothing(TinyLanguageModel):
    """A model with a parameter of no elements, which it does not compute with.

    DeepSpeed 0.19.8 cannot gather it at stage 3.
    """

    shapes: tuple[tuple[int, ...], ...] = ((0, 5),)

    def __init__(self) -> None:
        super().__init__()
        self.nothing = Nothing(*self.shapes)


class WithNothings(WithNothing):
    """A model with several such, of which one is frozen."""

    shapes = ((0, 5), (0,), (3, 0))

    def __init__(self) -> None:
        super().__init__()
        self.nothing.params[2].requires_grad_(False)


class AddsNothing(WithNothing):
    """A model that computes with its parameter of no elements."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss, to which it adds nothing."""
        loss: Tensor = super().forward(tokens) + self.nothing.params[0].sum()
        return loss


class ScaledBlock(Block):
    """A block with a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(1) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """Scale what a block returns."""
        scaled: Tensor = super().forward(hidden) * self.scale.to(hidden.dtype)
        return scaled


class DropsTokens(TinyLanguageModel):
    """A model whose blocks, of which random-LTD drops tokens, have buffers and share a weight."""

    def __init__(self) -> None:
        super().__init__()
        first, second = ScaledBlock(), ScaledBlock()
        second.up.weight = first.up.weight
        self.blocks = nn.ModuleList([first, second])


class Even(nn.Module):
    """A model whose parameters can be quantised wherever they are cut among 1, 2 or 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.up = nn.Linear(32, 64)
        self.gain = nn.Parameter(torch.rand(64) + 0.5)
        self.head = nn.Linear(64, 40, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from the one before it."""
        hidden = self.up(torch.tanh(self.frozen(self.embed(tokens)))) * self.gain
        logits = self.head(hidden).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def group_by_group(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW that is given its later param groups one by one."""
    optimizer = torch.optim.AdamW(groups[:1])
    for group in groups[1:]:
        optimizer.add_param_group(group)
    return optimizer


def curriculum(clusters: Path) -> Feature:
    """Make DeepSpeed's sampler choose the samples, by one metric."""
    metrics = {
        "seqlen": {
            "difficulty_type": "value",
            "clustering_type": "single_cluster",
            "min_difficulty": 2,
            "max_difficulty": SEQUENCE,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 1},
        }
    }
    sampling = {
        "enabled": True,
        "num_epochs": 5,
        "num_workers": 0,
        "curriculum_learning": {
            "enabled": True,
            "data_cluster_path": str(clusters),
            "curriculum_metrics": metrics,
        },
    }
    # What is off stands there, as DeepSpeed writes it into the config that it saves.
    routing = {"enabled": False, "random_ltd": {"enabled": False}}
    efficiency = {"enabled": True, "seed": 5, "data_sampling": sampling, "data_routing": routing}
    return Feature({"data_efficiency": efficiency}, has_dataset=True)


def random_ltd() -> Feature:
    """Schedule random layer token dropping, so early that nothing is dropped yet.

    To drop tokens it needs CUDA kernels.
    """
    dropping = {
        "enabled": True,
        "total_layer_num": 2,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [0, 1],
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": SEQUENCE,
            "max_value": 3 * SEQUENCE,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 10, "seq_per_step": 1},
        },
    }
    routing = {"enabled": True, "random_ltd": dropping}
    sampling = {"enabled": False, "curriculum_learning": {"enabled": False}}
    efficiency = {"enabled": True, "data_sampling": sampling, "data_routing": routing}
    return Feature({"data_efficiency": efficiency}, drops_tokens=True)


def zero(**settings: object) -> Config:
    """Configure ZeRO."""
    return {"zero_optimization": settings}


def writer(**settings: object) -> Config:
    """Configure a checkpoint writer that needs no library for asynchronous input and output."""
    return {"checkpoint": {"writer": {"type": "python", **settings}}}


def cases(clusters: Path) -> list[Resharding]:
    """List what is trained on 4 ranks, and what resumes from that on 2.

    Parameters
    ----------
    clusters
        Where DeepSpeed's sampler may keep files of its own.
    """

    def at(stage: int, name: str, feature: Feature | None = None, **more: Any) -> Case:  # noqa: ANN401
        return Case(f"z{stage}-{name}", stage, "bf16", topology=feature, **more)

    hpz = at(3, "hpz", Feature(zero(zero_hpz_partition_size=2)))
    zeropp = Feature(
        zero(
            zero_hpz_partition_size=2,
            zero_quantized_weights=True,
            zero_quantized_gradients=True,
        ),
        stand_in=quantizer,
    )
    nothing = {stage: at(stage, "nothing", model=WithNothing) for stage in (1, 2, 3)}
    later = [at(stage, "later-groups", optimizer=group_by_group) for stage in (2, 3)]
    curricula = [at(stage, "curriculum", curriculum(clusters / str(stage))) for stage in (2, 3)]
    dropping = [at(stage, "random-ltd", random_ltd(), model=DropsTokens) for stage in (2, 3)]
    even = partial(at, model=Even)
    by_all, apart = writer(data_parallel="replica"), writer(decoupled=True)
    nothings = [at(stage, "nothings", model=WithNothings) for stage in (2, 3)]
    unchanged = [
        hpz,
        even(3, "zeropp", zeropp),
        nothing[3],
        *nothings,
        at(2, "adds-nothing", model=AddsNothing),
        *later,
        curricula[1],
        dropping[1],
    ]
    changed = [
        (hpz, BF16[1]),
        (nothing[1], nothing[2]),
        (nothing[2], nothing[3]),
        (nothing[3], nothing[2]),
        (nothings[0], nothings[1]),
        (curricula[0], curricula[1]),
        (dropping[0], dropping[1]),
        # DeepSpeed's own engines for them load with torch's default, which refuses client state.
        (even(2, "written-by-all", ds_overrides=by_all), even(2, "even")),
        (at(3, "python-writer", ds_overrides=writer()), BF16[2]),
        (even(3, "decoupled", ds_overrides=apart), even(3, "even")),
    ]
    return [
        *(Resharding(case, 4, 2) for case in unchanged),
        *(Resharding(case, 4, 2, resume=other) for case, other in changed),
    ]

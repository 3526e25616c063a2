"""DeepSpeed's rarer features, each as far as it runs on CPU.

Where DeepSpeed asks for a GPU, a stand-in does what the GPU would, and nothing that decides what is
saved. Runs inside every rank.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from tests.oracle.jobs import start_engine
from tests.oracle.models import (
    GLOBAL_BATCH,
    SEQUENCE,
    VOCABULARY,
    Block,
    Case,
    FullyTrainedModel,
    TinyLanguageModel,
    Topology,
    global_batch,
    merged,
    param_groups,
)
from tests.oracle.reshardings import Resharding
from tests.oracle.truth import Engine

ROOM = 16
"""Width of models with matrices that can be quantised, or shared out."""
SAMPLES = 10 * GLOBAL_BATCH
Config = Mapping[str, Any]


class Named(Case):
    """All parameters in a group with a name, by which DeepSpeed splits groups of experts."""

    def groups(self, model: nn.Module, scale: float) -> list[dict[str, Any]]:
        return [{"name": "all", "params": [*model.parameters()]}]


class CastByHand(Case):
    """A model that is cast before, as `from_pretrained` does it; the config does not say so."""

    def ds_config(self) -> dict[str, Any]:
        return {k: v for k, v in super().ds_config().items() if k not in ("bf16", "fp16")}


@dataclass(frozen=True)
class Feature(Topology):
    """Data parallelism with one of the rarer features switched on."""

    overrides: Config = field(default_factory=dict, hash=False)
    stand_in: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, hash=False)
    saving: Callable[[Engine], AbstractContextManager[object]] = field(
        default=nullcontext, hash=False
    )
    """What is done to the engine while it saves."""
    drops_tokens: bool = False
    """Wrap the blocks in what random-LTD drops tokens with."""
    has_dataset: bool = False
    """Draw the batches from DeepSpeed's own loader."""

    def config(self) -> Config:
        return self.overrides

    def start(self, case: Case, seed: int, scale: float) -> Engine:
        """Make an engine, and what the feature needs besides."""
        stand_ins = ExitStack()
        stand_ins.enter_context(self.stand_in())
        plain = replace(case, topology=None, ds_overrides=merged(self.overrides, case.ds_overrides))
        data = {"training_data": Samples()} if self.has_dataset else {}
        engine = start_engine(plain, seed, scale, **data)
        engine.stand_ins = stand_ins
        save = engine.save_checkpoint

        def save_checkpoint(*args: object, **kwargs: object) -> None:
            with self.saving(engine):
                save(*args, **kwargs)

        engine.save_checkpoint = save_checkpoint
        return engine

    def step(self, engine: Engine, step: int) -> None:
        """Take one step on this rank's share of the batch."""
        self._before_step(engine)
        if self.has_dataset:
            if not hasattr(engine, "batches"):  # only now, as loading sets the sampler
                engine.batches = iter(engine.training_dataloader)
            tokens = next(engine.batches)
        else:
            tokens = self.batch(step)
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
        super().finish(engine)
        engine.stand_ins.close()


class Pauses(Feature):
    """A parameter is frozen as soon as it is wrapped: DeepSpeed saves it as trained and as frozen.

    So one trains in turns, as no parameter can be added later.
    """

    def start(self, case: Case, seed: int, scale: float) -> Engine:
        engine = super().start(case, seed, scale)
        dict(engine.module.named_parameters())["blocks.0.up.weight"].requires_grad_(False)
        return engine


class Samples(torch.utils.data.Dataset[Tensor]):
    """Samples that DeepSpeed's sampler chooses from."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return global_batch(index // GLOBAL_BATCH)[index % GLOBAL_BATCH]


class WithNothing(TinyLanguageModel):
    """A model with a parameter of no elements, which it does not compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.ParameterList([nn.Parameter(torch.empty(0, 5))])


class ScaledBlock(Block):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(1) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        scaled: Tensor = super().forward(hidden) * self.scale.to(hidden.dtype)
        return scaled


class DropsTokens(TinyLanguageModel):
    """A model whose blocks, of which random-LTD drops tokens, have buffers and share a weight."""

    def __init__(self) -> None:
        super().__init__()
        first, second = ScaledBlock(), ScaledBlock()
        second.up.weight = first.up.weight
        self.blocks = nn.ModuleList([first, second])


class Repeats(TinyLanguageModel):
    """A model that holds a buffer and a block twice, of which DeepSpeed lists the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[0]])
        table = nn.Module()
        table.register_buffer("angles", torch.rand(SEQUENCE))
        self.tables = nn.ModuleList([table, table])


@dataclass(frozen=True)
class Repeated(Resharding):
    """A job of `Repeats`."""

    def is_known(self, line: str) -> bool:
        """What DeepSpeed leaves out of its list of ties is in it."""
        return "['shared_params']['blocks.1." in line and line.endswith("missing on the right")


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
        hidden = self.up(torch.tanh(self.frozen(self.embed(tokens)))) * self.gain
        return loss_of(self.head(hidden), tokens)


class LowRank(nn.Module):
    """A model whose middle is DeepSpeed's low-rank update of a weight that the ranks share out."""

    def __init__(self) -> None:
        super().__init__()
        linear: Any = importlib.import_module("deepspeed.linear")
        config = linear.LoRAConfig(lora_r=4, base_weight_sharding=distributed.get_world_size())
        self.embed = nn.Embedding(VOCABULARY, ROOM)
        self.q_proj = linear.OptimizedLinear(
            ROOM, 24, lora_config=config, dtype=torch.bfloat16, device="cpu"
        )
        self.out = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of(self.out(self.q_proj(self.embed(tokens))), tokens)


class HalfFrozen(nn.Module):
    """A model with a frozen matrix of a size that can be quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, ROOM)
        self.middle = nn.Linear(ROOM, ROOM, bias=False)
        self.middle.requires_grad_(False)
        self.out = nn.Linear(ROOM, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return loss_of(self.out(self.middle(self.embed(tokens))), tokens)


class InBf16(TinyLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


class InFp16(TinyLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.half()


class InTwoDtypes(FullyTrainedModel):
    """A model with a param group in bf16 and two in fp32."""

    def __init__(self) -> None:
        super().__init__()
        for param in param_groups(self)[0]["params"]:
            param.data = param.data.bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = self.embed(tokens) * self.gain + self.mix.sum()
        hidden = torch.tanh(functional.linear(inputs, self.up.weight.float(), self.up.bias))
        scale, bias = self.norm.weight.float(), self.norm.bias
        hidden = functional.layer_norm(hidden, scale.shape, scale, bias)
        return loss_of(functional.linear(hidden, self.head.weight.float()), tokens)


def experts() -> nn.Module:
    """Make a tiny model of Hugging Face with experts, where AutoEP looks for them."""
    transformers: Any = importlib.import_module("transformers")
    sizes = {"hidden_size": ROOM, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(vocab_size=VOCABULARY, **sizes, **heads)
    model: Any = transformers.MixtralForCausalLM(config)
    forward = model.forward
    model.forward = lambda tokens: forward(input_ids=tokens, labels=tokens).loss
    return model  # type: ignore[no-any-return]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def group_by_group(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW that is given its later param groups one by one."""
    optimizer = torch.optim.AdamW(groups[:1])
    for group in groups[1:]:
        optimizer.add_param_group(group)
    return optimizer


@contextmanager
def a_group_more(engine: Engine) -> Iterator[None]:
    """Add a param group to the optimizer that ZeRO has wrapped, and for a time only.

    Below stage 3 DeepSpeed cannot even destroy an engine that has one.
    """
    wrapped = engine.optimizer.optimizer
    frozen = [param for param in engine.module.parameters() if not param.requires_grad]
    wrapped.add_param_group({"params": frozen, "role": "late"})
    yield
    del wrapped.param_groups[-1]


class _Quantizer:
    """DeepSpeed's CUDA kernels, as far as they are called."""

    Symmetric = None

    def quantize(self, weights: Tensor, groups: int, *rest: object) -> tuple[Tensor, Tensor]:
        rows = weights.float().view(groups, -1)
        scales = rows.abs().amax(1, keepdim=True).clamp_min(1e-9) / 127
        return (rows / scales).round().to(torch.int8).view(weights.shape), scales.flatten()

    def dequantize(self, numbers: Tensor, scales: Tensor, groups: int, *rest: object) -> Tensor:
        rows = numbers.view(groups, -1).float() * scales.view(groups, 1)
        return rows.half().view(numbers.shape)


@contextmanager
def quantizer() -> Iterator[None]:
    place: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.CUDAQuantizer, "quantizer_cuda_module", _Quantizer())
        yield


@contextmanager
def without_recorders() -> Iterator[None]:
    """Leave out a part of AutoEP that has to do with outputs, which this transformers breaks."""
    place: Any = importlib.import_module("deepspeed.module_inject.auto_ep_presets.base")
    with pytest.MonkeyPatch.context() as patch:
        name = "_retarget_transformers_output_recorders_for_modules"
        patch.setattr(place, name, lambda *args, **kwargs: None)
        yield


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

    zeropp = Feature(
        zero(
            zero_hpz_partition_size=2,
            zero_quantized_weights=True,
            zero_quantized_gradients=True,
        ),
        stand_in=quantizer,
    )
    nothing = {stage: at(stage, "nothing", model=WithNothing) for stage in (2, 3)}
    later = [at(stage, "later-groups", optimizer=group_by_group) for stage in (2, 3)]
    paused = {stage: at(stage, "paused", Pauses()) for stage in (1, 2, 3)}
    repeats = [at(stage, "repeats", model=Repeats) for stage in (2, 3)]
    dropping = [at(stage, "random-ltd", random_ltd(), model=DropsTokens) for stage in (2, 3)]
    even = partial(at, model=Even)
    by_all, apart = writer(data_parallel="replica"), writer(decoupled=True)
    cast = partial(CastByHand, dtype="bf16", model=InBf16)
    half = partial(CastByHand, dtype="fp16", model=InFp16)
    aligned = zero(parameter_alignment=True)
    by_hand = cast("z2-cast-by-hand", 2), cast("z2-cast-and-aligned", 2, ds_overrides=aligned)
    halves = [half(f"z{stage}-half-by-hand", stage) for stage in (2, 3)]
    unchanged = [
        CastByHand("z2-two-dtypes", 2, "bf16", aligned, model=InTwoDtypes),
        even(3, "zeropp", zeropp),
        *later,
        at(3, "curriculum", curriculum(clusters)),
    ]
    changed = [
        by_hand,
        (halves[0], halves[1]),
        (nothing[3], nothing[2]),
        (paused[2], paused[3]),
        (paused[3], paused[1]),
        (dropping[0], dropping[1]),
        # DeepSpeed's own engines for them load with torch's default, which refuses client state.
        (even(2, "written-by-all", ds_overrides=by_all), even(2, "even")),
        (even(3, "decoupled", ds_overrides=apart), even(3, "even")),
    ]
    return [
        *(Resharding(case, 4, 2) for case in unchanged),
        *(Resharding(case, 4, 2, resume=other) for case, other in changed),
        Repeated(repeats[0], 4, 2, resume=repeats[1]),
        Repeated(repeats[1], 4, 3),
    ]

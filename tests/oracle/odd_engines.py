"""Engines whose checkpoints hold what cannot be resharded, as far as they run on CPU.

Where DeepSpeed asks for a GPU, a stand-in does what the GPU would, and nothing that decides what is
saved. Runs inside every rank.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from tests.oracle.models import (
    GLOBAL_BATCH,
    VOCABULARY,
    Case,
    TinyLanguageModel,
    global_batch,
    param_groups,
)
from tests.oracle.truth import Engine

WIDTH = 16
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Odd:
    """Train an engine and save, perhaps from what another one saved."""

    case: Case
    save_dir: Path
    model: Callable[[], nn.Module] = TinyLanguageModel
    stand_in: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, hash=False)
    saving: Callable[[Engine], AbstractContextManager[object]] = field(
        default=nullcontext, hash=False
    )
    """What is done to the engine while it saves."""
    steps: int = 3
    load_dir: Path | None = None
    load_options: tuple[tuple[str, object], ...] = ()


def run(job: Odd) -> None:
    """Do a job in this rank."""
    torch.manual_seed(11 if job.load_dir is None else 77)
    with job.stand_in():
        engine = _start(job.case, job.model())
        if job.load_dir is not None:
            path, _ = engine.load_checkpoint(str(job.load_dir), **dict(job.load_options))
            assert path is not None
        for step in range(engine.global_steps, engine.global_steps + job.steps):
            _step(engine, step)
        with job.saving(engine):
            engine.save_checkpoint(str(job.save_dir))
        engine.destroy()
    distributed.barrier()


@dataclass(frozen=True)
class WholeDump:
    """Train without ZeRO, or load one rank's dump, and dump each rank's optimizer."""

    case: Case
    template: str
    load: Path | None = None
    """The one file that every rank loads."""


def dump_whole(job: WholeDump) -> None:
    """Do such a job in this rank."""
    torch.manual_seed(11 if job.load is None else 77)
    engine = _start(job.case, TinyLanguageModel())
    if job.load is None:
        for step in range(3):
            _step(engine, step)
    else:
        engine.optimizer.load_state_dict(torch.load(job.load))
    path = Path(job.template.format(rank=distributed.get_rank()))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(engine.optimizer.state_dict(), path)
    engine.destroy()
    distributed.barrier()


def _start(case: Case, model: nn.Module) -> Engine:
    deepspeed: Any = importlib.import_module("deepspeed")
    groups = _groups(model)
    optimizer = None if case.optimizer is None else case.optimizer(groups)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=groups if optimizer is None else None,
        config=case.ds_config(),
        dist_init_required=False,
    )
    return engine


def _groups(model: nn.Module) -> Groups:
    if isinstance(model, TinyLanguageModel):
        return param_groups(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    return [{"name": "all", "params": trained}]  # DeepSpeed splits groups of experts by name


def _step(engine: Engine, step: int) -> None:
    per_rank = GLOBAL_BATCH // distributed.get_world_size()
    start = per_rank * distributed.get_rank()
    engine.backward(engine(global_batch(step)[start : start + per_rank]))
    engine.step()


class LowRank(nn.Module):
    """A model whose middle is DeepSpeed's low-rank update of a weight that the ranks share out."""

    def __init__(self) -> None:
        super().__init__()
        linear: Any = importlib.import_module("deepspeed.linear")
        config = linear.LoRAConfig(lora_r=4, base_weight_sharding=distributed.get_world_size())
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.q_proj = linear.OptimizedLinear(
            WIDTH, 24, lora_config=config, dtype=torch.bfloat16, device="cpu"
        )
        self.out = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from the one before it."""
        return _loss(self.out(self.q_proj(self.embed(tokens))), tokens)


class HalfFrozen(nn.Module):
    """A model with a frozen matrix of a size that can be quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle.requires_grad_(False)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from the one before it."""
        return _loss(self.out(self.middle(self.embed(tokens))), tokens)


def experts() -> nn.Module:
    """Make a tiny model of Hugging Face with experts, where AutoEP looks for them."""
    transformers: Any = importlib.import_module("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(vocab_size=VOCABULARY, **sizes, **heads)
    model: Any = transformers.MixtralForCausalLM(config)
    forward = model.forward
    model.forward = lambda tokens: forward(input_ids=tokens, labels=tokens).loss
    return model  # type: ignore[no-any-return]


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@contextmanager
def a_device_beside_the_cpu() -> Iterator[None]:
    """Give the accelerator another name than the CPU's, by which Twin-Flow tells them apart."""
    accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "_name", "cpu:0")
        yield


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


class _Gathered:
    """A gather that is over."""

    def wait(self) -> None:
        """Return at once."""


@contextmanager
def gathers_without_coalescing() -> Iterator[None]:
    """Gather one tensor after the other, as gloo cannot gather many at once for MiCS."""
    comm: Any = importlib.import_module("deepspeed.comm")

    def one_by_one(
        outputs: list[Tensor],
        inputs: list[Tensor],
        group: Any = None,  # noqa: ANN401
        **rest: object,
    ) -> _Gathered:
        for whole, part in zip(outputs, inputs, strict=True):
            distributed.all_gather_into_tensor(whole, part, group=group)
        return _Gathered()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_gather_coalesced", one_by_one)
        yield


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
    """Quantise on the CPU."""
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

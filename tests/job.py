"""What a fabricated training job holds, and the classes that its files name.

Every value is a function of its state's and parameter's name and of its position, so that a test
knows what belongs where.
"""

import enum
import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

STEP = 7
TAG = f"global_step{STEP}"
STATES = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
LOCAL_EXPERTS = 2


def local_experts(count: int) -> Shapes:
    """Return what a rank has of a layer of experts; every expert rank counts its own from 0."""
    return tuple(
        (f"moe.deepspeed_moe.experts.deepspeed_experts.{local}.{name}", shape)
        for local in range(count)
        for name, shape in (("weight", (3, 4)), ("bias", (5,)))
    )


EXPERTS: Shapes = local_experts(LOCAL_EXPERTS)


class ZeroStageEnum(int, enum.Enum):
    """Stands in for DeepSpeed's."""

    optimizer_states = 1
    gradients = 2
    weights = 3

    def __reduce_ex__(self, protocol: object) -> tuple[type["ZeroStageEnum"], tuple[int]]:
        """Pickle it as all versions of Python do but 3.11.0 to 3.11.3."""
        return type(self), (self.value,)


@dataclass
class fragment_address:
    numel: int
    start: int


old_fragment_address = make_dataclass("fragment_address", ["numel", "start"])
"""Stands in for the same class at its place until 0.7.3."""


class LossScaler:
    def __init__(self, scale: float) -> None:
        self.cur_scale = scale
        self.dynamic = False


class Keepsake:
    """Stands for a class of the training script, which no other machine can import."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401
        self.value = value


_PLACES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment": fragment_address,
    "deepspeed.runtime.bf16_optimizer": old_fragment_address,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "training_script_of_somebody": Keepsake,
}


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let pickle find the stand-ins under the names that real files hold."""
    modules = {part: types.ModuleType(part) for part in ("deepspeed", *_PLACES)}
    before = {name: sys.modules.get(name) for name in modules}
    for name, kind in _PLACES.items():
        kind.__module__ = name
        setattr(modules[name], kind.__name__, kind)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and how ZeRO was told to cut it."""

    stage: int = 2
    world_size: int = 2
    """Data-parallel ranks."""
    groups: tuple[Shapes, ...] = (
        (("embed.weight", (11, 4)), ("block.0.attn.weight", (6, 5)), ("block.0.mlp", (3, 2, 4))),
        (("embed.bias", (1,)), ("block.0.bias", (7,)), ("block.1.bias", (2,))),
    )
    frozen: Shapes = (("old.weight", (5, 3)), ("old.bias", (1,)))
    paused: tuple[str, ...] = ()
    """Trained parameters that are frozen when the job saves, and so saved as both."""
    tied: Mapping[str, str] = field(default_factory=lambda: {"head.weight": "embed.weight"})
    dtype: torch.dtype = torch.bfloat16
    round_robin: bool = False
    alignment: bool = False
    sub_group_size: int = 1_000_000_000
    client_state: Mapping[str, Any] = field(default_factory=dict)
    config: bool = True
    """Whether the files keep the job's config."""
    garbage: bool = True
    """Whether stage 3's padding holds what was in memory, as it does, or zeros, as ours does."""
    parts: int = 1
    """Tensor parallel parts of the model: alike in all but the values."""
    part: int = 0
    """The one that is spoken of."""
    experts: Shapes = ()
    """Parameters of the experts that one rank holds: another param group, below stage 3."""
    expert_parallel: int = 1
    data_before_experts: bool = False
    max_group: int = 10**9
    """Elements of a rank's experts above which their param group is divided."""
    rates: str = ""
    """Key under which the scheduler has a learning rate for each param group, if it has them."""
    muon: tuple[int, ...] = ()
    """Param groups that Muon trains; their momentum is kept in 16 bits."""
    offload: bool = False
    """Whether the optimizer's states are kept off the device, where momentum is cut."""
    step: int = STEP
    """After which it is saved; its states have other values after another one."""
    changed: tuple[str, str, int] | None = None
    """(state, parameter, index) of an element that is greater than it should be."""
    changed_by: float = 1

    @property
    def cut_groups(self) -> tuple[Shapes, ...]:
        """All param groups, those of experts included."""
        parts: list[Shapes] = []
        for name, shape in self.experts:
            held = sum(prod(other) for _, other in parts[-1]) if parts else 0
            if not parts or held + prod(shape) > self.max_group:
                parts.append(())
            parts[-1] += ((name, shape),)
        return (*self.groups, *parts)

    def rate(self, group: int) -> float:
        """Return a group's learning rate; experts were in the last group before they had own."""
        return 0.001 * (1 + min(group, len(self.groups) - 1))

    @property
    def experts_of_rank(self) -> int:
        return len(self.experts) // 2

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for group in self.cut_groups for name, shape in group}

    def sharers(self, group: int) -> int:
        """Count the ranks that a group is cut among."""
        return self.world_size // (self.expert_parallel if group >= len(self.groups) else 1)

    @property
    def unit(self) -> int:
        """Ranks that one whole copy of the model takes."""
        return self.parts * self.expert_parallel

    def place(self, group: int, rank: int) -> tuple[int, int]:
        """Tell which experts a rank has of a group, and its place among those that share them."""
        sharers = self.sharers(group)
        if self.data_before_experts:
            return divmod(rank, sharers)
        place, expert_rank = divmod(rank, self.world_size // sharers)
        return expert_rank, place

    def in_model(self, name: str, expert_rank: int) -> str:
        """Name an expert's parameter by the expert's number in the model."""
        for local in range(self.experts_of_rank):
            if f".{local}." in name and "experts" in name:
                return name.replace(f".{local}.", f".{local + expert_rank * self.experts_of_rank}.")
        return name

    def values(self, state: str, name: str, expert_rank: int = 0) -> Tensor:
        """Make a state of a trained parameter, or of a frozen one."""
        shape = {**self.shapes, **dict(self.frozen)}[name]
        seed = f"{self.part}/{state}" if self.part else state
        if self.step != STEP and state != "frozen":
            seed = f"{seed}@{self.step}"
        made = values(seed, self.in_model(name, expert_rank), shape)
        if self.changed is not None and self.changed[:2] == (state, name):
            made.view(-1)[self.changed[2]] += self.changed_by
        return made

    def stored_order(self, group: int) -> list[str]:
        """Names of a group's parameters in the order in which a flat group holds them."""
        names = [name for name, _ in self.cut_groups[group]]
        if not self.round_robin:
            return names
        ranks = self.sharers(group)
        return [name for rank in range(ranks) for name in names[rank::ranks]]


def values(state: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Make a state of a parameter: floats that no other element of any tensor has."""
    seed = zlib.crc32(f"{state}/{name}".encode())
    numbers = (torch.arange(prod(shape), dtype=torch.int64) * 7919 + seed) % 8_388_593
    return (numbers.to(torch.float32) / 4096 - 1024).reshape(shape)


_MATRICES: Shapes = (("wide", (9, 8)), ("up.0", (5, 3)), ("up.1", (5, 3)), ("down", (3, 7)))
MUON = Job(
    world_size=4, groups=(_MATRICES, (("pair", (1, 2)),), (("bias", (7,)),)), muon=(0, 1), tied={}
)
"""The first group has its matrices as Muon sorts them."""
TENSOR = Job(world_size=3, parts=2)
EXPERT = Job(world_size=4, experts=EXPERTS, expert_parallel=2)
JOBS = {
    "tensor-1": replace(TENSOR, stage=1),
    "tensor-2": TENSOR,
    "tensor-3": replace(TENSOR, stage=3, sub_group_size=20),
    "tensor-round-robin": replace(TENSOR, round_robin=True),
    "expert-1": replace(EXPERT, stage=1),
    "expert-2": EXPERT,
    "expert-3-ranks": replace(EXPERT, world_size=6, expert_parallel=3),
    "expert-everywhere": replace(EXPERT, expert_parallel=4),
    "expert-data-first": replace(EXPERT, data_before_experts=True),
    "expert-round-robin": replace(EXPERT, round_robin=True, alignment=True),
    "expert-tensor": replace(EXPERT, parts=2),
}
"""Jobs in tensor parallel parts, and with experts."""
LEAN = Job(groups=((("embed.weight", (11, 4)),),), frozen=(("old", (3,)),), tied={})
"""Has a tensor of each kind, for where each one costs requests."""


def buffers() -> dict[str, Tensor]:
    """Make the module's buffers, of several dtypes; one is a scalar, one is empty."""
    return {
        "rotary.inv_freq": values("buffer", "inv_freq", (8,)),
        "norm.count": torch.tensor(12345),
        "mask": torch.tensor([[True, False, True], [False, True, True]]),
        "empty": torch.empty(0, 4),
    }


def expected(job: Job) -> dict[tuple[str, str], Tensor]:
    """Say what every logical tensor of a job holds, by (state, name)."""
    found = {
        (state, name): values(state, name, shape)
        for state in ("fp32", *STATES)
        for name, shape in job.shapes.items()
    }
    if job.stage < 3:
        for name, shape in job.shapes.items():
            found["module", name] = values("fp32", name, shape).to(job.dtype)
    for name, shape in job.frozen:
        found["module", name] = values("frozen", name, shape).to(job.dtype)
    return found | {("module", name): tensor for name, tensor in buffers().items()}


def ds_config(job: Job) -> dict[str, Any]:
    zero = {
        "stage": job.stage,
        "round_robin_gradients": job.round_robin,
        "parameter_alignment": job.alignment,
        "sub_group_size": job.sub_group_size,
        "elastic_checkpoint": False,
        "offload_optimizer": {"device": "cpu" if job.offload else "none"},
    }
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    enabled = {precision[job.dtype]: {"enabled": True}} if job.dtype in precision else {}
    return {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "zero_optimization": zero,
            "use_data_before_expert_parallelism": job.data_before_experts,
            "optimizer": {"type": "AdamW"}, **enabled}  # fmt: skip

"""Random jobs, taken to other random ones: `nox -s wander -- FIRST SECONDS`.

Each number makes a model, two DeepSpeed configurations, two world sizes and perhaps other versions
of DeepSpeed, always the same ones. What engines hold and what they save again is asked as of the
chosen cases. Prints what a law found wrong, with the number, and at the end how many numbers were
passed over: DeepSpeed does not train all of them, and some are refused.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn import functional

from tests.oracle.cases import Casting
from tests.oracle.compare import differences
from tests.oracle.files import digests, file_differences
from tests.oracle.models import VOCABULARY, Case
from tests.oracle.reshardings import Places, Resharding, carry
from tests.oracle.truth import Truth

Groups = list[dict[str, Any]]
Dtype = Literal["bf16", "fp16", "fp32"]

OLD: Final = ("0.14.5", "0.16.9")
FP32_GRADIENTS: Final = ("fp32", "float32", "float")
OPTIONS: Final[dict[str, tuple[float, list[Any]]]] = {
    "round_robin_gradients": (0.35, [True]),
    "parameter_alignment": (0.3, [True]),
    "sub_group_size": (0.5, [1, 7, 50, 150, 1000]),
    "reduce_bucket_size": (0.5, [10, 100, 500]),
    "contiguous_gradients": (0.3, [True, False]),
    "overlap_comm": (0.3, [True, False]),
    "stage3_param_persistence_threshold": (0.3, [0, 1, 10, 1000]),
    "zero_hpz_partition_size": (0.15, [1]),
    "stage3_module_granularity_threshold": (0.15, [10]),
    "ignore_unused_parameters": (0.1, [True]),
    "offload_optimizer": (0.15, [{"device": "cpu"}]),
}
"""Of `zero_optimization`: how likely each is, and its values."""
NEW_KEYS: Final = {"parameter_alignment", "stage3_module_granularity_threshold"}
"""Keys that older versions refuse; masters of 16 bits they do not know either."""


class RandomModel(nn.Module):
    """Layers, parameters beside them and buffers of a few shapes, some frozen, some tied."""

    def __init__(self, number: int) -> None:
        super().__init__()
        rnd = random.Random(number)
        width = rnd.choice([1, 2, 3, 5, 8, 13, 16])
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(_layer(rnd, width) for _ in range(rnd.randint(0, 5)))
        self.count = rnd.randint(0, 4)
        for at in range(self.count):
            shape = rnd.choice([(1,), (2,), (3,), (5, 1), (1, 1, 7), (4, 3, 2)])
            extra = nn.Parameter(torch.rand(shape) + 0.5, requires_grad=rnd.random() > 0.3)
            self.register_parameter(f"extra{at}", extra)
        self.head = nn.Linear(width, VOCABULARY, bias=rnd.random() < 0.5)
        if rnd.random() < 0.4:
            self.head.weight = self.embed.weight
        if rnd.random() < 0.5:
            self.register_buffer("calls", torch.randint(1000, (3,)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for at in range(self.count):
            hidden = hidden * (1 + 0.01 * getattr(self, f"extra{at}").sum())
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _layer(rnd: random.Random, width: int) -> nn.Module:
    inner = rnd.choice([1, 2, 4, 7, 16, 29])
    layer = nn.Sequential(
        nn.Linear(width, inner, bias=rnd.random() < 0.6),
        nn.Tanh(),
        nn.Linear(inner, width, bias=rnd.random() < 0.6),
    )
    if rnd.random() < 0.4:
        layer.append(nn.LayerNorm(width))
    for param in layer.parameters():
        param.requires_grad_(rnd.random() > 0.25)
    return layer


@dataclass(frozen=True)
class RandomCase(Case):
    """Trains the model of a number."""

    number: int = 0

    @property
    def keeps_scaler(self) -> bool:
        gradients = self.ds_overrides.get("data_types", {}).get("grad_accum_dtype")
        return (self.zero_stage, self.dtype) != (1, "bf16") or gradients not in FP32_GRADIENTS

    @property
    def is_narrow(self) -> bool:
        """Whether its masters have 16 bits."""
        return "bf16_master_weights_and_grads" in self.ds_overrides.get("bf16", {})

    def groups(self, model: nn.Module, scale: float) -> Groups:
        rnd = random.Random(self.number)
        params = [param for param in model.parameters() if param.requires_grad]
        if rnd.random() < 0.3:
            rnd.shuffle(params)
        found: dict[int, Groups] = {}
        count = rnd.randint(1, 3)
        for param in params:
            at = rnd.randrange(count)
            options = {"lr": (1 + at) * 1e-3 * scale, "weight_decay": 0.1 * at * scale}
            found.setdefault(at, [{"params": [], **options}])[0]["params"].append(param)
        return [group for _, (group,) in sorted(found.items())]


@dataclass(frozen=True)
class OfNumber:
    """Makes the model of a number, in any process."""

    number: int

    def __call__(self) -> nn.Module:
        return RandomModel(self.number)


def momentum(groups: Groups) -> torch.optim.Optimizer:
    """Make an optimizer with one state."""
    return torch.optim.SGD(groups, momentum=0.9)


def amsgrad(groups: Groups) -> torch.optim.Optimizer:
    """Make an optimizer with three states."""
    return torch.optim.AdamW(groups, amsgrad=True)


def resharding(number: int) -> Resharding:
    """Make what a number stands for."""
    rnd = random.Random(number)
    makers: list[Callable[[Groups], torch.optim.Optimizer]] = [torch.optim.AdamW, momentum, amsgrad]
    optimizer = rnd.choice(makers)
    families: list[list[Dtype]] = [["bf16", "bf16", "fp32"], ["fp16"]]
    dtypes, is_narrow = rnd.choice(families), rnd.random() < 0.2
    dtypes = ["bf16"] if is_narrow else dtypes

    def case(name: str) -> RandomCase:
        stage, dtype = rnd.choice([1, 2, 3]), rnd.choice(dtypes)
        zero = {
            key: rnd.choice(values)
            for key, (share, values) in OPTIONS.items()
            if rnd.random() < share
        }
        over: dict[str, Any] = {"zero_optimization": zero}
        over["zero_allow_untested_optimizer"], over["zero_force_ds_cpu_optimizer"] = True, False
        if not is_narrow and rnd.random() < 0.25:
            gradients = rnd.choice([*FP32_GRADIENTS, dtype])
            over["data_types"] = {"grad_accum_dtype": gradients}
        if dtype == "bf16" and stage > 1 and is_narrow:
            zero.pop("offload_optimizer", None)
            over["bf16"] = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        return RandomCase(
            f"{name}{number}", stage, dtype, over, zero_init=stage == 3 and rnd.random() < 0.3,
            optimizer=optimizer, model=OfNumber(number), number=number,
        )  # fmt: skip

    first, second = case("random"), case("other") if rnd.random() < 0.6 else None
    kind = Resharding if second is None or second.is_narrow == first.is_narrow else Casting
    versions = [rnd.choice(["", "", "", *OLD]) for _ in range(2)]
    for at, used in enumerate((first, second or first)):
        zero = used.ds_overrides["zero_optimization"]
        # The end of an engine of 0.14.5 fails then: it deletes a buffer that it has not made.
        fails = used.zero_stage == 3 and zero.get("contiguous_gradients") is False
        if is_narrow or not NEW_KEYS.isdisjoint(zero) or (fails and versions[at] == "0.14.5"):
            versions[at] = ""
    return kind(
        first, rnd.randint(1, 6), rnd.randint(1, 6), resume=second,
        saved_by=versions[0], resumed_by=versions[1], further_steps=0,
    )  # fmt: skip


def wrong(one: Resharding, places: Places) -> Iterator[str]:
    """Yield what breaks the laws of `tests/oracle/laws.py`, but for how training goes on."""
    if digests(places.out(one)) != digests(places.out_of_store(one)):
        yield "both roads do not write the same bytes"
    resumed = places.resumed(one)
    yield from differences(*one.alike(places.saved(one), resumed))
    yield from differences(resumed, Truth.load(places.truth_path(places.loaded(one))))
    if not one.saved_by and not one.resumed_by:  # older ones spell some things otherwise
        tag = (places.out(one) / "latest").read_text()
        found = file_differences(places.out(one) / tag, places.resaved(one) / tag)
        # An empty list of frozen weights and none mean the same to every loader.
        yield from (
            line for line in found if "frozen_param_" not in line and not one.is_known(line)
        )


def described(one: Resharding) -> str:
    """Say what a number stands for."""
    versions = f"{one.saved_by or 'new'} to {one.resumed_by or 'new'}"
    jobs = (
        f"stage {case.zero_stage} {case.dtype} {dict(case.ds_overrides)}"
        for case in (one.case, one.resuming)
    )
    return f"{one.source} to {one.target} ranks, {versions}: {' / '.join(jobs)}"


def tried(one: Resharding, report: Callable[[str], None]) -> str:
    """Carry it out; returns what became of it."""
    with tempfile.TemporaryDirectory(prefix="wander-") as root:
        try:
            places = carry([one], Path(root))
        except AssertionError:
            return "not trained"
        if one.name in places.errors:
            error = places.errors[one.name].strip()
            if "streamshard.errors." in error.splitlines()[-1]:
                return "refused"
            report(error[-800:])
            return "not resumed"
        found = list(wrong(one, places))
        for line in found[:5]:
            report(line[:300])
        return "WRONG" if found else "right"


def wander(first: int, seconds: float) -> None:
    """Try one number after the other."""
    end, outcomes, number = time.monotonic() + seconds, Counter[str](), first
    while time.monotonic() < end:
        lines: list[str] = []
        one = resharding(number)
        outcome = tried(one, lines.append)
        outcomes[outcome] += 1
        if lines:
            sys.stdout.write("\n  ".join([f"{outcome} {number}: {described(one)}", *lines]) + "\n")
            sys.stdout.flush()
        number += 1
    sys.stdout.write(f"{first} to {number - 1}: {dict(outcomes)}\n")
    sys.exit(1 if outcomes["WRONG"] else 0)


if __name__ == "__main__":
    # Ranks import the cases from the module of this name, not from the program.
    from tests.oracle.wander import wander as start

    start(int(sys.argv[1]), float(sys.argv[2]))

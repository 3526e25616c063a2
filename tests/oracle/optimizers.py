"""The optimizers, and the other ways to train, whose state must be understood without a list."""

import importlib
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.oracle.cases import Resharding
from tests.oracle.models import Case, merged

ParamGroups = list[dict[str, Any]]
UNTESTED = {"zero_allow_untested_optimizer": True}
ANY_ON_CPU = {"zero_force_ds_cpu_optimizer": False}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
ADAM = frozenset({"exp_avg", "exp_avg_sq"})
ELASTIC = {"zero_optimization": {"elastic_checkpoint": True}}
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
ADAGRAD = Case("z2-adagrad", 2, "fp32", optimizer=torch.optim.Adagrad, one_group=True)


@dataclass(frozen=True)
class Trial:
    """One way to train, at a stage, with what its checkpoint must hold."""

    case: Case
    states: frozenset[str]
    """Names of the states that have an element for every element of the parameters."""
    scalars: frozenset[str] = frozenset({"step"})
    """Names of the states that a param group has one of."""
    steps: int = 3
    resume_seed: int = 77
    resume: Case | None = None
    """What resumes, where DeepSpeed cannot resume its own files of `case`."""
    like: Case | None = None
    """What saved the checkpoint that tells the hyper-parameters, where that of `case` does not."""
    added: frozenset[str] = frozenset()
    """Names of the switches, all off, that DeepSpeed's loading adds to every param group."""
    extension: str | None = None
    """DeepSpeed's C++ extension that the optimizer is written in."""

    @property
    def resharding(self) -> Resharding:
        """What becomes of it: the stages are taken to opposite sides."""
        source, target = (3, 2) if self.case.zero_stage == 3 else (2, 3)
        return Resharding(self.case, source, target, resume=self.resume)

    @property
    def missing_extension(self) -> str:
        """Why the optimizer cannot run here; empty where it can."""
        if self.extension is None:
            return ""
        # Not where DeepSpeed builds by itself: what is found there may have to be built again, for
        # minutes, or be locked for ever by a process that was killed.
        root = os.environ.get("TORCH_EXTENSIONS_DIR")
        if root and list(Path(root).glob(f"**/{self.extension}/{self.extension}.so")):
            return ""
        message = f"DeepSpeed's {self.extension} takes minutes to build"
        return f"{message}; set TORCH_EXTENSIONS_DIR to where it is built already"


def deepspeed_cpu_adam(groups: ParamGroups) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for offloaded states."""
    return _made("adam", "DeepSpeedCPUAdam", groups)


def deepspeed_fused_adam(groups: ParamGroups) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for states on the device."""
    return _made("adam", "FusedAdam", groups)


def deepspeed_cpu_lion(groups: ParamGroups) -> torch.optim.Optimizer:
    """DeepSpeed's Lion for offloaded states."""
    return _made("lion", "DeepSpeedCPULion", groups)


def deepspeed_cpu_adagrad(groups: ParamGroups) -> torch.optim.Optimizer:
    """DeepSpeed's Adagrad for offloaded states."""
    return _made("adagrad", "DeepSpeedCPUAdagrad", groups)


def adam_with_tensors(groups: ParamGroups) -> torch.optim.Optimizer:
    """AdamW whose learning rates are tensors, each param group's its own."""
    return torch.optim.AdamW([{**group, "lr": torch.tensor(group["lr"])} for group in groups])


def _made(module: str, name: str, groups: ParamGroups) -> torch.optim.Optimizer:
    # Imported by the ranks only: the package takes seconds to import.
    optimizer: torch.optim.Optimizer = getattr(
        importlib.import_module(f"deepspeed.ops.{module}"), name
    )(groups)
    return optimizer


def _at_stage(stage: int) -> list[Trial]:
    none: frozenset[str] = frozenset()
    case = partial(Case, zero_stage=stage)
    fp32, bf16 = partial(case, dtype="fp32"), partial(case, dtype="bf16")
    sgd: Any = torch.optim.SGD
    amsgrad = partial(torch.optim.Adam, amsgrad=True)
    with_momentum = partial(sgd, momentum=0.9)
    rmsprop = partial(torch.optim.RMSprop, momentum=0.9, centered=True)
    overflow = {"fp16": {"initial_scale_power": 16}}
    masters = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}

    def named(name: str) -> str:
        return f"z{stage}-{name}"

    return [
        Trial(fp32(named("amsgrad"), optimizer=amsgrad), ADAM | {"max_exp_avg_sq"}),
        Trial(
            fp32(named("sgd-momentum"), ds_overrides=UNTESTED, optimizer=with_momentum),
            frozenset({"momentum_buffer"}),
            scalars=none,
        ),
        Trial(fp32(named("sgd"), ds_overrides=UNTESTED, optimizer=sgd), none, scalars=none),
        Trial(
            fp32(named("adagrad"), optimizer=torch.optim.Adagrad, one_group=True),
            frozenset({"sum"}),
            # A new engine of stage 3 has every sub-group twice in its only param group, and
            # refuses its own files.
            resume=ADAGRAD if stage == 3 else None,
        ),
        Trial(
            fp32(named("rmsprop"), ds_overrides=UNTESTED, optimizer=rmsprop),
            frozenset({"square_avg", "momentum_buffer", "grad_avg"}),
        ),
        Trial(fp32(named("tensor-lr"), optimizer=adam_with_tensors), ADAM),
        Trial(bf16(named("before-first-step")), none, scalars=none, steps=0),
        Trial(case(named("overflowed"), dtype="fp16", ds_overrides=overflow), none, scalars=none),
        # The frozen weights come from the seed: no file has them.
        Trial(bf16(named("exclude-frozen"), exclude_frozen=True), ADAM, resume_seed=11),
        Trial(bf16(named("bf16-masters"), ds_overrides=masters), ADAM),
        Trial(bf16(named("offload"), ds_overrides=OFFLOAD | ANY_ON_CPU), ADAM),
        Trial(
            bf16(named("cpu-adam"), ds_overrides=OFFLOAD, optimizer=deepspeed_cpu_adam),
            ADAM,
            extension="cpu_adam",
        ),
        Trial(
            bf16(named("fused-adam"), optimizer=deepspeed_fused_adam),
            ADAM,
            extension="fused_adam",
        ),
        Trial(
            bf16(named("cpu-lion"), ds_overrides=OFFLOAD, optimizer=deepspeed_cpu_lion),
            ADAM,  # its exp_avg_sq is never used
            added=frozenset({"amsgrad"}),
            extension="cpu_lion",
        ),
        Trial(
            bf16(
                named("cpu-adagrad"),
                ds_overrides=OFFLOAD | ANY_ON_CPU,
                optimizer=deepspeed_cpu_adagrad,
            ),
            frozenset({"exp_avg_sq"}),
            extension="cpu_adagrad",
        ),
    ]


def _elastic(rigid: Case, **more: Any) -> Trial:  # noqa: ANN401
    """What is saved with `elastic_checkpoint`, and resumed without."""
    case = replace(
        rigid,
        name=f"{rigid.name}-elastic",
        ds_overrides=merged(rigid.ds_overrides, ELASTIC),
    )
    return Trial(case, ADAM, resume=rigid, like=rigid, **more)


TRIALS = [
    *_at_stage(2),
    *_at_stage(3),
    _elastic(Case("z2", 2, "bf16")),
    _elastic(Case("z1-round-robin", 1, "fp32", ROUND_ROBIN)),
    _elastic(
        Case("z2-fused-adam", 2, "bf16", optimizer=deepspeed_fused_adam), extension="fused_adam"
    ),
]

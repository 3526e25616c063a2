"""HF Trainer as users write it: a DeepSpeed configuration full of "auto", resuming by a path."""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tests.oracle.frameworks.common import (
    framework_process,
    generator_digest,
    language_model,
    sample_numbers,
    samples,
    start_generators_apart,
    write_seen,
    write_truth,
    zero_config,
)


@dataclass(frozen=True)
class HfTrain:
    """Train, from the beginning or from a checkpoint, save a checkpoint, and stop there."""

    stage: int
    output_dir: Path
    seen_path: Path
    last_step: int
    """Not the end of the planned training: what the schedule depends on is the same in all jobs."""
    resume_from: Path | Literal[True] | None = None
    """True for the last checkpoint in the output directory."""
    loaded_truth: Path | None = None
    """For what the engine holds before the first step."""
    saved_truth: Path | None = None
    """For what it holds when the checkpoint is saved."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of `TrainingArguments`, beside or in place of those that all jobs have."""
    flags: str = ""
    """The same, as on the command line of a script that parses them."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Numbers in the DeepSpeed configuration in place of "auto"."""
    to_epoch_end: bool = False
    """Stop at the end of the epoch, rather than at `last_step`."""
    seeds_alike: bool = False
    """Leave all ranks with the Trainer's seed, by which they agree about the order of samples."""
    lora: bool = False
    """Train PEFT's LoRA, of which the Trainer saves what is trained alone."""
    change: Callable[[Any], Any] | None = None
    """What the script does with the model before it gives it to the Trainer."""

    def run(self) -> None:
        with framework_process():
            _train(self)


PLANNED_STEPS = 9


def ds_config(stage: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "steps_per_print": 10**9,
        "zero_optimization": zero_config(stage),
    }
    if stage == 2:  # in stage 3 the Trainer makes the scheduler
        auto = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        config["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(auto, "auto")}
    return config


def _lora_model() -> Any:  # noqa: ANN401
    """Add LoRA to a pretrained model, the same in all jobs, as no checkpoint has it."""
    peft: Any = importlib.import_module("peft")
    torch.manual_seed(7)
    config = peft.LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(language_model(), config)


def _train(job: HfTrain) -> None:
    transformers: Any = importlib.import_module("transformers")
    # Before the arguments, which make zero.Init draw other weights at stage 3.
    lora_model = _lora_model() if job.lora else None
    given = _arguments(job)
    if job.flags:
        parser = transformers.HfArgumentParser(transformers.TrainingArguments)
        (args,) = parser.parse_args_into_dataclasses([*_flags(given), *job.flags.split()])
    else:
        args = transformers.TrainingArguments(**given)
    seen: dict[str, Any] = {"samples": []}
    watch = _watch(job, seen)
    model = lora_model or language_model()
    model = model if job.change is None else job.change(model)
    model.register_forward_pre_hook(
        lambda _module, _args, batch: seen["samples"].extend(sample_numbers(batch["input_ids"])),
        with_kwargs=True,
    )
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=samples(), callbacks=[watch]
    )
    watch.trainer = trainer
    # The seed is the same on all ranks, which would make all their generators one.
    if not job.seeds_alike:
        start_generators_apart(args.seed)
    resume = str(job.resume_from) if isinstance(job.resume_from, Path) else job.resume_from
    trainer.train(resume_from_checkpoint=resume)
    seen["last_step"] = trainer.state.global_step
    seen["global_batch"] = trainer.model_wrapped.train_batch_size()
    seen["losses"] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    write_seen(seen, job.seen_path)
    trainer.model_wrapped.destroy()
    importlib.import_module("transformers.integrations.deepspeed").unset_hf_deepspeed_config()


def _arguments(job: HfTrain) -> dict[str, Any]:
    """What the job gives to `TrainingArguments`."""
    config = ds_config(job.stage) | dict(job.sizes)
    if job.lora:  # with one for all stages, that of the Trainer
        config.pop("scheduler", None)
    given: dict[str, Any] = {
        "output_dir": str(job.output_dir),
        "deepspeed": config,
        "bf16": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": PLANNED_STEPS,
        # The callback saves: the steps at which a resumed Trainer does are those of its checkpoint.
        "save_strategy": "no",
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 4,
        # What is right after resuming came from the checkpoint, not from the seed.
        "seed": 11 if job.resume_from is None else 77,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        # The process state is there already: made by the Trainer, it would know of no ranks.
        "use_cpu": True,
        "accelerator_config": {"use_configured_state": True},
    }
    return given | dict(job.arguments)


def _flags(given: Mapping[str, Any]) -> list[str]:
    """Write arguments as a command line has them."""
    return [
        part
        for key, value in given.items()
        for part in (f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value))
    ]


def _watch(job: HfTrain, seen: dict[str, Any]) -> Any:  # noqa: ANN401
    """A callback that writes the truths, and into `seen` what the rank starts with."""
    transformers: Any = importlib.import_module("transformers")

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        trainer: Any

        def on_train_begin(self, _args: object, state: Any, _control: object, **_: object) -> None:  # noqa: ANN401
            seen["first_step"] = state.global_step
            seen["engine_step"] = self.trainer.model_wrapped.global_steps
            if job.loaded_truth is not None:
                write_truth(self.trainer.model_wrapped, job.loaded_truth)
            seen["schedule"] = _schedule(self.trainer)

        def on_step_begin(self, *_: object, **__: object) -> None:
            seen.setdefault("generator", generator_digest())
            groups = self.trainer.model_wrapped.optimizer.param_groups
            seen.setdefault("rates", []).append([group["lr"] for group in groups])

        def on_step_end(self, _args: object, state: Any, control: Any, **_: object) -> None:  # noqa: ANN401
            if state.global_step == job.last_step and not job.to_epoch_end:
                control.should_save = control.should_training_stop = True

        def on_epoch_end(self, _args: object, _state: Any, control: Any, **_: object) -> None:  # noqa: ANN401
            control.should_training_stop |= job.to_epoch_end

        def on_save(self, *_: object, **__: object) -> None:
            seen["saved_schedule"] = _schedule(self.trainer)
            if job.saved_truth is not None:
                write_truth(self.trainer.model_wrapped, job.saved_truth)

    return Watch()


def _schedule(trainer: Any) -> dict[str, Any]:  # noqa: ANN401
    """Where the scheduler stands; DeepSpeed's and torch's own know it by other names."""
    state = trainer.lr_scheduler.state_dict()
    rates = [group["lr"] for group in trainer.model_wrapped.optimizer.param_groups]
    known = ("last_batch_iteration", "last_epoch")
    return {key: state[key] for key in known if key in state} | {"learning_rates": rates}

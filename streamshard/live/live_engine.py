"""Reads a live engine: its config, its files' names, and what its optimizer holds."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from deepspeed import comm

from streamshard.errors import DisagreementError, StreamshardError, UnsupportedError, UsageError
from streamshard.formats.deepspeed import ds_config
from streamshard.operations.native.files_on_demand import FilesOnDemand, names_of_groups
from streamshard.operations.native.resharding import Resharding, resharding_of
from streamshard.operations.source.source import Source

_GROUPS: Final = (
    ("fp16_groups", "fp32_partitioned_groups_flat"),  # DeepSpeedZeroOptimizer_Stage3
    ("bit16_groups", "single_partition_of_fp32_groups"),  # DeepSpeedZeroOptimizer
    ("bf16_groups", "fp32_groups_flat_partition"),  # BF16_Optimizer
)
"""Attributes of DeepSpeed's optimizers: the parameters of each group, and its masters on a rank."""

_OWN_WORDS: Final = {
    "--world-size": "world size",
    ": leave --expert-parallel out": "",
    "--expert-parallel": "expert parallel size",
    "the given config": "the engine's config",
    "with --like": "with 'streamshard repartition --like'",
}
"""What messages call the options of the command line, and what stands for them here."""

Engine = Any
"""A `DeepSpeedEngine`; what it is depends on the version of DeepSpeed."""


def require_servable(engine: Engine) -> None:
    """Refuse an engine that loads in a way that this cannot serve.

    Raises
    ------
    UnsupportedError
        The message names the setting.
    """
    if engine.load_universal_checkpoint():
        message = "the engine's config has checkpoint.load_universal on, with which it loads other"
        raise UnsupportedError(f"{message} files: set it to false")
    if engine.zero_elastic_checkpoint():
        message = "the engine's config has zero_optimization.elastic_checkpoint on, with which it"
        raise UnsupportedError(f"{message} loads the files of all ranks: set it to false")
    # `zero_nvme_offload_optimizer()` of newer versions.
    if getattr(engine.optimizer, "swap_optimizer", False):
        message = "the engine offloads its optimizer to NVMe, with which DeepSpeed loads swap files"
        raise UnsupportedError(
            f"{message} of each rank: set offload_optimizer.device to cpu or none"
        )


def _config_of(engine: Engine) -> ds_config.Config:
    """Return the engine's config, with a value for each "auto", as plain data."""
    config: ds_config.Config = json.loads(json.dumps(engine._config._param_dict, default=str))
    return config


@contextmanager
def in_words_of_a_call(words: Mapping[str, str]) -> Iterator[None]:
    """Name in an error what stands for the options of the command line."""
    try:
        yield
    except StreamshardError as error:
        text = str(error)
        for option, own in words.items():
            text = text.replace(option, own)
        raise type(error)(text) from error


def resharding_for(engine: Engine, opened: Source, world_size: int) -> Resharding:
    """Decide how a checkpoint is cut for an engine.

    Raises
    ------
    StreamshardError
        It cannot be cut so; the message says why.
    """
    config = _config_of(engine)
    layout = opened.checkpoint.layout
    # Before 0.17.6 a BF16_Optimizer trained bf16 without a stage in the config.
    is_stageless = layout.bf16_optimizer and type(engine.optimizer).__name__ == "BF16_Optimizer"
    is_stageless = is_stageless and not ds_config.zero_stage(config)
    wanted = config if layout.stage and not is_stageless else None
    experts = _expert_parallel_of(engine)
    if experts == opened.checkpoint.expert_parallel:
        experts = None
    with in_words_of_a_call(_OWN_WORDS):
        return resharding_of(opened, world_size, wanted=wanted, expert_parallel=experts)


def _expert_parallel_of(engine: Engine) -> int | None:
    """Return over how many ranks an engine spreads its experts; None if it is not one count.

    Layers may have different counts. Then the optimizer's groups show whether they fit.
    """
    wrapped = getattr(engine.optimizer, "optimizer", None)
    groups = [group for group in getattr(wrapped, "param_groups", ()) if group.get("moe") is True]
    sizes = {engine.expert_parallel_group[group["name"]].size() for group in groups}
    return int(sizes.pop()) if len(sizes) == 1 else None


def place_of(engine: Engine) -> tuple[int, int]:
    """Return a rank's number among the model-parallel parts, and among the data-parallel ranks."""
    mpu = engine.mpu
    mp_rank = 0 if mpu is None else mpu.get_model_parallel_rank()
    mp_rank = getattr(engine, "checkpoint_mp_rank", mp_rank)
    return mp_rank, comm.get_rank(group=engine.optimizer.dp_process_group)


def require_same_optimizer(
    names: Mapping[Any, str],
    optimizer: Any,
    resharding: Resharding,
    files: FilesOnDemand,
    place: tuple[int, int],
) -> None:
    """Compare the parameters' order and the partitions' lengths with those of a live optimizer.

    Parameters
    ----------
    names
        Parameter → its name.
    place
        The rank's number among the model-parallel parts, and among the data-parallel ranks.

    Raises
    ------
    DisagreementError
        They differ; the message names what each holds.
    """
    where = resharding.source.path
    expected = list(names_of_groups(resharding, files.cuts, *place))
    live = list(_held(names, optimizer))
    if len(expected) != len(live):
        message = f"{where}: has {len(expected)} groups of parameters for this rank, the engine's"
        raise DisagreementError(f"{message} optimizer has {len(live)}")
    for number, (saved, own) in enumerate(zip(expected, live, strict=True)):
        _require_same_group(f"{where}: group {number}", saved, own)


def _require_same_group(
    where: str, saved: tuple[tuple[str, ...], int], own: tuple[tuple[str, ...], int]
) -> None:
    if len(saved[0]) != len(own[0]):
        message = f"{where} of the optimizer has {len(saved[0])} parameters, the engine's has"
        missing = sorted({*saved[0]} ^ {*own[0]})
        raise DisagreementError(f"{message} {len(own[0])}; only one has '{missing[0]}'")
    for at, (theirs, ours) in enumerate(zip(saved[0], own[0], strict=True)):
        if theirs != ours:
            message = f"{where}: parameter {at} of the optimizer is '{theirs}', of the engine's it"
            raise DisagreementError(f"{message} is '{ours}': give the parameters in the same order")
    if saved[1] != own[1]:
        message = f"{where}: a partition for this job has {saved[1]:,} elements, the engine's has"
        raise DisagreementError(f"{message} {own[1]:,}")


def _held(names: Mapping[Any, str], optimizer: Any) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the parameters of each group of an optimizer, and the numel of a rank's partition."""
    for params, masters in _GROUPS:
        if hasattr(optimizer, params) and hasattr(optimizer, masters):
            groups, flat = getattr(optimizer, params), getattr(optimizer, masters)
            for group, master in zip(groups, flat, strict=True):
                yield tuple(names[param] for param in group), master.numel()
            return
    message = f"the engine's optimizer is a {type(optimizer).__name__}, which is not known"
    raise UsageError(f"{message}: give an engine of ZeRO stage 1, 2 or 3")

"""Loads raw per-rank dumps of any world size into a live ZeRO optimizer."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, Self

import deepspeed
import torch
from deepspeed import comm
from torch import distributed

from streamshard.errors import DisagreementError, UnsupportedError, UsageError, worded
from streamshard.formats.checkpoint import Checkpoint, ModelPart, ParamGroup
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.ds_versions import recorded_version
from streamshard.formats.deepspeed.dumps.dump_reader import ASSUMED
from streamshard.io.object_path import as_path
from streamshard.live.consensus import Agreement, say
from streamshard.live.live_engine import own_words
from streamshard.live.loading import LoadReport
from streamshard.live.same_optimizer import BF16, FLAT, STAGE_3, require_same_optimizer
from streamshard.live.served_files import ServedFiles
from streamshard.model import MASTER, LogicalTensor, NoteKind
from streamshard.operations.native.files_on_demand import FilesOnDemand
from streamshard.operations.native.resharding import Resharding, resharding_of
from streamshard.operations.source.source import Source, requests
from streamshard.options import SourceOptions

_KINDS: Final = (FLAT, STAGE_3, BF16)
"""Classes of optimizers that dumps are loaded into, by name; subclasses keep states otherwise."""
Optimizer = Any
"""One of DeepSpeed's optimizers; what it is depends on the version of DeepSpeed."""


def _require_served(optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps its states in a way that this cannot serve."""
    kind = type(optimizer).__name__
    if kind not in _KINDS:
        message = f"the optimizer is a {kind}: give engine.optimizer of an engine of ZeRO stage 1,"
        raise UsageError(f"{message} 2 or 3 ({', '.join(_KINDS)})")
    ranks, own = distributed.get_world_size(), comm.get_world_size(group=optimizer.dp_process_group)
    if ranks != own:
        message = f"the job has {ranks} ranks, and {own} of them share the optimizer's states:"
        raise UnsupportedError(
            f"{message} dumps do not tell one model-parallel part from another. Save and load with "
            "the engine's checkpoints"
        )
    if any(group.get("moe") for group in optimizer.optimizer.param_groups):
        message = "the optimizer has param groups of experts, whose dumps are not loaded"
        raise UnsupportedError(f"{message}: save and load with the engine's checkpoints")


@dataclass(frozen=True, slots=True)
class LiveOptimizer:
    """What a live optimizer trains, and the settings that cut it; alike on all ranks."""

    config: ds_config.Config
    """The settings, as a DeepSpeed config has them."""
    groups: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    """Name and shape of each parameter of each param group."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self:
        named = names_in(optimizer)
        groups = tuple(
            tuple((named[param], _shape(param)) for param in group) for group in _groups(optimizer)
        )
        return cls(_config(optimizer), groups)

    @property
    def numels(self) -> dict[str, int]:
        """Element count of each parameter."""
        return {name: math.prod(shape) for group in self.groups for name, shape in group}

    def require_same_as(self, first: Self) -> None:
        """Require that rank 0 holds the same."""
        if self.config != first.config:
            message = f"the optimizer has the settings {self.config}, that of rank 0 has"
            raise DisagreementError(f"{message} {first.config}")
        for own, theirs in zip_longest(self._params(), first._params()):
            if own != theirs:
                message = f"the optimizer has {own} as (group, parameter, shape), that of rank 0"
                raise DisagreementError(f"{message} has {theirs}")

    def _params(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        for number, group in enumerate(self.groups):
            yield from ((number, name, shape) for name, shape in group)

    def reference(self, hyper_parameters: Sequence[dict[str, Any]]) -> Checkpoint:
        """Describe the optimizer as a checkpoint of it would, to read dumps with."""
        groups = tuple(
            ParamGroup(tuple(name for name, _ in group), "float32", None, number)
            for number, group in enumerate(self.groups)
        )
        state = {names.BASE_OPTIMIZER: {"state": {}, "param_groups": list(hyper_parameters)}}
        stage = ds_config.zero_stage(self.config) or 0
        return Checkpoint(
            tag="",
            layout=ds_config.zero_layout(self.config, stage=stage, world_size=1),
            tensors=tuple(
                LogicalTensor(MASTER, name, "float32", shape)
                for group in self.groups
                for name, shape in group
            ),
            model_parts=(ModelPart("", groups, (), {}, {names.OPTIMIZER: state}, {}),),
            module_dtype=ds_config.module_dtype(self.config),
            files=(),
        )


def names_in(optimizer: Optimizer) -> dict[Any, str]:
    """Return parameter → name; stage 3 keeps the model and no names."""
    if _is_stage_3(optimizer):
        return {param: name for name, param in optimizer.module.named_parameters()}
    return dict(optimizer.param_names)


def _groups(optimizer: Optimizer) -> list[list[Any]]:
    """List the parameters of each param group, in their order."""
    if not _is_stage_3(optimizer):
        return [*(optimizer.bf16_groups if _is_bf16(optimizer) else optimizer.bit16_groups)]
    groups: list[list[Any]] = [[] for _ in optimizer.optimizer.param_groups]
    for number, sub_group in enumerate(optimizer.fp16_groups):
        groups[optimizer.sub_group_to_group_id[number]] += sub_group
    return groups


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def _is_stage_3(optimizer: Optimizer) -> bool:
    return type(optimizer).__name__ == STAGE_3


def _is_bf16(optimizer: Optimizer) -> bool:
    return type(optimizer).__name__ == BF16


def _config(optimizer: Optimizer) -> ds_config.Config:
    """Write the settings that cut the states as a DeepSpeed config."""
    dtype = next(param.dtype for group in _groups(optimizer) for param in group)
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    config: dict[str, Any] = {precision: {"enabled": True}} if precision else {}
    if _is_bf16(optimizer):
        types = {"grad_accum_dtype": "fp32"}  # with it, stage 1 has this optimizer
        return {**config, "data_types": types, "zero_optimization": {"stage": 1}}
    if _is_stage_3(optimizer):
        device = "nvme" if optimizer.swap_optimizer else "cpu"
        zero = {"stage": 3, "sub_group_size": optimizer.sub_group_size}
        offloads, ratio = optimizer.offload_optimizer, optimizer.partial_offload
    else:
        device, ratio, offloads = "cpu", 1.0, optimizer.cpu_offload
        zero = {
            "stage": 2 if optimizer.partition_gradients else 1,
            "round_robin_gradients": optimizer.round_robin_gradients,
            "parameter_alignment": getattr(optimizer, "parameter_alignment", False),
        }
    offload = {"offload_optimizer": {"device": device, "ratio": ratio}} if offloads else {}
    return {**config, "zero_optimization": {**zero, **offload}}


def _hyper_parameters_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the param groups without parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.optimizer.param_groups
    ]


def _has_own_weights(optimizer: Optimizer) -> bool:
    """Tell whether the rank's part of the model's weights is its masters, rounded."""
    if _is_stage_3(optimizer):
        return True  # it has just made them so
    if _is_bf16(optimizer):
        weights, masters = optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition
    else:
        weights = optimizer.parallel_partitioned_bit16_groups
        masters = optimizer.single_partition_of_fp32_groups
    rank = comm.get_rank(group=optimizer.dp_process_group)
    both = zip(weights, masters, strict=True)
    return all(torch.equal(parts[rank], master.to(parts[rank])) for parts, master in both)


_OWN_WORDS: Final = {
    "like": "this job's optimizer",
    "ds_config_file": "this job's config",
}
"""What stands here for options of `repartition`."""
_ROUND_ROBIN: Final = (
    "If it was on, the states that were loaded are wrong: load again with the config of the job "
    "that saved the dumps, source_ds_config_file."
)
_STALE_WEIGHTS: Final = (
    "The model's weights differ from the loaded master weights by more than rounding: dumps hold "
    "no model, and at stages 1 and 2 DeepSpeed leaves the model as it is until the next step. Load "
    "the model's weights too, before that step."
)


def load_optimizer(
    optimizer: Optimizer,
    source: str | os.PathLike[str],
    *,
    source_ds_config_file: str | os.PathLike[str] | None = None,
) -> LoadReport:
    """Load raw per-rank dumps of any world size into a ZeRO optimizer.

    Every rank calls this. The optimizer is then as `optimizer.load_state_dict(dumps)` would make
    it with the dumps of this job's world size: states, hyper-parameters and loss scale are those
    of the dumps, and master weights are theirs to the bit. As there, the model's weights follow
    the master weights at stage 3 alone. At stages 1 and 2, load them too; a note says so if they
    are others.

    Parameters
    ----------
    optimizer
        `engine.optimizer`, of ZeRO stage 1, 2 or 3.
    source
        Template of the dumps, such as `ckpt/optimizer.{rank:02d}.pt`, or a store made of them.
    source_ds_config_file
        DeepSpeed config of the job that saved the dumps. Only it tells whether they were saved
        with `round_robin_gradients`.

    Raises
    ------
    StreamshardError
        On all ranks, if one rank cannot load its part; the message names that rank. The optimizer
        is as it was if the message is about the dumps, or about what the optimizer holds.
    """
    return _OptimizerLoad(optimizer).run(as_path(source).absolute(), source_ds_config_file)


class _OptimizerLoad:
    """One load of dumps into an optimizer, on one rank of many that do the same."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._agreement = Agreement()

    def run(self, path: Path, config_file: str | os.PathLike[str] | None) -> LoadReport:
        """Load this rank's part."""
        started = time.perf_counter()
        with self._agreement.step():
            _require_served(self._optimizer)
            live = LiveOptimizer.of(self._optimizer)
        first = self._agreement.share(live)
        with self._agreement.step():
            live.require_same_as(first)
        found: Resharding | None = None
        with self._agreement.step():
            if distributed.get_rank() == 0:
                with worded(own_words(_OWN_WORDS)):
                    found = self._open(path, config_file, live)
        resharding = self._agreement.share(found)
        read_bytes = self._load(resharding, live)
        source = resharding.source
        report = LoadReport(
            source=path,
            tag=source.checkpoint.tag,
            source_world_size=source.checkpoint.ranks,
            world_size=resharding.world_size,
            is_plain=False,
            read_bytes=tuple(self._agreement.gather(read_bytes)),
            mapped_bytes=(0,) * resharding.world_size,
            seconds=time.perf_counter() - started,
            notes=(*_notes(source), *self._notes_of_weights()),
        )
        say("\n".join([str(report), *report.notes]))
        return report

    def _open(
        self, path: Path, config_file: str | os.PathLike[str] | None, live: LiveOptimizer
    ) -> Resharding:
        """Open the dumps, and decide how they are cut for this job."""
        (request,) = requests(SourceOptions(source_ds_config_file=config_file), path)
        hyper_parameters = _hyper_parameters_of(self._optimizer)
        opened = replace(request, like=live.reference(hyper_parameters)).open()
        if not opened.checkpoint.is_dumps:
            message = f"{path}: a checkpoint with its model, not dumps of an optimizer"
            raise UsageError(f"{message}: call load_checkpoint with the engine")
        opened.require_states()
        ranks, version = distributed.get_world_size(), recorded_version(deepspeed.__version__)
        found = resharding_of(opened, ranks, wanted=live.config, ds_version=version)
        opened.require_cut_states(keeps_cut=found.keeps_cut)
        return found

    def _load(self, resharding: Resharding, live: LiveOptimizer) -> int:
        """Let DeepSpeed load this rank's dump; returns how many bytes were read."""
        rank = comm.get_rank(group=self._optimizer.dp_process_group)
        with self._agreement.step():
            files = FilesOnDemand(resharding)
            _require_same_sizes(resharding, live)
            named = names_in(self._optimizer)
            require_same_optimizer(named, self._optimizer, resharding, files, (0, rank))
            name = files.paths[rank]
            served = ServedFiles(resharding.source, files, maps=False)
            served.prepare(name)
        try:
            with self._agreement.step():
                dumps: list[Any] = [None] * resharding.world_size
                dumps[rank] = served.load(name)
        finally:
            served.close()
        self._hand_over(dumps)
        return served.read_bytes

    def _hand_over(self, dumps: list[Any]) -> None:
        """Give DeepSpeed the dumps, as `DeepSpeedEngine.load_checkpoint` (0.19.8) does."""
        optimizer = self._optimizer
        with self._agreement.step():
            if _is_stage_3(optimizer):  # weights that are gathered now would stay as they are
                optimizer.checkpoint_event_prologue()
            # 0.14.5 has no default for the folder in BF16_Optimizer.
            optimizer.load_state_dict(dumps, load_from_fp32_weights=True, checkpoint_folder=None)
        if _is_stage_3(optimizer):
            optimizer.checkpoint_event_epilogue()

    def _notes_of_weights(self) -> tuple[str, ...]:
        """Say so if the model's weights are not those of the masters."""
        with self._agreement.step():
            is_stale = not _has_own_weights(self._optimizer)
        return (_STALE_WEIGHTS,) if any(self._agreement.gather(is_stale)) else ()


def _require_same_sizes(resharding: Resharding, optimizer: LiveOptimizer) -> None:
    """Refuse dumps of a parameter that has another size than the live one."""
    checkpoint, live = resharding.source.checkpoint, optimizer.numels
    for name, numel in checkpoint.master_numels(checkpoint.model_parts[0]).items():
        if live.get(name, numel) != numel:
            message = f"{resharding.source.path}: '{name}' has {numel:,} elements, in this job's"
            raise DisagreementError(f"{message} optimizer it has {live[name]:,}")


def _notes(source: Source) -> Iterator[str]:
    """Yield the notes of dumps that were read; what is to be done with new ones is not for here."""
    for note in source.checkpoint.notes:
        if note.kind is NoteKind.ASSUMED:
            yield f"{ASSUMED} {_ROUND_ROBIN}"
        elif note.kind is not NoteKind.LOADING:
            yield note.text

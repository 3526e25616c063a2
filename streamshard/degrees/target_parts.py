"""Finds out how a job at other degrees cuts the model: asks all that may tell it, in order."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import numpy as np

from streamshard.degrees.layered import layered
from streamshard.degrees.recut_source import universal_info
from streamshard.degrees.shard_values import require_different_shards
from streamshard.errors import Option, StreamshardError, UnsupportedError, UsageError
from streamshard.formats.checkpoint import LIKE
from streamshard.formats.deepspeed.model_parallel.affine_maps import AffineMaps
from streamshard.formats.deepspeed.model_parallel.cut_rules import CutRules
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import Degrees, is_pipeline
from streamshard.formats.deepspeed.model_parallel.parts import ModelInParts
from streamshard.formats.deepspeed.model_parallel.recomputed_widths import (
    WidthRule,
    at_degree,
    grain_of,
)
from streamshard.formats.deepspeed.model_parallel.stage_starts import STAGES, with_stages
from streamshard.formats.deepspeed.model_parallel.whole_model import whole_model
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.pretrained import CONFIG
from streamshard.model import FILE
from streamshard.operations.source.source import Source
from streamshard.operations.source.source_access import SourceAccess

_MOST_BYTES: Final = 1 << 20
"""More than any config has."""


@dataclass(frozen=True, slots=True)
class TargetJob:
    """A job that is to resume from a source at other degrees."""

    source: Source
    parts: ModelInParts
    """Those of the source."""
    degrees: Degrees
    rules: CutRules | None
    """How both jobs cut parameters; None for what their files tell."""
    stages: Sequence[int] | None
    """First layer of each stage; None for what a reference checkpoint tells."""

    def parts_of_model(self) -> ModelInParts:
        """Return how the job cuts the model, by the first that tells it."""
        for ask in _TELLING:
            found = ask(self)
            if found is not None:
                return found
        raise UsageError(self._untold())

    @property
    def has_maps(self) -> bool:
        """Whether the source's files hold AutoTP's maps."""
        return AffineMaps.are_in(universal_info(self.source))

    def _untold(self) -> str:
        source, target = self.source, self.degrees
        message = f"{source.path}: saved with {self.parts.degrees}, and nothing tells how a job"
        message = f"{message} with {target} cuts the model: {_supply()}"
        if is_pipeline(source.checkpoint) and target.tensor == self.parts.degrees.tensor:
            return f"{message}; or list with {Option(STAGES)} the first layer of each stage"
        if self.has_maps and _kv_heads(source) is None:
            message = f"{message}. If AutoTP cut by heads, the model's {CONFIG} in {source.path}"
            return f"{message} may do, with num_key_value_heads in it"
        return message


def _listed_stages(job: TargetJob) -> ModelInParts | None:
    """Begin the stages at the layers that the user lists."""
    if job.stages is None:
        return None
    try:
        with of_file(job.source.path):
            return with_stages(job.parts, job.stages)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}. {instead_of(job.stages)}") from error


def _reference(job: TargetJob) -> ModelInParts | None:
    """Cut as in a reference checkpoint, which the job saved."""
    checkpoint, known = job.source.like, job.source.reference
    if checkpoint is None:
        return None
    try:
        if job.source.checkpoint.layers and known is not None and is_pipeline(known.checkpoint):
            checkpoint = layered(known).source.checkpoint
        like = ModelInParts(checkpoint, job.rules, keeps_shards=job.parts.keeps_shards)
    except StreamshardError as error:
        raise type(error)(f"{LIKE}: {error}") from error
    if like.degrees != job.degrees:
        message = f"{LIKE} was saved with {like.degrees}, and {job.degrees} are asked for"
        raise UsageError(f"{message}: {_supply()}")
    return like


def _whole(job: TargetJob) -> ModelInParts | None:
    """Leave the model whole, which depends on no choice of the job."""
    if job.degrees.parts > 1 or is_pipeline(job.source.checkpoint):
        return None
    with of_file(job.source.path):
        require_different_shards(job.source, job.parts)
        return whole_model(job.parts)


def _recomputed_widths(job: TargetJob) -> ModelInParts | None:
    """Cut by the rule by which AutoTP cut the source."""
    with of_file(job.source.path):
        if job.degrees.pipeline > 1 or job.rules is not None or not job.has_maps:
            return None
        grain = grain_of(job.source.checkpoint.config)
        return at_degree(job.parts, WidthRule(job.degrees.tensor, _kv_heads(job.source), grain))


_TELLING: Final[Sequence[Callable[[TargetJob], ModelInParts | None]]] = (
    _listed_stages, _reference, _whole, _recomputed_widths
)  # fmt: skip
"""What may tell how a job cuts the model."""


def instead_of(stages: Sequence[int]) -> str:
    """Say what to give in place of the first layers of stages."""
    degree = Option("pipeline_parallel", len(stages))
    return f"In place of {Option(STAGES)}, say {degree}, and {_supply()}"


def _supply() -> str:
    return (
        'start that job, let it call engine.save_checkpoint("RUN") before its first step, and say '
        f"here {Option('like', 'RUN')} as well"
    )


def _kv_heads(source: Source) -> int | None:
    """Return the model's count of key and value heads, if its `config.json` has it by that name.

    AutoTP looks for others too, and for what the model's class calls them; only this name is read,
    which comes first (`AutoTPMeta.from_model_config` of `deepspeed/module_inject/tp_shard.py`,
    0.19.8).
    """
    for number, tensor in enumerate(source.checkpoint.tensors):
        if tensor.state == FILE and tensor.name == CONFIG and tensor.numel <= _MOST_BYTES:
            with closing(SourceAccess(source)) as access:
                content = np.empty(tensor.numel, dtype=np.uint8)
                access.fill(content, number, 0, None)
            return _kv_heads_in(content.tobytes())
    return None


def _kv_heads_in(content: bytes) -> int | None:
    try:
        config = json.loads(content)  # as transformers reads it, which writes Infinity too
    except (RecursionError, ValueError):
        return None
    inner = config.get("text_config") if isinstance(config, dict) else None
    held = inner if isinstance(inner, dict) else config
    found = held.get("num_key_value_heads") if isinstance(held, dict) else None
    return found if isinstance(found, int) and found > 0 else None

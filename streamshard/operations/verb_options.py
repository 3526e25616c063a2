"""The options of the verbs that write, each written down once.

The command line fills them from the parser's result, functions take them as keywords, a plan file
stores them. What each of them means is in the docstrings of `plan_repartition`, `plan_convert` and
`plan_export`.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast, get_type_hints

from streamshard.defaults import (
    CODECS,
    DEFAULT_CHUNK_BYTES,
    DEFAULT_SHARD_BYTES,
    DTYPES,
    FORMATS,
    LAYOUTS,
)
from streamshard.errors import Option, UsageError
from streamshard.operations.transfer.report import Progress, Report

Path_ = str | os.PathLike[str]

P = ParamSpec("P")
Options = TypeVar("Options")
Plan = TypeVar("Plan")
PlanOf = TypeVar("PlanOf", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """Options of verbs that read tensors."""

    source_ds_config_file: Path_ | None = None
    like: Path_ | None = None
    tag: str | None = None
    memory_limit: int | None = None
    workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions(ReadingOptions):
    """Options of verbs that write."""

    overwrite: bool = False
    verify: bool = False
    if_needed: bool = False
    lock: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RepartitionOptions(TransferOptions):
    """Options of `repartition`."""

    world_size: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    stages: Sequence[int] | None = None
    expert_parallel: int | None = None
    cut_rules_file: Path_ | None = None
    average: bool = False
    zero_stage: int | None = None
    ds_config_file: Path_ | None = None
    ds_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(TransferOptions):
    """Options of `convert`."""

    codec: str = "none"
    chunk_size: int = DEFAULT_CHUNK_BYTES
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    stages: Sequence[int] | None = None
    cut_rules_file: Path_ | None = None
    average: bool = False

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise UsageError(f"{Option('codec', self.codec)}: choose one of {', '.join(CODECS)}")
        if self.chunk_size < 1:
            message = f"{Option('chunk_size', self.chunk_size)}: at least one byte is needed"
            raise UsageError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(TransferOptions):
    """Options of `export`."""

    dtype: str = "fp32"
    format: str = FORMATS[0]
    max_shard_size: int = DEFAULT_SHARD_BYTES
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    keep_dtype: Sequence[str] = ()
    strip_prefix: Sequence[str] = ()
    frozen: bool = True
    layout: str = LAYOUTS[0]
    ranks: int = 1
    cut_rules_file: Path_ | None = None
    average: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"{Option('dtype', self.dtype)}: choose one of {', '.join(DTYPES)}")
        if self.format not in FORMATS:
            raise UsageError(f"{Option('format', self.format)}: choose one of {', '.join(FORMATS)}")
        if self.layout not in LAYOUTS:
            raise UsageError(f"{Option('layout', self.layout)}: choose one of {', '.join(LAYOUTS)}")
        if self.ranks < 1:
            raise UsageError(f"{Option('ranks', self.ranks)}: at least one is needed")
        if self.max_shard_size < 1:
            message = (
                f"{Option('max_shard_size', self.max_shard_size)}: at least one byte is needed"
            )
            raise UsageError(message)
        for name in ("include", "exclude", "keep_dtype", "strip_prefix"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


def option_types(kind: type[TransferOptions]) -> dict[str, Any]:
    """Return the type of each option by its name: first the verb's own, then those of all verbs."""
    types, own = get_type_hints(kind), inspect.get_annotations(kind)
    names = [field.name for field in fields(kind)]
    return {name: types[name] for name in sorted(names, key=lambda name: name not in own)}


class Planner(Protocol[P, PlanOf]):
    """Plans a run; takes each option as a keyword."""

    def __call__(self, source: Path_, target: Path_, *args: P.args, **kwargs: P.kwargs) -> PlanOf:
        """Make the plan."""


class Runner(Protocol[P]):
    """Plans a run and carries it out; takes each option as a keyword."""

    def __call__(
        self,
        source: Path_,
        target: Path_,
        progress: Progress | None = None,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Report:
        """Carry out the run."""


def takes(
    kind: Callable[P, Options],
) -> Callable[[Callable[[Path_, Path_, Options], Plan]], Planner[P, Plan]]:
    """Let a function, which takes an options object, take each of its options as a keyword.

    Type checkers see the keywords too: `P` are the parameters that make the options object.
    """

    def decorate(function: Callable[[Path_, Path_, Options], Plan]) -> Planner[P, Plan]:
        @wraps(function)
        def call(source: Path_, target: Path_, *args: P.args, **kwargs: P.kwargs) -> Plan:
            return function(source, target, kind(*args, **kwargs))

        types = option_types(cast("type[TransferOptions]", kind))
        made = inspect.signature(kind).parameters
        paths = list(inspect.signature(function).parameters.values())[:2]
        keywords = [made[name] for name in types]
        _set_signature(call, [*paths, *keywords], inspect.signature(function).return_annotation)
        return call

    return decorate


def runs(
    plan: Planner[P, Plan],
) -> Callable[[Callable[[Plan, Progress | None], Report]], Runner[P]]:
    """Let a function, which runs a plan, take what the plan is made from."""

    def decorate(function: Callable[[Plan, Progress | None], Report]) -> Runner[P]:
        @wraps(function)
        def call(
            source: Path_,
            target: Path_,
            *,
            progress: Progress | None = None,
            **options: Any,  # noqa: ANN401
        ) -> Report:
            return function(cast("Any", plan)(source, target, **options), progress)

        parameters = inspect.signature(plan).parameters.values()
        shown = inspect.signature(call, follow_wrapped=False).parameters["progress"]
        _set_signature(call, [*parameters, shown], Report)
        return cast("Runner[P]", call)

    return decorate


def _set_signature(
    function: Callable[..., object], parameters: list[inspect.Parameter], returned: object
) -> None:
    """Set the signature that `help` shows."""
    signature = inspect.Signature(parameters, return_annotation=returned)
    function.__dict__["__signature__"] = signature

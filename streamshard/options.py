"""What an option is, and the options of `repartition`; `verb_options` has those of other verbs.

A field of a class below makes the option of the command line, the keyword of the function, its
type, its entry in the function's docstring, and the row in `docs/commands.md`. What has no type is
of the command line alone, and what has no help of Python alone.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    NamedTuple,
    ParamSpec,
    Self,
    TypeVar,
    dataclass_transform,
)

from streamshard.errors import Option, UsageError

if TYPE_CHECKING:
    from inspect import Signature

Path_ = str | os.PathLike[str]
_LONG_NAME: Final = re.compile(r"--([a-z][a-z-]*)")
_UNITS: Final = {
    "SIZE": " Here a number of bytes.",
    "RATE": " Here a number of bytes.",
    "TIME": " Here a timedelta.",
}
"""What stands for a value on the command line → what it is in Python."""
P = ParamSpec("P")
Given = TypeVar("Given")
Result = TypeVar("Result")


class OptionField(NamedTuple):
    """How an option looks on the command line, and which values make sense."""

    shown: str
    """Its names, if they are others than the field's, and what stands for its value: `-n --dry-run`
    or `--param PATTERN`, and `TAG ...` for several. `SIZE` and `TIME` are read as such."""
    help: str
    default: Any = None
    choices: Sequence[Any] | None = None
    least: int | None = None
    few: str = ""
    """What is said of a value that is less than the least."""
    apart: bool = False
    """Whether it excludes the others that are so."""
    group: str = ""
    """Heading above it in the help; by default the `group` of its class."""
    is_rare: bool = False
    """Whether only `--help-all` shows it."""

    def checked(self, name: str, value: Any) -> Any:  # noqa: ANN401
        """Return a value as it is kept, or refuse it."""
        if self.default == ():
            if isinstance(value, str):
                raise UsageError(f"{name}={value!r}: a list is needed, and this is one name")
            return tuple(value)
        if value is None:
            return None
        if isinstance(value, timedelta) and value < timedelta(0):
            raise UsageError(f"{name}={value}: is negative")
        if self.choices is not None and value not in self.choices:
            choices = ", ".join(map(str, self.choices))
            raise UsageError(f"{Option(name, value)}: choose one of {choices}")
        if self.least is not None and value < self.least:
            raise UsageError(f"{Option(name, value)}: {self.few or f'at least {self.least}'}")
        return value


def option(shown: str = "", help: str = "", **more: Any) -> Any:  # noqa: ANN401
    """Make a field of an options class; see `OptionField`."""
    return OptionField(shown, help, **more)


def flag(help: str, shown: str = "", **more: Any) -> Any:  # noqa: ANN401
    """Make a field that is either given or not."""
    return OptionField(shown, help, default=False, **more)


def place(metavar: str, help: str, *, kw_only: bool = False) -> Any:  # noqa: ANN401
    """Make a field that is given by its place, without a default; type checkers see `kw_only`."""
    return OptionField(metavar, help, default=...)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(place,))
class Options:
    """What a verb is given. `dataclasses` takes too long to load for `--help`."""

    def __init__(self, *args: object, **given: object) -> None:
        bound = _known_signature(type(self)).bind(*args, **given)
        bound.apply_defaults()
        fields = fields_of(type(self))
        vars(self).update({k: fields[k].checked(k, value) for k, value in bound.arguments.items()})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: options do not change")

    def replaced(self, **changes: object) -> Self:
        """Return the options with some others."""
        return type(self)(**{**vars(self), **changes})

    def is_given(self, name: str) -> bool:
        """Whether an option is another one than by default."""
        return bool(getattr(self, name) != fields_of(type(self))[name].default)


def _find_fields(kind: type[Options]) -> Mapping[str, OptionField]:
    """Return the fields of a class by their names: its own, then inherited ones."""
    fields: dict[str, OptionField] = {}
    for one in kind.__mro__:
        group = vars(one).get("group", "")
        for name, field in vars(one).items():
            if isinstance(field, OptionField):
                own = field if field.group else field._replace(group=group)
                is_place = name in fields and field.default is ...
                fields[name] = fields[name] if is_place else fields.pop(name, own)
    return {name: fields[name] for name in sorted(fields, key=lambda name: name != "source")}


fields_of: Final[Callable[..., Mapping[str, OptionField]]] = cache(_find_fields)


def types_of(kind: type[Options]) -> dict[str, Any]:
    """Return the type of each field that functions take, by its name."""
    types: dict[str, Any] = {}
    for one in kind.__mro__[:-1]:
        types |= one.__annotations__
    return {name: types[name] for name in fields_of(kind) if name in types}


def _signature_of(kind: type[Options], returned: object = None) -> "Signature":
    """Return the parameters of a function that takes the fields of a class."""
    from inspect import Parameter, Signature  # not at the top: `--help` needs none of it

    def parameter(name: str, of: object) -> Parameter:
        default = fields_of(kind)[name].default
        if default is ...:
            return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=of)
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=of)

    parameters = [parameter(name, of) for name, of in types_of(kind).items()]
    return Signature(sorted(parameters, key=lambda one: one.kind), return_annotation=returned)


_known_signature: Final[Callable[..., "Signature"]] = cache(_signature_of)


def with_parameters(text: str, kind: type[Options]) -> str:
    """Add parameters, of the help of options, and what all verbs raise to a docstring."""
    from inspect import cleandoc  # as above
    from textwrap import indent, wrap

    fields = {name: fields_of(kind)[name] for name in types_of(kind)}
    entries = "".join(
        f"\n{name}\n" + indent("\n".join(wrap(described(field), 88)), "    ")
        for name, field in sorted(fields.items(), key=lambda entry: entry[1].default is not ...)
        if field.help
    )
    head, _, raises = cleandoc(text).partition("\n\nRaises\n------")
    if "\nStreamshardError\n" not in raises:  # what stands behind it may be other sections
        common = "One of its subclasses, each with its own exit code; see `streamshard.errors`."
        raises = f"\nStreamshardError\n    {common}{raises}"
    return f"{head}\n\nParameters\n----------{entries}\n\nRaises\n------{raises}"


def described(field: OptionField) -> str:
    """Return an option's help as sentences, with keywords in place of the command line's names."""
    text = _LONG_NAME.sub(lambda name: f"`{name[1].replace('-', '_')}`", field.help)
    end = "" if text.endswith("...") else "."
    unit = _UNITS.get(field.shown.rpartition(" ")[2], "")
    return f"{text[:1].upper()}{text[1:].replace('%%', '%')}{end}{unit}"


def takes(kind: Callable[P, Given]) -> Callable[[Callable[[Given], Result]], Callable[P, Result]]:
    """Let a function that takes an options object take its fields, for type checkers too."""

    def decorate(function: Callable[[Given], Result]) -> Callable[P, Result]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return function(kind(*args, **kwargs))

        returned = function.__annotations__["return"]
        signature = _signature_of(kind, returned)  # type: ignore[arg-type]
        call.__dict__["__signature__"] = signature
        call.__doc__ = with_parameters(function.__doc__ or "", kind)  # type: ignore[arg-type]
        return call

    return decorate


JOB: Final = "The job that will resume"
SOURCE: Final = "What is read"
PARALLELISM: Final = "Tensor, pipeline and expert parallelism"
RUN: Final = "Where and how it runs"
OUTPUT: Final = "Output"
CODECS: Final = ("none", "zstd")
"""Codecs for the chunks of a store."""
SOURCE_HELP: Final = (
    "run directory with 'latest', tag directory, universal checkpoint, .zarr or .zarr.zip store, "
    "directory of FSDP's or Megatron's .distcp files or of model_world_size_*.pt, or of a model's "
    ".safetensors files, or template of raw per-rank dumps such as "
    "'ckpt/optimizer.{rank:02d}.pt'; as every path here, local or s3://bucket/..., gs://... or "
    "az://..."
)
_DRY_RUN: Final = flag("show what would be done, and write nothing", "-n --dry-run", group=RUN)
DASK: Final = option(
    "ADDRESS",
    "run on a Dask cluster: tcp://scheduler:8786, the path of a scheduler file (*.json), or "
    "local:N for N processes with --workers threads each [threads of this process]",
    is_rare=True,
    group=RUN,
)


class SourceOptions(Options):
    """Options of how a source is read: what it lacks, other names of its tensors, tag."""

    group = SOURCE

    like: Path_ | None = option(
        "SRC", "reference checkpoint of the same job, which supplies what SRC lacks"
    )
    facts: Path_ | Mapping[str, Any] | None = option(
        "FILE",
        "TOML file of what the files of SRC (of two that are compared: of the first) do not say: "
        "[source] ds_config, rename, wrapped, cut_rules; [target] ds_version",
        is_rare=True,
    )
    tag: str | None = option("", "tag to read [the one that 'latest' names]")


class RunOptions(Options):
    """Options for a run's memory, and for what carries it out."""

    group = RUN

    memory_limit: int | None = option(
        "SIZE",
        "memory above the program's own: 512MiB, 2GB, or 50%% of the machine's [1GiB, at most half "
        "of what there is]",
    )
    workers: int | None = option(
        "N",
        "threads [one per core, at most 4; to compress, two more than there are cores, at most 16; "
        "8 with object stores; fewer where memory is tight]",
        least=1,
        few="at least one is needed",
        is_rare=True,
    )


IF_NEEDED: Final = (
    "write nothing, and exit with 0, if OUT already is what this would write, as names, sizes and "
    "headers tell; with --verify byte for byte"
)


class _TargetOptions(Options):
    """Options that say how a target is written."""

    group = OUTPUT

    overwrite: bool = flag("replace the target if it exists")
    dask = DASK
    dry_run = _DRY_RUN
    verify: bool = flag(
        "read back what was written, and compare it with SRC before it takes its place"
    )


class WritingOptions(RunOptions, _TargetOptions):
    """Options of verbs that write, of one source or of several."""

    source: Path_ | Sequence[Path_] = place("SRC", SOURCE_HELP, kw_only=False)
    target: Path_ = place("OUT", "", kw_only=False)

    @property
    def sources(self) -> Sequence[Path_]:
        """What is read."""
        return [self.source] if isinstance(self.source, str | os.PathLike) else self.source

    @property
    def is_lenient(self) -> bool:
        """Whether a target that is there may be what is to be written; see `if_needed`."""
        return bool(vars(self).get("if_needed"))


class TransferOptions(SourceOptions, WritingOptions):
    """Options of verbs that write what is in one source."""

    source: Path_ = place("SRC", SOURCE_HELP, kw_only=False)


def degree(metavar: str, help: str) -> Any:  # noqa: ANN401
    """Make a field for a degree of parallelism."""
    return option(metavar, help, group=PARALLELISM, is_rare=True)


TENSOR_PARALLEL: Final = (
    "{}, how many share each tensor; another number than the source's, except 1, takes --like, a "
    "save of the job that will resume [the source's]"
)
PIPELINE_PARALLEL: Final = "{}, how many stages share the layers; as above [the source's]"


class RepartitionOptions(TransferOptions):
    """Options of `repartition`."""

    group = JOB

    target: Path_ = place("OUT", "run directory to make, or template", kw_only=False)
    world_size: int | None = option(
        "M", "number of ranks that will resume [of a store: as many as saved its content]"
    )
    tensor_parallel: int | None = degree("T", TENSOR_PARALLEL.format("of these ranks"))
    pipeline_parallel: int | None = degree("P", PIPELINE_PARALLEL.format("of these ranks"))
    expert_parallel: int | None = degree(
        "E", "of these ranks, over how many the experts of each layer are spread [the source's]"
    )
    zero_stage: int | None = option(
        "", "stage of the job that will resume [the source's]", choices=(1, 2, 3)
    )
    ds_config_file: Path_ | None = option(
        "--ds-config FILE",
        "whole DeepSpeed config of the job that will resume [the one kept in the checkpoint]",
    )
    fresh_states: bool = flag(
        "keep the master weights, and start the optimizer fresh: no states, step 0"
    )
    format: str = option(
        "",
        "files of DeepSpeed, or of FSDP's ranks as verl saves them, from such files [deepspeed]",
        default="deepspeed",
        choices=("deepspeed", "fsdp-ranks"),
        is_rare=True,
    )
    if_needed: bool = flag(f"{IF_NEEDED}; or if a job can resume from SRC as it is", group=OUTPUT)

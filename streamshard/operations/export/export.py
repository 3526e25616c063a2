"""`export`: writes weights, DeepSpeed's universal checkpoint, or PyTorch's distributed one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, Self, TypeAlias

from streamshard.engine.run.phases import COMPARING, Progress
from streamshard.engine.scan.target_comparison import first_difference
from streamshard.errors import DisagreementError, Option, UnsupportedError, UsageError
from streamshard.formats import pretrained
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import is_pipeline
from streamshard.formats.pickle.inert import show_few, show_key
from streamshard.formats.torch import torch_file
from streamshard.io.object_path import as_path
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import MASTER
from streamshard.operations.export.dcp_contents import DcpFiles, choose_contents
from streamshard.operations.export.model_sidecars import ModelSidecars, find_model_sidecars
from streamshard.operations.export.universal_files import UniversalFiles
from streamshard.operations.export.weights import (
    Weight,
    WeightFiles,
    Weights,
    about_adapter,
    adapter_weights,
    choose_weights,
)
from streamshard.options import takes
from streamshard.sizes import some_of
from streamshard.source.degree_change import other_degrees
from streamshard.source.source import Source
from streamshard.transfer.byte_accounting import ByteCounts
from streamshard.transfer.file_layout import Divider
from streamshard.transfer.plan import TransferPlan, plan_transfer
from streamshard.transfer.report import Report, Watched
from streamshard.transfer.target_writer import Output, Pass, TargetWriter
from streamshard.verb_options import DTYPES, FP32, ExportOptions

ExportFiles: TypeAlias = WeightFiles | UniversalFiles | DcpFiles
"""The files of an export."""
UNIVERSAL: Final = "universal"
_DCP: Final = "dcp"
_ONLY_FOR_WEIGHTS: Final = ("max_shard_size", "include", "exclude", "adapter")
_ONLY_FOR_DCP: Final = ("layout",)
_MODEL: Final = Option("like", what="the base model")
_MOST_NAMED: Final = 4
"""Most tensors that a note names."""


@dataclass(frozen=True, slots=True)
class ExportWriter(TargetWriter):
    """Writes an export's files."""

    files: ExportFiles
    sidecars: ModelSidecars
    """The sidecars, and the source to read from."""
    counts: ByteCounts

    @classmethod
    def of(cls, files: ExportFiles, sidecars: ModelSidecars) -> Self:
        """Count the bytes of the files."""
        counts = ByteCounts(sidecars.source)
        counts.add_all(sidecars.layouts())
        counts.add_all(files.layouts())
        return cls(files, sidecars, counts)

    def passes(self) -> Sequence[Pass]:
        return [lambda: chain(self.sidecars.layouts(), self.files.layouts())]

    def differences(self, place: Path, memory: MemoryPlan, progress: Progress) -> list[str]:
        """Compare each byte with what would be written now, of the source's elements cast again."""
        source, divider = self.sidecars.source, Divider(self.sidecars.source)
        progress.start(sum(self.counts.sizes.values()), COMPARING)
        files = (layout.divided(divider) for layouts in self.passes() for layout in layouts())
        path = first_difference(place, files, source.files, memory, progress.advance)
        return [] if path is None else [f"{path} is not what was written"]

    def finish(self, report: Report, overflowed: Mapping[str, int]) -> Report:
        overflows = sorted(overflowed.items(), key=lambda item: (-item[1], item[0]))
        count = sum(number for _, number in overflows)
        if not count:
            return replace(report, overflowed=0)
        named = some_of([f"{name} ({number:,})" for name, number in overflows], _MOST_NAMED)
        note = (
            f"{count:,} finite elements are too large for {report.dtype} and became infinite, in "
            f"{named}: use bf16."
        )
        return replace(report, overflowed=count, notes=(note, *report.notes))


class _Export(ExportOptions, Watched):
    """What `export` takes."""


@takes(ExportOptions)
def plan_export(options: ExportOptions) -> TransferPlan:
    """Read the source's headers and plan an export; writes nothing.

    Trained weights are exported from the master weights. Tied weights are stored once, as
    transformers stores them.

    With `universal` no other option from `dtype` to `layout` may be given. `like` may also be a
    base model, a directory of safetensors files, whose names and shapes the weights must have.
    """
    return _plan(options)


@takes(_Export)
def export(options: _Export) -> Report:
    """Export a checkpoint's weights; see `plan_export`."""
    return _plan(options).run(options.progress)


def _plan(options: ExportOptions) -> TransferPlan:
    require_directory(options)
    return plan_transfer(options, partial(prepare, options), takes_model=True)


def require_directory(options: ExportOptions) -> None:
    """Refuse the name of a file or a store."""
    suffix = as_path(options.target).suffix
    if suffix in (".safetensors", ".bin", ".pt", ".zarr", ".zip"):
        message = f"{options.target}: exported files go into a directory"
        raise UsageError(f"{message}; give a name without {suffix}")


def prepare(options: ExportOptions, opened: Source) -> Output:
    """Choose what is exported."""
    if options.format in (UNIVERSAL, _DCP):
        opened.require_states()
        opened.require_cut_states(in_blocks=False)
    is_model = opened.like is not None and bool(opened.like.foreign)
    opened.require_use_of_like(needed=is_model)
    if is_model and options.format in (UNIVERSAL, _DCP):
        message = (
            f"{Option('format', options.format)}: names and shapes of a base model are compared"
        )
        message = f"{message} with those of files of weights alone"
        raise UsageError(f"{message}; leave {Option('like')} out")
    joined = other_degrees().join(opened)
    if joined is not None:
        if options.format in (UNIVERSAL, _DCP) and is_pipeline(opened.checkpoint):
            message = (
                f"{opened.path}: a pipeline, which {Option('format', options.format)} does not"
            )
            form = Option("format", pretrained.SAFETENSORS)
            raise UnsupportedError(f"{message} write: give {form} or {pretrained.TORCH}")
        output = prepare(options, joined.source)
        return replace(output, check=joined.check)
    make = {UNIVERSAL: _universal, _DCP: _dcp}.get(options.format, _weights)
    try:
        output = make(opened, options)
    except (DisagreementError, UsageError, UnsupportedError) as error:
        raise type(error)(f"{opened.path}: {error}") from error
    return output


def _weights(source: Source, options: ExportOptions) -> Output:
    _require_defaults(options, _ONLY_FOR_DCP, "a distributed checkpoint alone")
    chosen = choose_weights(source.checkpoint, options, takes_experts=True)
    _require_trained_experts(source)
    if options.adapter:
        _require_defaults(options, ("max_shard_size",), "a whole model, not an adapter")
        chosen = adapter_weights(chosen, source.checkpoint)
    if source.like is not None and source.like.foreign:
        _require_same_model(chosen.weights, source.like, options)
    config = pretrained.ADAPTER_CONFIG if options.adapter else pretrained.CONFIG
    sidecars = find_model_sidecars(source, config)
    files = WeightFiles(
        chosen.weights, options.format, options.max_shard_size, is_adapter=options.adapter
    )
    adapter = () if options.adapter else about_adapter(chosen)
    notes = (*chosen.notes, *_tied(chosen, options.format), *adapter, *sidecars.notes)
    made = ExportWriter.of(files, sidecars)
    return _output(made, options, len(chosen.weights), notes, chosen.wide)


def _universal(source: Source, options: ExportOptions) -> Output:
    free = {"target", "format"} | ({"dtype"} if options.dtype == FP32 else set())
    own = [name for name in ExportOptions.__annotations__ if name not in free]
    _require_defaults(options, own, "files of weights, not a universal checkpoint")
    files = UniversalFiles(source)
    writer = ExportWriter.of(files, ModelSidecars(source, (), ()))
    return _output(writer, options, files.tensors(), tuple(files.notes()))


def _dcp(source: Source, options: ExportOptions) -> Output:
    _require_defaults(options, _ONLY_FOR_WEIGHTS, "files of weights, not a distributed checkpoint")
    chosen = choose_weights(source.checkpoint, options)
    contents = choose_contents(source.checkpoint, chosen, options.layout)
    files = DcpFiles(contents)
    writer = ExportWriter.of(files, ModelSidecars(source, (), ()))
    notes = (*contents.notes, *chosen.notes)
    return _output(writer, options, files.tensors(), notes, chosen.wide)


def _require_defaults(options: ExportOptions, names: Sequence[str], what: str) -> None:
    """Refuse options that have no meaning for a format."""
    for name in names:
        if options.is_given(name):
            raise UsageError(f"{Option(name)}: is for {what}; leave it out")


def _output(
    writer: ExportWriter,
    options: ExportOptions,
    tensors: int,
    notes: tuple[str, ...],
    wide: Sequence[str] = (),
) -> Output:
    """Describe the export; `wide` names what is left in float64, without having been asked for."""
    if wide:
        left = f"Left in float64, which {FP32} would round: {show_few(wide)}."
        notes = (*notes, f"{left} {Option('dtype', FP32)} casts them.")
    source = writer.sidecars.source
    return Output(
        source=source,
        writer=writer,
        options={
            "verb": "export",
            "tag": source.checkpoint.tag,
            "format": options.format,
            "dtype": DTYPES[options.dtype or FP32] + ", and float64 as it is" * bool(wide),
            "max_shard_size": str(options.max_shard_size),
            "include": " ".join(options.include),
            "exclude": " ".join(options.exclude),
            "adapter": str(options.adapter),
            "layout": options.layout,
        },
        source_world_size=source.checkpoint.ranks,
        tensors=tensors,
        dtype=(options.dtype or FP32) if options.format != UNIVERSAL else None,
        notes=(*notes, *source.checkpoint.remarks),
    )


def _tied(chosen: Weights, form: str) -> Iterator[str]:
    """Say which names are not stored because they are tied to a name that is."""
    if form == pretrained.TORCH:
        return
    tied = [f"{name} = {w.names[0]}" for w in chosen.weights for name in w.names[1:]]
    if tied:
        yield f"Tied, and stored once under the second name: {some_of(tied, _MOST_NAMED)}."


def _require_same_model(
    weights: Sequence[Weight], model: Checkpoint, options: ExportOptions
) -> None:
    """Refuse weights of which a base model has other names or shapes.

    A model that lists a tied weight under one of its names alone has the weight. Where options
    choose some of the weights, the model may have more.
    """
    shapes = {entry.name: entry.shape for entry in model.model_parts[0].module}
    unknown = [weight.names[0] for weight in weights if not shapes.keys() & {*weight.names}]
    if unknown:
        message = f"{_MODEL} lacks {show_few(unknown)}"
        raise DisagreementError(
            f"{message}: leave out with {Option('exclude')} what is not its own"
        )
    for weight in weights:
        for name in weight.names:
            if shapes.get(name, weight.shape) != weight.shape:
                message = f"'{name}' is {list(weight.shape)}, in {_MODEL}"
                raise DisagreementError(f"{message} {list(shapes[name])}")
    written = {name for weight in weights for name in weight.names}
    is_part = options.include or options.exclude
    missing = [] if is_part else [name for name in shapes if name not in written]
    if missing:
        message = f"lacks {show_few(missing)}, which {_MODEL} has"
        raise DisagreementError(message)


def _require_trained_experts(source: Source) -> None:
    """Refuse experts with tensors other than master weights, which only their own files hold."""
    checkpoint = source.checkpoint
    model_part = checkpoint.model_parts[0]
    counts = model_part.model_state.get(names.EXPERT_COUNTS)
    if not counts or (checkpoint.has_auto_experts and checkpoint.layout.stage == 3):
        return
    if not source.kind.is_tag or not isinstance(counts, list):
        message = "the model has experts in files of their own, which are in a store unread: write"
        raise UnsupportedError(f"{message} its files with 'streamshard repartition', export these")
    trained = {
        t.name for t in checkpoint.tensors if t.state == MASTER and t.model_part == model_part.name
    }
    present = {file.path for file in checkpoint.files}
    for layer, count in enumerate(counts):
        for expert in range(count):
            name = f"{checkpoint.tag}/{names.expert_file(layer, expert, 0)}"
            if name not in present:
                message = f"{source.path / name}: missing, although '{names.EXPERT_COUNTS}' in the"
                raise UnsupportedError(f"{message} model file lists it: not exported")
            path = source.path / name
            root = torch_file.read(path, -1).root
            entries = root if isinstance(root, dict) else {path.name: root}
            beside = [name for name in entries if name not in trained]
            if beside or not entries:
                what = f"'{show_key(beside[0])}'" if beside else "nothing"
                message = f"{path}: has {what}, and not trained weights of an expert alone"
                raise UnsupportedError(f"{message}: frozen weights and buffers are not exported")

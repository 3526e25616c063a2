"""`merge`: writes a weighted mean of checkpoints, as files for a job, a store, or weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from streamshard.compare.assessment import AssessedCheckpoint, RunAssessment
from streamshard.compare.comparison import Pair
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import Progress, Silent
from streamshard.errors import IncompleteError, Option, UnsupportedError, UsageError
from streamshard.formats.deepspeed import given_config, names
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import is_pipeline
from streamshard.io.entries import listings_kept, resolve
from streamshard.io.object_path import PACKED_SUFFIX, as_path, is_packed_name
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.merging.merged_source import LINEAR_STATES, Merging, without_weight_files
from streamshard.model import BLOB, FILE, MASTER, MODULE
from streamshard.operations.convert import convert
from streamshard.operations.export import export
from streamshard.operations.repartition import repartition
from streamshard.options import Path_, RepartitionOptions, takes
from streamshard.registry import WITH_LAYER_PAIRS, load
from streamshard.sizes import counted, some_of
from streamshard.source.source import Source, open_source
from streamshard.transfer.plan import TransferPlan, plan_opened
from streamshard.transfer.report import Report, Watched
from streamshard.transfer.run_identity import digest_of_headers
from streamshard.transfer.target import require_separate
from streamshard.transfer.target_writer import Output
from streamshard.verb_options import ConvertOptions, ExportOptions, MergeOptions


class _Merge(MergeOptions, Watched):
    """What `merge` takes."""


@takes(MergeOptions)
def plan_merge(options: MergeOptions) -> TransferPlan:
    """Read the sources' headers and plan their merge; writes nothing.

    The master weights of the target are a weighted sum of those of the sources: added up in
    float64, in the order of the sources, and rounded once. Weights in 16 bits are cast from them.
    All else is the newest source's: optimizer states, step, scheduler, random states, client state,
    buffers and frozen weights. The newest is that of the highest step, or the last one given.

    Tensors of all sources must have the same names and shapes.

    Raises
    ------
    IntegrityError
        When it runs: a weight is NaN or infinite. The target does not come into being.
    """
    return _plan(options)


@takes(_Merge)
def merge(options: _Merge) -> Report:
    """Write a weighted mean of checkpoints; see `plan_merge`."""
    return _plan(options).run(options.progress)


def _plan(options: MergeOptions) -> TransferPlan:
    writes = _writer_of(options)
    form, notes = _as_text(options.weights), list[str]()
    sources: Sequence[Path_] = options.sources
    if not sources:
        raise UsageError("no checkpoint to merge is given; does a pattern match nothing?")
    if options.last is not None:
        if len(sources) != 1:
            message = f"{Option('last', options.last)}: is for one directory of checkpoints"
            raise UsageError(f"{message}, and there are {counted(len(sources), 'source')}")
        sources, notes = _last_whole(str(sources[0]), options.last)
    weights = coefficients(form, len(sources))
    chosen = options.replaced(source=[*map(str, sources)], weights=form, last=None)
    mergings: list[Merging] = []

    def open_all() -> Source:
        mergings.append(_opened(chosen, weights))
        return mergings[0].source()

    def prepare(source: Source) -> Output:
        output = writes(chosen, source)
        shown = notes if len(sources) > 1 or options.last else [*notes, _alone(mergings[0])]
        return _as_merged(output, mergings[0], chosen, shown)

    return plan_opened(chosen, open_all, prepare)


def _opened(options: MergeOptions, weights: Sequence[float]) -> Merging:
    """Open all sources, and refuse what cannot be merged."""
    with listings_kept():
        sources = [open_source(path) for path in options.sources]
    target = as_path(options.target)
    places = [resolve(source.place) for source in sources]
    for source, place in zip(sources, places, strict=True):
        require_separate(source.path, target, source.directories)
        if source.checkpoint.is_dumps:
            message = "raw dumps, without the model's files, are not merged; give the whole"
            raise UnsupportedError(f"{message} checkpoint", path=source.path)
        if places.count(place) > 1:
            raise UsageError(f"{place}: given twice; give each checkpoint once, with its weight")
    newest = _newest(sources, str(options.weights))
    sources[newest], copies = without_weight_files(sources[newest]), list[Pair]()
    if is_pipeline(sources[newest].checkpoint):
        sources[newest], copies = load(WITH_LAYER_PAIRS)(sources[newest])
    averages_states = options.states != "newest"
    if averages_states:
        _require_linear(sources[newest], weights)
    return Merging(sources, weights, newest, averages_states, copies)


def _alone(merging: Merging) -> str:
    place = merging.sources[0].place
    advice = f"{Option('last', 5)} takes the newest five of a directory"
    return f"Only {place} is merged, so nothing is averaged; {advice}."


def _newest(sources: Sequence[Source], form: str) -> int:
    """Return which source has the highest step, or is given last."""
    steps = [source.checkpoint.model_parts[0].model_state.get("global_steps") for source in sources]
    counts = [step for step in steps if isinstance(step, int)]
    if len(counts) < len(steps):
        return len(steps) - 1
    if _depends_on_order(form) and counts != sorted(counts):
        listed = ", ".join(f"{step:,}" for step in counts)
        message = f"{Option('weights', form)}: depends on age, and the steps are {listed}; give"
        raise UsageError(f"{message} the oldest first")
    return max(range(len(counts)), key=lambda number: (counts[number], number))


def _require_linear(source: Source, weights: Sequence[float]) -> None:
    """Refuse states of which a mean has no meaning."""
    option = Option("states", "mean")
    states = {t.state for t in source.checkpoint.tensors} - {MASTER, MODULE, BLOB, FILE}
    if uncut := source.checkpoint.uncut:
        message = f"{option}: not all states have a mean: {uncut.why}"
        raise UnsupportedError(message, path=uncut.path or source.place)
    if not states:
        raise UsageError(f"{option}: there are no optimizer states", path=source.place)
    if others := sorted(states - {*LINEAR_STATES}):
        message = f"{option}: a mean of {some_of(others)} has no meaning; leave it out"
        raise UnsupportedError(message, path=source.place)
    if min(weights) < 0:
        message = f"{option}: with a negative weight a second moment may become negative; leave one"
        raise UsageError(f"{message} of them out")


def _writer_of(options: MergeOptions) -> Callable[[MergeOptions, Source], Output]:
    """Return what decides the target's files, by its name and by the options."""
    target = as_path(options.target)
    is_store = target.suffix == ".zarr" or is_packed_name(target)
    if options.format is not None:
        kind, what = _weights, "a model directory"
    else:
        kind, what = (_store, "a store") if is_store else (_native, "a run directory")
    for other, own in _OPTIONS_OF.items():
        for name in own if other is not kind else ():
            if options.is_given(name):
                message = f"{Option(name)}: is of no use for {options.target}, which is {what}"
                raise UsageError(f"{message}; leave it out")
    return kind


def _native(options: MergeOptions, source: Source) -> Output:
    source.require_training_state("merge")
    _require_no_other_copies(source)
    file = options.ds_config_file
    wanted = given_config.read_file(as_path(file)) if file else None
    repartition_options = RepartitionOptions(
        source.path,
        options.target,
        world_size=options.world_size or source.checkpoint.ranks,
        zero_stage=options.zero_stage,
        ds_config_file=file,
    )
    return repartition.prepare(None, repartition_options, wanted, source)


def _store(options: MergeOptions, source: Source) -> Output:
    source.require_training_state("merge")
    _require_no_other_copies(source)
    codec, chunk_size = options.codec, options.chunk_size
    given = ConvertOptions(source.path, options.target, codec=codec, chunk_size=chunk_size)
    return convert.prepare(given, source)


def _weights(options: MergeOptions, source: Source) -> Output:
    form, dtype = str(options.format), options.dtype
    export_options = ExportOptions(source.path, options.target, format=form, dtype=dtype)
    export.require_directory(export_options)
    if options.states != "newest" and form in ("safetensors", "torch"):
        message = f"{Option('states', options.states)}: weights alone have no optimizer states"
        raise UsageError(f"{message}; leave it out")
    if form == "universal":
        source.require_training_state("merge")
    return export.prepare(export_options, source)


_OPTIONS_OF = {
    _native: ("world_size", "zero_stage", "ds_config_file"),
    _store: ("codec", "chunk_size"),
    _weights: ("format", "dtype"),
}
"""What decides the target's files → the options that it alone has."""


def _require_no_other_copies(source: Source) -> None:
    """Refuse checkpoints with weights in 16 bits that are carried along and not read."""
    checkpoint, place = source.checkpoint, source.place
    way = f"write weights instead, with {Option('format', 'safetensors')}"
    if not checkpoint.layout.stage:
        message = "saved without ZeRO (stage 0), which does not name the master weights in the"
        raise UnsupportedError(f"{message} optimizer's state: {way}", path=place)
    has_experts = any(part.model_state.get(names.EXPERT_COUNTS) for part in checkpoint.model_parts)
    if has_experts:
        message = f"has files of experts with weights in 16 bits, which are not merged yet: {way}"
        raise UnsupportedError(message, path=place)


def _as_merged(
    output: Output, merging: Merging, options: MergeOptions, notes: Sequence[str]
) -> Output:
    """Return the output of another verb as that of a merge."""
    headers = " ".join(digest_of_headers(source.checkpoint) for source in merging.sources)
    decisive = {
        **output.options,
        "verb": "merge",
        "weights": ",".join(map(repr, merging.weights)),
        "states": options.states,
        "sources": headers,
    }

    def check(memory: MemoryPlan, progress: Progress) -> Sequence[str]:
        noted = () if output.check is None else output.check(memory, progress) or ()
        return [*noted, *merging.kept_differ(memory, progress)]

    return replace(
        output,
        options=decisive,
        notes=(*output.notes, *notes),
        is_reusable=False,
        check=check,
    )


def _last_whole(directory: str, count: int) -> tuple[list[str], list[str]]:
    """Return the newest whole checkpoints in a directory, the oldest first, and notes on others.

    Headers alone are read: the merge itself refuses what is not healthy.
    """
    assessment = RunAssessment(directory, Limits(0, None, None), Silent(), is_quick=True)
    chosen, passed_over = dict[int, str](), list[str]()
    # A store of a tag that is there too is no other checkpoint.
    for candidate in sorted(assessment.order(), key=_newest_first):
        if len(chosen) == count:
            break
        if candidate.step is not None and candidate.step not in chosen:
            checkpoint = assessment.assess(candidate)
            if checkpoint.is_good:
                chosen[candidate.step] = checkpoint.path
            else:
                passed_over.append(f"Passed over {checkpoint.path}: {checkpoint.reason}.")
    if len(chosen) < count:
        known = f"it holds {counted(len(chosen), 'whole checkpoint')} with a known step"
        advice = f"; write {Option('last', len(chosen))}" if len(chosen) > 1 else ""
        error = IncompleteError(f"{directory}: {Option('last', count)}: {known}{advice}")
        for reason in passed_over:
            error.add_note(reason)
        raise error
    return [*chosen.values()][::-1], [*assessment.notes, *passed_over]


def _newest_first(one: AssessedCheckpoint) -> tuple[int, bool]:
    """Return a sort key: newest first, and of one step the store last."""
    return -(one.step or 0), one.path.endswith((".zarr", PACKED_SUFFIX))


_CURVES: Final[Mapping[str, Callable[[float], float]]] = {
    "1-sqrt": lambda at: 1 - math.sqrt(at),
    "cosine": lambda at: (1 + math.cos(math.pi * at)) / 2,
}
"""Name → learning rate at a part of a decay from 1 to 0, from the first checkpoint on.

Merging k checkpoints with the weights f(j/k) - f((j+1)/k), for j from 0 to k - 1, weighs what was
learned between them as this decay would have (arXiv 2507.17634). A linear one amounts to the mean.
"""
_MEANS: Final = ("mean", "linear")
"""Names of equal weights, which are also those of a decay along a line."""
_EMA: Final = "ema:"
_FORMS: Final = f"{', '.join((*_MEANS, *_CURVES))}, {_EMA}0.9, or numbers such as 0.2,0.3,0.5"
_TOLERANCE: Final = 1e-9
"""What the sum of weights may be off; in float32 it makes no difference."""


def _depends_on_order(form: str) -> bool:
    """Tell whether weights depend on which checkpoint is older.

    >>> [_depends_on_order(form) for form in ("1-sqrt", "ema:0.9", "mean", "0.5,0.5")]
    [True, True, False, False]
    """
    return form in _CURVES or form.startswith(_EMA)


def _as_text(weights: str | Sequence[float]) -> str:
    """Return weights as they are written on the command line.

    >>> _as_text([0.25, 0.75]), _as_text("mean")
    ('0.25,0.75', 'mean')
    """
    if isinstance(weights, str):
        return weights
    try:
        return ",".join(repr(float(weight)) for weight in weights)
    except (TypeError, ValueError) as error:
        message = f"{Option('weights', f'{weights}')}: choose one of {_FORMS}"
        raise UsageError(message) from error


def coefficients(form: str, count: int) -> list[float]:
    """Return the weight of each of some checkpoints, the oldest first.

    >>> coefficients("mean", 4)
    [0.25, 0.25, 0.25, 0.25]
    >>> [round(one, 3) for one in coefficients("1-sqrt", 3)]
    [0.577, 0.239, 0.184]
    >>> coefficients("ema:0.5", 3)
    [0.25, 0.25, 0.5]
    """
    if form in _MEANS:
        return [1 / count] * count
    if form in _CURVES:
        rates = [_CURVES[form](place / count) for place in range(count)]
        return [one - other for one, other in pairwise([*rates, 0.0])]
    if form.startswith(_EMA):
        (kept,) = _numbers(form, form.removeprefix(_EMA).split("\n"))
        if not 0 <= kept < 1:
            raise UsageError(f"{Option('weights', form)}: give a part that is kept, such as 0.9")
        newer = [(1 - kept) * kept**age for age in range(count - 1)]
        return [kept ** (count - 1), *newer[::-1]]
    return _listed(form, count)


def _listed(form: str, count: int) -> list[float]:
    words, option = form.split(","), Option("weights", form)
    weights = _numbers(form, words)
    if len(weights) != count:
        both = f"{counted(len(weights), 'weight')}, and {counted(count, 'checkpoint')}"
        raise UsageError(f"{option}: {both}; give one for each of them")
    total = math.fsum(weights)
    if abs(total - 1) > _TOLERANCE:
        raise UsageError(
            f"{option}: their sum is {total:.12g}, not 1; give weights that add up to 1"
        )
    return weights


def _numbers(form: str, words: Sequence[str]) -> list[float]:
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise UsageError(f"{Option('weights', form)}: choose one of {_FORMS}")
    return numbers

"""`diff`: measures how much two checkpoints differ, in any formats, stages and world sizes."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from streamshard.compare.comparison import Pair, Pairing, RunPart, Runs, fit_sides, open_alike
from streamshard.compare.matching import pair_up
from streamshard.engine.jobs.executor import Job
from streamshard.engine.numeric.cast import wider
from streamshard.engine.run import memory_limits, resident_memory
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import Count, Silent
from streamshard.engine.scan.distance import BLOCK_NUMEL, Measured, Measurer
from streamshard.errors import Option, UsageError
from streamshard.formats.name_patterns import is_named
from streamshard.io.object_path import as_path
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.model import FILE, LogicalTensor
from streamshard.operations.diff.diff_report import (
    TRAINING,
    DiffReport,
    StateDiff,
    TensorDiff,
    Totals,
)
from streamshard.options import takes
from streamshard.source.degree_change import other_degrees
from streamshard.source.source import Source, requests
from streamshard.source.unfinished import require_finished
from streamshard.transfer.report import Watched
from streamshard.verb_options import DiffOptions

_TENSOR_BYTES: Final = 4096
"""Most memory that the result takes for each tensor while it is computed."""
_BITS_ONLY: Final = frozenset({TRAINING, FILE})
"""States that are compared as bytes only: as numbers they have no meaning."""


class _Diff(DiffOptions, Watched):
    """What `diff` takes."""


@takes(_Diff)
def diff(options: _Diff) -> DiffReport:
    """Measure the differences between the tensors of two checkpoints; changes nothing.

    Each side is a run directory with `latest`, a tag directory, a store, or a template of raw
    per-rank dumps. Sums are taken in float64 over blocks of 32,768 elements, and then over the
    blocks in order. So the result depends only on the values, not on formats, workers or memory.
    Its error is less than 1e-10 of the sum of the absolute values, for up to 10^10 elements.
    Everything that is not a tensor is compared as `verify` compares it. Sides whose models AutoTP
    or the stages of a pipeline cut into unequal parts are compared as whole tensors, after what
    each holds several times has been found equal.

    Raises
    ------
    StreamshardError
        One of its subclasses, each with its own exit code; see `streamshard.errors`.

    Examples
    --------
    >>> import streamshard
    >>> found = streamshard.diff("runs/7b", "runs/7b-again")
    >>> [tensor.name for tensor in found.changed]
    ['state/fp32/layers.0.weight']
    >>> found.changed[0].distance.changed, found.changed[0].distance.max_abs
    (1, 1.0)
    """
    floor_bytes = resident_memory.resident_bytes()
    resident_memory.restart_peak()
    began = time.monotonic()
    left_path, right_path, params = options.left, options.right, options.params
    for side in (left_path, right_path):
        require_finished(as_path(side))
    first, second = requests(options, left_path, right_path)
    limit_bytes = memory_limits.limit_or_default(options.memory_limit, floor_bytes)
    limits = Limits(floor_bytes, limit_bytes, options.workers)
    left, right = open_alike(first, second, first.open(), second.open())
    left.require_use_of_like(needed=right.needs_like)
    left, right, joined = other_degrees().join_unequal(left, right)
    pairing = pair_up(left, right, by_value=True)
    notes = list(pairing.notes)
    if params:
        _choose(pairing, left, right, params)
        notes.append(f"Compared are tensors named {', '.join(params)}, and nothing else.")
    notes += _notes(pairing.pairs)
    runs = Runs(left, right, pairing.pairs, block_numel=BLOCK_NUMEL)
    plan = fit_sides(limits, left, right, copies_bytes=_TENSOR_BYTES * len(pairing.pairs))
    progress = options.progress or Silent()
    read = Count(progress.advance)
    for put_together in joined:
        if put_together.check is not None:
            notes += put_together.check(plan, progress)
    progress.start(2 * runs.nbytes)
    totals = measured(runs, plan, read.add)
    tensors, states = _summed(pairing.pairs, totals)
    return DiffReport(
        left=str(left_path),
        right=str(right_path),
        kinds=(left.kind.name, right.kind.name),
        tags=(left.checkpoint.tag, right.checkpoint.tag),
        tensors=tensors,
        states=states,
        differences=tuple(pairing.differences),
        notes=tuple(notes),
        bytes_read=read.value,
        floor_bytes=floor_bytes,
        limit_bytes=limit_bytes,
        projected_bytes=plan.projected_bytes,
        peak_bytes=resident_memory.peak_bytes(),
        seconds=time.monotonic() - began,
    )


def _choose(pairing: Pairing, left: Source, right: Source, patterns: Sequence[str]) -> None:
    """Keep only the tensors whose names match a pattern."""
    names = _Names(left, right)
    known = [p.tensor for p in pairing.pairs if p.tensor is not None]
    known_names = [name for t in (*known, *pairing.tensors.values()) for name in names.of(t)]
    for pattern in patterns:
        if not any(is_named(name, [pattern]) for name in known_names):
            example = f"; one is '{known_names[0]}'" if known_names else ""
            raise UsageError(f"{Option('params', [pattern])}: no tensor has such a name{example}")

    def is_wanted(tensor: LogicalTensor | None) -> bool:
        found = () if tensor is None else names.of(tensor)
        return any(is_named(name, patterns) for name in found)

    pairing.pairs[:] = [pair for pair in pairing.pairs if is_wanted(pair.tensor)]
    differences = pairing.differences
    differences[:] = [d for d in differences if is_wanted(pairing.tensors.get(d.name))]


class _Names:
    """The names by which a user can choose a tensor."""

    def __init__(self, *sources: Source) -> None:
        self._tied: dict[tuple[str, str], dict[str, None]] = {}
        for source in sources:
            for model_part in source.checkpoint.model_parts:
                for entry in model_part.module:
                    if entry.kind == "alias":
                        key = model_part.name, entry.alias_of
                        self._tied.setdefault(key, {})[entry.name] = None

    def of(self, tensor: LogicalTensor) -> list[str]:
        """Return a tensor's name and tied names, each also with its model-parallel part."""
        if tensor.state in _BITS_ONLY:
            return []
        plain = [tensor.name, *self._tied.get((tensor.model_part, tensor.name), ())]
        return [*plain, *(f"{tensor.model_part}/{name}" for name in plain if tensor.model_part)]


def measured(runs: Runs, plan: MemoryPlan, progress: Callable[[int], None]) -> dict[Pair, Totals]:
    """Read the pairs of tensors, and measure them."""
    totals = {pair: Totals(pair.nbytes // pair.itemsize) for pair in runs.pairs}

    def job(run: Sequence[RunPart]) -> Job[Measurer, list[Measured]]:
        return partial(Measurer.measure, pair=runs.regions(run))

    for run, results in runs.work(Measurer, job, plan, progress):
        for part, found in zip(run, results, strict=True):
            totals[runs.pairs[part.number]].add(found)
    return totals


def _summed(
    pairs: Sequence[Pair], totals: Mapping[Pair, Totals]
) -> tuple[tuple[TensorDiff, ...], tuple[StateDiff, ...]]:
    """Return the result for every tensor, and for all tensors of each state together."""
    tensors = []
    states: dict[str, tuple[Totals, list[TensorDiff]]] = {}
    for pair in pairs:
        state = TRAINING if pair.tensor is None else pair.tensor.state
        bytes_only = f"{pair.itemsize}-byte" if pair.tensor is None else ""
        tensor_diff = TensorDiff(
            name=pair.name,
            state=state,
            dtypes=(bytes_only or pair.left.dtype, bytes_only or pair.right.dtype),
            shape=(pair.nbytes // pair.itemsize,) if pair.tensor is None else pair.tensor.shape,
            distance=totals[pair].distance(are_numbers=state not in _BITS_ONLY),
        )
        tensors.append(tensor_diff)
        together, of_state = states.setdefault(state, (Totals(), []))
        together.join(totals[pair])
        of_state.append(tensor_diff)
    return tuple(tensors), tuple(
        StateDiff(
            state=state,
            tensors=len(diffs),
            changed_tensors=sum(tensor.distance.changed > 0 for tensor in diffs),
            distance=together.distance(are_numbers=state not in _BITS_ONLY),
        )
        for state, (together, diffs) in states.items()
    )


def _notes(pairs: Sequence[Pair]) -> Iterator[str]:
    """Say how tensors are compared whose dtypes differ."""
    mixed = [pair for pair in pairs if pair.left.dtype != pair.right.dtype]
    widened = sum(pair.dtype == wider(pair.left.dtype, pair.right.dtype) for pair in mixed)
    if widened:
        yield (
            f"Tensors of different dtypes: {widened:,}. Compared are their values, widened to a "
            "dtype that holds both exactly."
        )
    if len(mixed) > widened:
        yield (
            f"Module weights that one side does not keep: {len(mixed) - widened:,}. Compared is "
            "the cast of its master weights."
        )

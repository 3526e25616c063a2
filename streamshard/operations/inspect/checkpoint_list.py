"""Lists the checkpoints of a directory: the tags of a run, or a framework's checkpoints."""

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

from streamshard import registry
from streamshard.errors import SourceError, StreamshardError, UnsupportedError, release_frames
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read import validation
from streamshard.formats.deepspeed.read.validation import Recorded
from streamshard.io.entries import entries_below, examine, is_file, paths_in
from streamshard.io.files import source_errors, stays_inside, unreadable
from streamshard.operations.inspect.inspect_report import CheckpointSummary
from streamshard.source.candidates import find_candidates, kind_at, step_of_path
from streamshard.source.completeness import require_named, require_saved_to_end
from streamshard.source.source import Source, open_source
from streamshard.source.suspicion import (
    StepCounts,
    known_health,
    skipped_since,
    steps_of,
    suspicions,
)
from streamshard.source.tag_directory import find_tag

_UNKNOWN: Final = Recorded(None, None, None, None)


def summaries(root: Path, opened: Source | None = None) -> tuple[CheckpointSummary, ...]:
    """Summarize every checkpoint in a directory, in order of steps, from headers alone.

    `opened`: the directory's latest checkpoint, if it is open already.
    """
    with source_errors(root):
        latest = _latest(root)
        counted = [_summary(root, name, latest, opened) for name in find_candidates(root)]
    counted.sort(key=lambda one: _age(one[0]))
    checkpoints = [one for one, _ in counted]
    for number, ((before, older), (one, newer)) in enumerate(pairwise(counted), 1):
        if older is not None and newer is not None:
            skipped = skipped_since(before.path, older, newer)
            checkpoints[number] = replace(one, warnings=(*one.warnings, *skipped))
    known = [one.path for one in checkpoints if one.step is not None]
    return tuple(replace(one, is_newest=one.path in known[-1:]) for one in checkpoints)


def _age(summary: CheckpointSummary) -> tuple[int, int, str, str]:
    """Return a sort key: the step; then, for copies of a step, the step in the name, then the time.

    Checkpoints without a known step come first.
    """
    named = step_of_path(summary.path)
    step, named = (-1 if number is None else number for number in (summary.step, named))
    return step, named, summary.changed or "", summary.path


def _latest(root: Path) -> str | None:
    try:
        return find_tag(root, None)[1].relative_to(root).as_posix()
    except (SourceError, OSError, ValueError):  # there is none; or the directory is a tag itself
        return None


def _summary(
    root: Path, name: str, latest: str | None, opened: Source | None
) -> tuple[CheckpointSummary, StepCounts | None]:
    place = root / name
    kind = registry.reader_of("native")
    problem, recorded, nbytes, changed, is_known = None, _UNKNOWN, 0, None, True
    warnings: tuple[str, ...] = ()
    is_healthy, steps = None, None
    try:
        kind = kind_at(place)
        nbytes, changed = _size_and_time(place)
        if not name.isprintable():
            raise SourceError(names.NO_TAG, path=place)
        source = opened if opened and latest == name else open_source(place)
        recorded = _recorded(source)
        if kind.is_tag and place.parent != root and not is_file(place / names.LATEST):
            require_named(place.parent)
        require_saved_to_end(source)
        health, warnings = known_health(source), tuple(suspicions(source.checkpoint, {}))
        is_healthy = None if health is None else all(one.is_good for one in health.values())
        steps = steps_of(source.checkpoint)
    except OSError as error:
        problem = str(unreadable(error, place))
    except StreamshardError as error:
        release_frames(error)
        problem, is_known = str(error), not isinstance(error, UnsupportedError)
        recorded = _recorded_in(place) if kind.is_tag else _UNKNOWN
    step = recorded.global_steps
    summary = CheckpointSummary(
        path=name,
        kind=kind.name,
        step=step_of_path(name) if step is None else step,
        zero_stage=recorded.zero_stage,
        world_size=recorded.world_size,
        nbytes=nbytes,
        changed=changed,
        is_whole=problem is None if is_known else None,
        is_newest=False,
        is_latest=name == latest,
        problem=problem,
        is_healthy=is_healthy,
        warnings=warnings,
    )
    return summary, steps


def _recorded(source: Source) -> Recorded:
    checkpoint = source.checkpoint
    steps = checkpoint.model_parts[0].model_state.get("global_steps")
    return Recorded(
        zero_stage=checkpoint.layout.stage,
        world_size=checkpoint.ranks,
        global_steps=steps if isinstance(steps, int) else None,
        version=None,
    )


def _recorded_in(place: Path) -> Recorded:
    """Return what the readable shards record of a checkpoint that cannot be opened."""
    try:
        run_dir, tag_dir = find_tag(place, None)
        shards = [path for path in sorted(paths_in(tag_dir)) if names.parse(path.name)]
        regular = [
            path for path in shards if stays_inside(path, run_dir, tag_dir) and is_file(path)
        ]
        return validation.recorded(regular)
    except (StreamshardError, OSError):
        return _UNKNOWN


def _size_and_time(place: Path) -> tuple[int, str | None]:
    own = examine(place)
    found = [own] if own.is_file else [entry.status() for entry in entries_below(place)]
    stats = [status for status in found if status.is_file]
    newest = max((stat.modified_ns for stat in stats), default=None)
    time = None if newest is None else datetime.fromtimestamp(newest // 10**9, UTC).isoformat()
    return sum(stat.nbytes for stat in stats), time

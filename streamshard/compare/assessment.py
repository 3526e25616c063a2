"""Assesses the checkpoints of a directory, newest first: whether each is whole, and healthy."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path

from streamshard.checks.problems import UNHEALTHY, Findings
from streamshard.checks.scan import scan
from streamshard.compare.tensor_content import TensorUnits, recorded
from streamshard.engine.run.memory_limits import Limits
from streamshard.engine.run.phases import Count, Progress
from streamshard.errors import SourceError, StreamshardError, release_frames
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import show
from streamshard.io.entries import is_directory, is_file, lexists, listings_kept, paths_in
from streamshard.io.files import source_errors
from streamshard.io.object_path import as_path
from streamshard.source.candidates import find_candidates, step_of_path, without_suffix
from streamshard.source.completeness import require_named, require_saved_to_end
from streamshard.source.sidecars import has_shards
from streamshard.source.source import Request, Source, open_source
from streamshard.source.structure import check_structure
from streamshard.source.suspicion import known_health, skipped_since, steps_of, suspicions
from streamshard.source.tag_directory import require_there


@dataclass(frozen=True, slots=True)
class AssessedCheckpoint:
    """A checkpoint of a run, and whether a job can go on from it."""

    path: str
    """The directory as it was given, with the name of the checkpoint in it."""
    step: int | None
    """As its name tells it, or its files; None if neither does."""
    is_whole: bool | None = None
    """Whether all is there, and as it was saved; None if that was not looked at."""
    is_healthy: bool | None = None
    """Whether its weights and optimizer states hold neither NaN nor infinities; None if nothing
    tells, and it was not read."""
    reason: str = ""
    """Why a job should not go on from it."""
    warnings: tuple[str, ...] = ()
    """What is suspicious."""

    @property
    def is_good(self) -> bool:
        """Whether a job can go on from it, as far as it was looked at."""
        return self.is_whole is True and self.is_healthy is not False


@dataclass(frozen=True, slots=True)
class Assessor:
    """Reads checkpoints to find out whether they are good."""

    limits: Limits
    progress: Progress
    read: Callable[[int], None]
    """Counts bytes that were read."""

    def find(self, source: Source, request: Request) -> Findings:
        """Read a checkpoint until there is a problem: first its numbers, then its checksums."""
        known = known_health(source)
        findings = self._measured(source) if known is None else recorded(source.path, known)
        if findings.problems:
            return findings
        checked = check_structure(replace(request, opened=source), findings)
        if not findings.problems:
            self.progress.start(checked.nbytes)
            checked.read(self.limits.fit(checked.codec_bytes, checked.files), self.read)
        return findings

    def _measured(self, source: Source) -> Findings:
        """Read weights and optimizer states, up to the first tensor with NaN or infinities."""
        findings = Findings()
        units = TensorUnits(source, findings)
        wanted = takewhile(lambda _: not findings.problems, units)
        self.progress.start(units.nbytes)
        plan = self.limits.fit(source.codec_bytes, source.files)
        scan(wanted, source.files, plan, self.read)
        return findings


class RunAssessment:
    """A directory with checkpoints, which are assessed one by one."""

    def __init__(
        self, directory: str, limits: Limits, progress: Progress, *, is_quick: bool = False
    ) -> None:
        self._given = directory
        self._root = as_path(directory)
        self._is_quick = is_quick
        self._names: dict[AssessedCheckpoint, str] = {}
        self._before: dict[str, str] = {}
        """Name of a checkpoint → that of the one before it."""
        self._depth = 0
        """How many directories lie between the run directory and the tag that `latest` names."""
        self._count = Count(progress.advance)
        self._assessor = Assessor(limits, progress, self._count.add)
        self.notes: list[str] = []
        """What is wrong with the directory itself."""

    @property
    def bytes_read(self) -> int:
        return self._count.value

    def order(self) -> list[AssessedCheckpoint]:
        """List the checkpoints, newest first; of most of them nothing but the name is read.

        Names tell the steps, unless they are of several forms: then files do. If `latest` names a
        tag, those with a later step have a reason: their saves did not end, or another run left
        them.
        """
        with listings_kept(), source_errors(self._root):
            require_there(self._root)
            listed = find_candidates(self._root)
            candidates = [name for name in listed if name.isprintable()]
            hidden = (self._root / name for name in listed if not name.isprintable())
            self.notes += [f"{path}: {names.NO_TAG}" for path in hidden]
            candidates += self._deeper(candidates)
            latest = self._latest(candidates)
            steps = self._steps(candidates)
            last = -1 if latest is None else _number(steps[latest])
            later = {
                name
                for name in candidates
                if latest is not None and _number(steps[name]) > last and self._is_tag(name)
            }
        candidates.sort(
            key=lambda n: (_number(steps[n]), n == latest, _number(step_of_path(n)), n),
            reverse=True,
        )
        why = f"its step is above that of {latest}, which 'latest' names, so its save did not end"
        for name in candidates:
            reason = f"{why}, or another run left it" if name in later else ""
            path = f"{self._given.rstrip('/')}/{name}"
            self._names[AssessedCheckpoint(path, steps[name], reason=reason)] = name
        self._before = dict(pairwise(candidates))
        return [*self._names]

    def _deeper(self, candidates: Sequence[str]) -> list[str]:
        """List the tags around the one that `latest` names, if that lies deeper than others can."""
        with suppress(SourceError):  # reported where it is read for what it says
            name = names.latest_of(self._root) or ""
            place = self._root / name
            if names.is_tag(name) and name not in candidates and is_directory(place):
                beside = [p for p in paths_in(place.parent) if is_directory(p) and has_shards(p)]
                listed = [path.relative_to(self._root).as_posix() for path in beside]
                return [path for path in listed if path not in candidates]
        return []

    def _latest(self, candidates: Sequence[str]) -> str | None:
        try:
            name = names.latest_of(self._root)
        except SourceError as error:
            self.notes.append(str(error))
            return None
        if name is None and lexists(self._root / names.LATEST):
            message = "not a file that can be read, so the steps tell which is newest"
            self.notes.append(f"{self._root / names.LATEST}: {message}")
        if name is None or name in candidates:
            self._depth = 0 if name is None else name.count("/")
            return name
        what = f"names {show(name)}, where no checkpoint is" if name else "is empty"
        self.notes.append(f"{self._root / names.LATEST}: {what}, so the steps tell which is newest")
        return None

    def _steps(self, candidates: Sequence[str]) -> dict[str, int | None]:
        by_name = {name: step_of_path(name) for name in candidates}
        # The numbers of `epoch_1/step_9` and `epoch_2/step_3` do not say which one is newer.
        parts = [without_suffix(name).rpartition("/") for name in candidates]
        forms = {(around, re.sub(r"\d+", "N", name)) for around, _, name in parts}
        if len(forms) <= 1 and None not in by_name.values():
            return by_name
        return {name: self._recorded(name, step) for name, step in by_name.items()}

    def _recorded(self, name: str, otherwise: int | None) -> int | None:
        try:
            model = open_source(self._root / name).checkpoint.model_parts[0].model_state
        except StreamshardError as error:
            release_frames(error)
            return otherwise
        steps = model.get("global_steps")
        return steps if isinstance(steps, int) else otherwise

    def _is_tag(self, name: str) -> bool:
        """Tell whether a checkpoint is a tag as deep as the one that the run's `latest` names."""
        if name.count("/") != self._depth:
            return False
        inside = [self._root / name, *(self._root / name).parents[: self._depth]]
        return has_shards(inside[0]) and not any(is_file(p / names.LATEST) for p in inside)

    def assess(self, checkpoint: AssessedCheckpoint) -> AssessedCheckpoint:
        """Look at a checkpoint: at its headers, then at its numbers, then at its checksums."""
        if checkpoint.reason:
            return checkpoint
        place = self._root / self._names[checkpoint]
        try:
            return self._assessed(checkpoint, place)
        except StreamshardError as error:
            release_frames(error)
            return replace(checkpoint, is_whole=False, reason=_short(str(error), place))
        except OSError as error:
            reason = f"{error.filename or place}: cannot be read ({error.strerror})"
            return replace(checkpoint, is_whole=False, reason=reason)

    def _assessed(self, checkpoint: AssessedCheckpoint, place: Path) -> AssessedCheckpoint:
        opened = open_source(place)
        name = self._names[checkpoint]
        is_inner = opened.kind.is_tag and "/" in name and opened.path != place
        if is_inner and not self._is_tag(name):
            require_named(place.parent)
        require_saved_to_end(opened)
        if opened.checkpoint.dropped is not None:
            opened.require_states()
        skipped = self._skipped(opened, name)
        if self._is_quick:
            warnings = *suspicions(opened.checkpoint, {}), *skipped
            return replace(checkpoint, is_whole=True, warnings=warnings)
        findings = self._assessor.find(opened, Request(place))
        for problem in findings.problems[:1]:
            bad = replace(checkpoint, reason=_short(problem.message, place))
            is_read = problem.kind == UNHEALTHY
            return replace(bad, is_healthy=False) if is_read else replace(bad, is_whole=False)
        warnings = *suspicions(opened.checkpoint, findings.health), *skipped
        return replace(checkpoint, is_whole=True, is_healthy=True, warnings=warnings)

    def _skipped(self, opened: Source, name: str) -> list[str]:
        """Say whether the job took no step since the checkpoint before."""
        before = self._before.get(name)
        if before is None:
            return []
        try:
            older = steps_of(open_source(self._root / before).checkpoint)
        except StreamshardError as error:
            release_frames(error)
            return []
        return skipped_since(before, older, steps_of(opened.checkpoint))


def _short(message: str, place: Path) -> str:
    """Leave out the place of a checkpoint that a message is about."""
    for known in (place, place.absolute()):
        message = message.removeprefix(f"{known}: ").removeprefix(f"{known}/")
    return message


def _number(step: int | None) -> int:
    return -1 if step is None else step

"""Decides which tags go, and why, from descriptions of what is there; reads and moves nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import PurePosixPath
from typing import Protocol

from streamshard.errors import IntegrityError, Option, SourceError, StreamshardError, UsageError
from streamshard.formats.deepspeed.names import step_of
from streamshard.operations.compact.compact_report import AMBIGUOUS, IN_TRASH, KEPT, CompactedTag
from streamshard.operations.compact.receipts import ARCHIVED, PURGED, TRASHED, WEIGHTS_ONLY
from streamshard.sizes import ordinal, show_duration, show_time
from streamshard.verb_options import CompactOptions


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag directory as it was found."""

    name: str
    changed_ns: int
    """The newest time of change of anything in it, since the epoch."""
    problem: str | None = None
    """Why it cannot be opened; None for one that is complete."""
    is_linked: bool = False
    """Whether a symbolic link in the run directory leads into it."""
    nbytes: int = 0
    """Size of the files in it."""
    looks: str = ""
    """Digest of the path, mode, size, inode and time of change of everything in it."""
    saved_ns: int = 0
    """Time at which the `latest` in it was written, since the epoch; 0 if it has none."""
    best: tuple[str, ...] = ()
    """Checkpoints that Lightning calls the best in it."""
    lags: tuple[int | None, ...] = ()
    """For each model part, how many steps its optimizer is behind; None where it is not known."""
    is_denied: bool = False
    """Whether the problem is that this user may not read it."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run directory as it was found."""

    tags: tuple[Tag, ...]
    latest: str | None
    """Tag that `latest` names; None if it cannot be read."""
    latest_universal: str | None = None
    problem: str | None = None
    """Why it is not known which tag is needed."""
    trashed: tuple[Tag, ...] = ()
    """Tags in the trash; of these only the name and the links to them are known."""
    going: tuple[str, ...] = ()
    """Tags of which a part may be removed already."""
    is_framework: bool = False
    """Whether the tags are whole checkpoints of a framework, and `latest` is the one saved last."""
    best: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint that a framework calls the best → the file or the checkpoint that says so."""
    unhealthy: Callable[[Tag], str | SourceError] = field(default=lambda _: "", compare=False)
    """Says why no job should go on from a tag that can be opened: it holds NaN, or is damaged;
    empty if it is good; an error if it cannot be read. It may read the tag, so it is asked of as
    few as possible."""
    acknowledged: Callable[[Tag], tuple[bool, str]] = field(
        default=lambda _: (False, ""), compare=False
    )
    """Tells whether the user has acknowledged an ambiguous tag, and what to add to the reason."""

    @property
    def by_name(self) -> dict[str, Tag]:
        return {tag.name: tag for tag in self.tags}


class Archives(Protocol):
    """What receipts say of archived tags; an error keeps the tag."""

    def tags(self) -> Iterable[str]:
        """List the tags that have a receipt."""

    def trashed_at(self, tag: str) -> datetime:
        """Return when a tag was moved into the trash."""

    def removed_at(self, tag: str) -> datetime | None:
        """Return when a tag was removed for good; None if its archive has nothing to lose.

        That is, if the original exists anywhere, or its states were dropped already.
        """


def refusal(run: RunDirectory) -> str | None:
    """Say why nothing in a run directory may be removed; None if something may."""
    if run.problem is not None:
        return run.problem
    if run.latest is None:
        return "no 'latest' file says which tag is needed; give the directory that holds it"
    if run.latest not in {tag.name for tag in run.tags}:
        if run.latest in {tag.name for tag in run.trashed}:
            back = Option("undelete")
            return f"'latest' names {run.latest}, which is in the trash; {back} brings it back"
        return f"'latest' names {run.latest}, which is not a tag with shards here"
    if step_of(run.latest) is None and run.is_framework:
        return "no complete checkpoint has a step in its name, as in 'epoch=1-step=10.ckpt'"
    if step_of(run.latest) is None:
        return f"'latest' names {run.latest}, which has no step to compare others with"
    return None


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest complete steps that are not above the step of `latest`."""

    steps: Set[int] = frozenset()
    mixed: Set[str] = frozenset()
    """Tags that may be of two saves: they are not counted, so more steps are kept."""
    good: Set[int] = frozenset()
    """Those that are counted: the steps of the newest tags that are whole and healthy."""
    unhealthy: Mapping[str, str | SourceError] = field(default_factory=dict)
    """Tag that is not counted as it is not good → why."""

    def reason(self, step: int, keep_last: int) -> str:
        """Say why one of these steps is kept."""
        if step in self.good:
            return f"among the newest {keep_last}"
        if len(self.good) == keep_last:
            return f"newer than the {ordinal(keep_last)} newest healthy one"
        return f"fewer than {keep_last} are healthy"


def prune(
    run: RunDirectory,
    archives: Archives,
    rules: CompactOptions,
    now: datetime,
    only: str | None = None,
) -> Iterator[CompactedTag]:
    """Say what becomes of the tags that the rules consider, and why; `refusal` must have passed.

    First come the tags in their place, then those in the trash, then archives of removed tags; each
    in the order of their steps. `only`: the name to which this is limited.
    """
    pruning = _Pruning(run, archives, rules, now)

    def decided(
        names: Iterable[str], decide: Callable[[str], CompactedTag | None]
    ) -> Iterator[CompactedTag]:
        chosen = (name for name in {*names} if only in (None, name) and considers(rules, name))
        for name in sorted(chosen, key=by_step):
            try:
                outcome = decide(name)
            except StreamshardError as error:
                outcome = CompactedTag.failed(name, error)
            if outcome is not None:
                yield outcome

    yield from decided((tag.name for tag in run.tags), pruning.in_place)
    yield from decided((*(tag.name for tag in run.trashed), *run.going), pruning.in_trash)
    if rules.weights_only_older_than is not None:
        yield from decided([only] if only else archives.tags(), pruning.removed)


class _Pruning:
    def __init__(
        self, run: RunDirectory, archives: Archives, rules: CompactOptions, now: datetime
    ) -> None:
        self._run, self._archives, self._rules, self._now = run, archives, rules, now
        self._tags, self._trashed = run.by_name, {tag.name: tag for tag in run.trashed}

    @cached_property
    def _newest(self) -> _Newest:
        return _newest(self._run, self._rules)

    @cached_property
    def _restored(self) -> RunDirectory:
        """The run directory as if all that is in the trash were brought back."""
        return replace(self._run, tags=(*self._run.tags, *self._run.trashed))

    @cached_property
    def _newest_restored(self) -> _Newest:
        return _newest(self._restored, self._rules)

    def in_place(self, name: str) -> CompactedTag:
        """Decide about a tag that is where it was saved."""
        tag, run, rules, newest = self._tags[name], self._run, self._rules, self._newest
        step = _step_in(run, name)
        age_ns = int(self._now.timestamp() * 10**9) - tag.changed_ns
        if age_ns < nanoseconds(rules.min_age):
            least = f"{Option('min_age')} is {show_duration(rules.min_age)}"
            age = show_time(max(0, age_ns) // 10**9)
            return _kept(tag, f"changed {age} ago, {least}", step, newest)
        if step is not None or name == run.latest:
            for reason in _unclear(tag, run, step):
                is_known, more = run.acknowledged(tag)
                code = 0 if is_known else SourceError.exit_code
                return _of(tag, KEPT if is_known else AMBIGUOUS, reason + more, code)
        for reason in _protected(tag, run, rules, step, newest):
            return _kept(tag, reason, step, newest)
        return _of(tag, TRASHED if rules.delete else ARCHIVED, "no rule keeps it")

    def in_trash(self, name: str) -> CompactedTag:
        """Decide about a tag in the trash, which stays if a rule would keep it in its place."""
        rules = self._rules
        over = f"in the trash for longer than {Option('grace', rules.grace)}"
        if not rules.delete:
            return CompactedTag.of(name, IN_TRASH, f"no {Option('delete', True)}")
        if name in self._run.going:
            return CompactedTag.of(name, PURGED, over)
        waits = grace_left(self._archives, name, rules, self._now)
        if waits is not None:
            return CompactedTag.of(name, IN_TRASH, waits)
        tag, step = self._trashed[name], _step_in(self._run, name)
        for reason in _protected(tag, self._restored, rules, step, self._newest_restored):
            back = f"{reason}; {Option('undelete')} brings it back"
            return CompactedTag.of(name, IN_TRASH, back)
        return CompactedTag.of(name, PURGED, over)

    def removed(self, name: str) -> CompactedTag | None:
        """Decide about the optimizer states in the archive of a removed tag."""
        since, least_age = self._archives.removed_at(name), self._rules.weights_only_older_than
        if since is None or least_age is None or self._now - since <= least_age:
            return None
        gone, step, good = Tag(name, changed_ns=0), _step_in(self._run, name), self._newest.good
        for reason in _protected(gone, self._run, self._rules, step, _Newest()):
            return CompactedTag.of(name, KEPT, reason)
        if step is None or not good or step > max(good):
            return CompactedTag.of(name, KEPT, "no newer tag is known to be healthy")
        return CompactedTag.of(name, WEIGHTS_ONLY, "no job can resume from it")


def _of(tag: Tag, action: str, reason: str, exit_code: int = 0) -> CompactedTag:
    outcome = CompactedTag.of(tag.name, action, reason, exit_code)
    return replace(outcome, source_bytes=tag.nbytes)


def _kept(tag: Tag, reason: str, step: int | None, newest: _Newest) -> CompactedTag:
    if tag.name in newest.mixed:
        reason += "; its files may be of two saves"
    unhealthy = newest.unhealthy.get(tag.name, "")
    if unhealthy:
        reason += f"; not healthy: {unhealthy}"
    if isinstance(unhealthy, SourceError):
        return _of(tag, AMBIGUOUS, reason, SourceError.exit_code)
    if not unhealthy or step is None or step <= max(newest.good, default=-1):
        return _of(tag, KEPT, reason)
    return replace(_of(tag, KEPT, reason, IntegrityError.exit_code), unhealthy=unhealthy)


def grace_left(archives: Archives, tag: str, rules: CompactOptions, now: datetime) -> str | None:
    """Say since when a tag has been in the trash; None if its grace time is over."""
    since = archives.trashed_at(tag)
    if not rules.grace or now - since > rules.grace:
        return None
    return f"since {since:%Y-%m-%d %H:%M} UTC, {Option('grace')} is {show_duration(rules.grace)}"


def considers(rules: CompactOptions, name: str) -> bool:
    """Tell whether a tag is considered; a `*` of the pattern matches within one directory."""
    return rules.tags is None or is_like(name, rules.tags)


def by_step(name: str) -> tuple[int, str]:
    """Return a sort key of tags: by the number at the end of the name, those without one first."""
    return step_of(name) or -1, name


def nanoseconds(time: timedelta) -> int:
    return time // timedelta(microseconds=1) * 1000


def _step_in(run: RunDirectory, name: str) -> int | None:
    """Return a tag's step if it can be compared with the step of `latest`, else None.

    The numbers of `epoch_1/step_9` and `epoch_2/step_3` do not say which one is newer.
    """
    is_beside = name.rpartition("/")[0] == (run.latest or "").rpartition("/")[0]
    return step_of(name) if is_beside else None


def _newest(run: RunDirectory, rules: CompactOptions) -> _Newest:
    """Find the newest tags; as few are asked whether they are healthy as are needed."""
    last = step_of(run.latest or "")
    whole = [tag for tag in run.tags if tag.problem is None and considers(rules, tag.name)]
    steps = [(_step_in(run, tag.name), tag) for tag in whole]
    up_to = -1 if last is None else last
    saved = [(step, tag) for step, tag in steps if step is not None and step <= up_to]
    saved.sort(key=lambda pair: (pair[0], pair[1].name))
    mixed = {tag.name for tag in _mixed([tag for _, tag in saved])}
    good, unhealthy = set[int](), dict[str, str | SourceError]()
    for step, tag in reversed(saved):
        if step in good or tag.name in mixed:
            continue
        if len(good) == rules.keep_last:
            break
        if reason := run.unhealthy(tag):
            unhealthy[tag.name] = reason
        else:
            good.add(step)
    enough = min(good) if len(good) == rules.keep_last else 0
    return _Newest({step for step, _ in saved if step >= enough}, mixed, good, unhealthy)


def _mixed(tags: Sequence[Tag]) -> Iterator[Tag]:
    """Yield the tags of a run, sorted by step, whose files may be of two saves.

    A run that started its optimizer afresh lags from one tag on; a tag of two saves lags alone.
    """
    counted = [tag for tag in tags if tag.lags and None not in tag.lags]
    for at, tag in enumerate(counted[1:], 1):
        is_last = tag is counted[-1]
        around = counted[max(0, at - 2) : at] if is_last else (counted[at - 1], counted[at + 1])
        lags = {neighbour.lags for neighbour in around}
        if len(lags) == 1 and tag.lags not in lags:
            yield tag


def _unclear(tag: Tag, run: RunDirectory, step: int | None) -> Iterator[str]:
    last = step_of(run.latest or "")
    if step is not None and last is not None and step > last:
        of = f"{run.latest}, saved last" if run.is_framework else "'latest'"
        yield f"its step is above {last:,}, that of {of}, so it may be another run's"
    if tag.problem is not None:
        yield tag.problem


def _protected(
    tag: Tag, run: RunDirectory, rules: CompactOptions, step: int | None, newest: _Newest
) -> Iterator[str]:
    if tag.name == run.latest:
        yield "saved last" if run.is_framework else "'latest' names it"
    if tag.name in run.best:
        yield f"{run.best[tag.name]} names it as the best"
    if run.latest_universal in (tag.name, f"{tag.name}_universal"):
        yield "'latest_universal' names it"
    if step is None and step_of(tag.name) is not None:
        yield f"lies in another directory than {run.latest}, so their steps are not compared"
    elif step is None:
        yield "tells no step"
    elif step in newest.steps:
        yield newest.reason(step, rules.keep_last)
    elif rules.keep_every is not None and step % rules.keep_every == 0:
        yield f"a multiple of {rules.keep_every:,}"
    yield from (f"matches {p}" for p in rules.keep_tags if matches(tag.name, p))
    if tag.is_linked:
        yield "a symbolic link leads into it"


def matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def is_like(name: str, pattern: str) -> bool:
    """Tell whether a tag is one that a pattern matches, directory by directory.

    >>> [is_like("run1/global_step5", p) for p in ("run*/global_step*", "run*", "*")]
    [True, False, False]
    """
    parts, patterns = PurePosixPath(name).parts, PurePosixPath(pattern).parts
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def require_pattern(pattern: str) -> None:
    path, option = PurePosixPath(pattern), Option("tags", pattern)
    if not path.parts or path.is_absolute() or "://" in pattern:
        raise UsageError(f"{option}: has to be relative to RUN_DIR, as 'global_step*'")
    if any(part in ("..", "**") for part in path.parts):
        message = f"{option}: '..' and '**' are not allowed; use a '*' for each level"
        raise UsageError(message)

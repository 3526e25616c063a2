"""Chooses the tags of a run directory that may be removed, from the descriptions of all tags."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Final, Self

from streamshard.errors import Option, UsageError
from streamshard.formats.deepspeed.names import step_of
from streamshard.sizes import ordinal, show_duration, show_time
from streamshard.verb_options import CompactOptions

KEPT: Final = "kept"
"""A rule protects the tag, or a file or link that names it."""
CANDIDATE: Final = "candidate"
"""Nothing protects the tag."""
AMBIGUOUS: Final = "ambiguous"
"""It is not clear what the tag is, so it is kept, and the user should look."""


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
    is_framework: bool = False
    """Whether the tags are whole checkpoints of a framework, and `latest` is the one saved last."""
    best: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint that a framework calls the best → the file or the checkpoint that says so."""
    unhealthy: Callable[[Tag], str] = field(default=lambda _: "", compare=False)
    """Says why no job should go on from a tag that can be opened: it holds NaN, or is damaged;
    empty if it is good. It may read the tag, so it is asked of as few as possible."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which tags are kept."""

    keep_last: int
    """How many of the newest complete steps to keep, at least 2."""
    min_age_ns: int
    """Least time since the last change of a tag that may be removed."""
    keep_every: int | None = None
    """Keep steps that are multiples of this."""
    keep_tags: tuple[str, ...] = ()
    """Patterns of the names to keep."""
    tags: str | None = None
    """Pattern of the tags that are considered; None for all. Others are neither touched nor counted
    as one of the newest."""

    @classmethod
    def of(cls, options: CompactOptions) -> Self:
        """Return the rules among the options of a run."""
        min_age_ns = int(options.min_age.total_seconds() * 10**9)
        keep_tags = tuple(options.keep_tags)
        return cls(options.keep_last, min_age_ns, options.keep_every, keep_tags, options.tags)

    def considers(self, name: str) -> bool:
        """Tell whether a tag is considered; a `*` of the pattern matches within one directory."""
        return self.tags is None or is_like(name, self.tags)


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision about a tag."""

    tag: Tag
    verdict: str
    """`kept`, `candidate` or `ambiguous`."""
    reason: str
    unhealthy: str = ""
    """Why the tag is not good, if no newer tag is good either: the run saves what no job should go
    on from."""


def _step_in(run: RunDirectory, name: str) -> int | None:
    """Return a tag's step if it can be compared with the step of `latest`, else None.

    The numbers of `epoch_1/step_9` and `epoch_2/step_3` do not say which one is newer.
    """
    is_beside = name.rpartition("/")[0] == (run.latest or "").rpartition("/")[0]
    return step_of(name) if is_beside else None


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


def choose(run: RunDirectory, rules: Rules, now_ns: int) -> list[Choice]:
    """Decide about the tags that are considered, in the order of their steps.

    `refusal` must have returned None.
    """
    newest = _newest(run, rules)
    considered = [tag for tag in run.tags if rules.considers(tag.name)]
    ordered = sorted(considered, key=lambda tag: by_step(tag.name))
    return [_decide(tag, run, rules, newest, now_ns) for tag in ordered]


def by_step(name: str) -> tuple[int, str]:
    """Return a sort key of tags: by the number at the end of the name, those without one first."""
    return step_of(name) or -1, name


def protection(name: str, run: RunDirectory, rules: Rules) -> str | None:
    """Say which rule or name protects the archive of a removed tag; None if none does."""
    gone, step = Tag(name, changed_ns=0), _step_in(run, name)
    for reason in _protected(gone, run, rules, step, _Newest()):
        return reason
    good = _newest(run, rules).good
    if step is None or not good or step > max(good):
        return "no newer tag is known to be healthy"
    return None


def protection_in_trash(tag: Tag, run: RunDirectory, rules: Rules) -> str | None:
    """Say what would protect a tag in the trash if it were brought back; None if nothing would."""
    again = replace(run, tags=(*run.tags, *run.trashed))
    newest = _newest(again, rules)
    return next(_protected(tag, again, rules, _step_in(run, tag.name), newest), None)


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest complete steps that are not above the step of `latest`."""

    steps: Set[int] = frozenset()
    mixed: Set[str] = frozenset()
    """Tags that may be of two saves: they are not counted, so more steps are kept."""
    good: Set[int] = frozenset()
    """Those that are counted: the steps of the newest tags that are whole and healthy."""
    unhealthy: Mapping[str, str] = field(default_factory=dict)
    """Tag that is not counted as it is not good → why."""

    def reason(self, step: int, keep_last: int) -> str:
        """Say why one of these steps is kept."""
        if step in self.good:
            return f"among the newest {keep_last}"
        if len(self.good) == keep_last:
            return f"newer than the {ordinal(keep_last)} newest healthy one"
        return f"fewer than {keep_last} are healthy"


def _newest(run: RunDirectory, rules: Rules) -> _Newest:
    last = step_of(run.latest or "")
    whole = [tag for tag in run.tags if tag.problem is None and rules.considers(tag.name)]
    steps = [(_step_in(run, tag.name), tag) for tag in whole]
    up_to = -1 if last is None else last
    known = [(step, tag) for step, tag in steps if step is not None and step <= up_to]
    known.sort(key=lambda one: (one[0], one[1].name))
    mixed = {tag.name for tag in _mixed([tag for _, tag in known])}
    good, unhealthy = set[int](), dict[str, str]()
    for step, tag in reversed(known):
        if step in good or tag.name in mixed:
            continue
        if len(good) == rules.keep_last:
            break
        if reason := run.unhealthy(tag):
            unhealthy[tag.name] = reason
        else:
            good.add(step)
    enough = min(good) if len(good) == rules.keep_last else 0
    return _Newest({step for step, _ in known if step >= enough}, mixed, good, unhealthy)


def _mixed(tags: Sequence[Tag]) -> Iterator[Tag]:
    """Yield the tags of a run, sorted by step, whose files may be of two saves.

    A run that started its optimizer afresh lags from one tag on; a tag of two saves lags alone.
    """
    known = [tag for tag in tags if tag.lags and None not in tag.lags]
    for at, tag in enumerate(known[1:], 1):
        is_last = tag is known[-1]
        others = known[max(0, at - 2) : at] if is_last else (known[at - 1], known[at + 1])
        lags = {other.lags for other in others}
        if len(lags) == 1 and tag.lags not in lags:
            yield tag


def _decide(tag: Tag, run: RunDirectory, rules: Rules, newest: _Newest, now_ns: int) -> Choice:
    step = _step_in(run, tag.name)
    for reason in _young(tag, rules, now_ns):
        return _kept(tag, reason, step, newest)
    if step is not None or tag.name == run.latest:
        for reason in _unclear(tag, run, step):
            return Choice(tag, AMBIGUOUS, reason)
    for reason in _protected(tag, run, rules, step, newest):
        return _kept(tag, reason, step, newest)
    return Choice(tag, CANDIDATE, "no rule keeps it")


def _kept(tag: Tag, reason: str, step: int | None, newest: _Newest) -> Choice:
    if tag.name in newest.mixed:
        reason += "; its files may be of two saves"
    unhealthy = newest.unhealthy.get(tag.name, "")
    if unhealthy:
        reason += f"; not healthy: {unhealthy}"
    is_last = step is not None and step > max(newest.good, default=-1)
    return Choice(tag, KEPT, reason, unhealthy if is_last else "")


def _young(tag: Tag, rules: Rules, now_ns: int) -> Iterator[str]:
    age = now_ns - tag.changed_ns
    if age < rules.min_age_ns:
        least = show_duration(timedelta(seconds=rules.min_age_ns // 10**9))
        yield f"changed {show_time(max(0, age) // 10**9)} ago, {Option('min_age')} is {least}"


def _unclear(tag: Tag, run: RunDirectory, step: int | None) -> Iterator[str]:
    last = step_of(run.latest or "")
    if step is not None and last is not None and step > last:
        of = f"{run.latest}, saved last" if run.is_framework else "'latest'"
        yield f"its step is above {last:,}, that of {of}, so it may be another run's"
    if tag.problem is not None:
        yield tag.problem


def _protected(
    tag: Tag, run: RunDirectory, rules: Rules, step: int | None, newest: _Newest
) -> Iterator[str]:
    """Yield the reasons for which a tag is kept."""
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
    """Tell whether a tag has the name or matches the pattern of a tag to keep."""
    return name == pattern or fnmatchcase(name, pattern)


def is_like(name: str, pattern: str) -> bool:
    """Tell whether a tag is one that a pattern matches, directory by directory.

    >>> [is_like("run1/global_step5", p) for p in ("run*/global_step*", "run*", "*")]
    [True, False, False]
    """
    parts, patterns = PurePosixPath(name).parts, PurePosixPath(pattern).parts
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def require_pattern(pattern: str) -> None:
    """Require that a pattern of tags to consider is a path below the run directory."""
    path, asked = PurePosixPath(pattern), Option("tags", pattern)
    if not path.parts or path.is_absolute() or "://" in pattern:
        raise UsageError(f"{asked}: has to be relative to RUN_DIR, as 'global_step*'")
    if any(part in ("..", "**") for part in path.parts):
        message = f"{asked}: '..' and '**' are not allowed; use a '*' for each level"
        raise UsageError(message)

"""Which tags go: a table, and what must hold of any run directory and of any history of nights."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.errors import SourceError, SourceNotFoundError
from streamshard.formats.deepspeed.names import step_of
from streamshard.operations.compact.compact_report import AMBIGUOUS, IN_TRASH, KEPT, CompactedTag
from streamshard.operations.compact.prune import RunDirectory, Tag, prune, refusal
from streamshard.operations.compact.receipts import ARCHIVED, PURGED, TRASHED, WEIGHTS_ONLY
from streamshard.verb_options import CompactOptions

HOUR = 3600 * 10**9
NOW = 1000 * HOUR
OLD = NOW - 100 * HOUR
RULES = CompactOptions("run", "archive", keep_last=2)
TAGGED = RULES.replaced(tags="s*")
DAY = timedelta(days=1)


@dataclass
class Archived:
    """What receipts say of tags."""

    trashed: dict[str, datetime] = field(default_factory=dict)
    removed: dict[str, datetime] = field(default_factory=dict)

    def tags(self) -> list[str]:
        return [*self.trashed, *self.removed]

    def trashed_at(self, tag: str) -> datetime:
        if tag not in self.trashed:
            raise SourceNotFoundError(f"no receipt of {tag}")
        return self.trashed[tag]

    def removed_at(self, tag: str) -> datetime | None:
        return self.removed.get(tag)


def outcomes(
    run: RunDirectory,
    rules: CompactOptions = RULES,
    archives: Archived | None = None,
    now_ns: int = NOW,
) -> dict[str, CompactedTag]:
    """Tell what becomes of each tag."""
    now = datetime.fromtimestamp(now_ns / 10**9, UTC)
    return {found.tag: found for found in prune(run, archives or Archived(), rules, now)}


def tags(*names: str) -> tuple[Tag, ...]:
    return tuple(Tag(name, OLD) for name in names)


STEPS = tags("s9", "s10", "s11", "s100", "s1000")
"""In this order only by their numbers."""


def lagging(*lags: int | None) -> RunDirectory:
    """Return a run whose steps lag so far behind, the last one being the one that is needed."""
    found = [replace(tag, lags=(lag,)) for tag, lag in zip(STEPS, lags, strict=True)]
    return RunDirectory(tuple(found), "s1000")


def candidates(run: RunDirectory, rules: CompactOptions = RULES) -> list[str]:
    assert refusal(run) is None
    return [name for name, found in outcomes(run, rules).items() if found.action == ARCHIVED]


def changed(run: RunDirectory, name: str, **values: object) -> RunDirectory:
    """Return a run in which one tag is otherwise."""
    return replace(
        run,
        tags=tuple(replace(t, **values) if t.name == name else t for t in run.tags),  # type: ignore[arg-type]
    )


def ill(run: RunDirectory, *names: str) -> RunDirectory:
    """Return a run in which some tags hold NaN."""
    return replace(run, unhealthy=lambda tag: "3 NaN" if tag.name in names else "")


RUN = RunDirectory(STEPS, "s1000")

CASES = {
    "by number, not by name": (RUN, RULES, ["s9", "s10", "s11"]),
    "more are kept": (RUN, RULES.replaced(keep_last=4), ["s9"]),
    "all are kept": (RUN, RULES.replaced(keep_last=9), []),
    "every tenth": (RUN, RULES.replaced(keep_every=10), ["s9", "s11"]),
    "by pattern": (RUN, RULES.replaced(keep_tags=("s1?",)), ["s9"]),
    "by another pattern": (RUN, RULES.replaced(keep_tags=("x*", "s9")), ["s10", "s11"]),
    "latest is an older one": (RunDirectory(STEPS, "s11"), RULES, ["s9"]),
    "of a choice": (replace(RUN, tags=(*STEPS, *tags("t10", "t12"))), TAGGED, ["s9", "s10", "s11"]),
    "of a choice without the latest": (
        replace(RUN, tags=(*STEPS, *tags("t10", "t12", "t13")), latest="t13"), TAGGED, ["s9"]
    ),
    "another is needed too": (replace(RUN, latest_universal="s9"), RULES, ["s10", "s11"]),
    "its source is": (replace(RUN, latest_universal="s10_universal"), RULES, ["s9", "s11"]),
    "a link": (changed(RUN, "s10", is_linked=True), RULES, ["s9", "s11"]),
    "a young one": (changed(RUN, "s10", changed_ns=NOW - HOUR), RULES, ["s9", "s11"]),
    "of tomorrow": (changed(RUN, "s10", changed_ns=NOW + HOUR), RULES, ["s9", "s11"]),
    "a damaged one is not of the newest": (
        changed(RUN, "s100", problem="truncated"), RULES, ["s9", "s10"]
    ),
    "nor is one of another run": (
        RunDirectory((*STEPS, *tags("s2000")), "s1000"), RULES, ["s9", "s10", "s11"]
    ),
    "names without numbers stay": (
        RunDirectory((*STEPS, *tags("best")), "s1000"), RULES, ["s9", "s10", "s11"]
    ),
    "nor do those go that are counted in parts": (
        RunDirectory((*STEPS, *tags("s3.25", "s10.5")), "s1000"), RULES, ["s9", "s10", "s11"]
    ),
    "the newest is of two saves": (lagging(0, 0, 0, 0, 9), RULES, ["s9", "s10"]),
    "one among the newest is": (lagging(0, 0, 0, 9, 0), RULES, ["s9", "s10"]),
    "two of them are": (lagging(0, 0, 9, 0, 9), RULES, ["s9"]),
    "nearly all are": (lagging(0, 9, 0, 9, 0), RULES.replaced(keep_last=4), []),
    "an older one goes as before": (lagging(0, 9, 0, 0, 0), RULES, ["s9", "s10", "s11"]),
    "an optimizer started afresh": (lagging(0, 0, 0, 9, 9), RULES, ["s9", "s10", "s11"]),
    "before the first that is left": (lagging(9, 9, 9, 9, 9), RULES, ["s9", "s10", "s11"]),
    "counts of another kind": (lagging(1, 2, 3, 4, 5), RULES, ["s9", "s10", "s11"]),
    "a count is not known": (lagging(0, 0, 0, 0, None), RULES, ["s9", "s10", "s11"]),
    "none counts between two": (lagging(0, 0, 9, None, 0), RULES, ["s9", "s10", "s11"]),
    "two names of a step count once": (
        RunDirectory((*STEPS, *tags("t1000")), "s1000"), RULES, ["s9", "s10", "s11"]
    ),
    "the newest holds NaN": (ill(RUN, "s1000"), RULES, ["s9", "s10"]),
    "one among the newest holds NaN": (ill(RUN, "s100"), RULES, ["s9", "s10"]),
    "two hold NaN": (ill(RUN, "s1000", "s100"), RULES, ["s9"]),
    "an older one holds NaN, and goes as before": (ill(RUN, "s10"), RULES, ["s9", "s10", "s11"]),
    "fewer are healthy than are to be kept": (ill(RUN, "s1000", "s100", "s11", "s9"), RULES, []),
    "no healthy one is left": (ill(RUN, "s9", "s10", "s11", "s100", "s1000"), RULES, []),
    "of a choice, two hold NaN": (
        ill(replace(RUN, tags=(*STEPS, *tags("t10", "t12"))), "s100", "t12"), TAGGED, ["s9", "s10"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_may_go(case: str) -> None:
    run, rules, wanted = CASES[case]
    assert candidates(run, rules) == wanted


@pytest.mark.parametrize(
    ("run", "name", "told"),
    [
        (changed(RUN, "s9", problem="it is torn"), "s9", "it is torn"),
        (changed(RUN, "s1000", problem="it is torn"), "s1000", "it is torn"),
        (RunDirectory(STEPS, "s11"), "s100", "above 11"),
    ],
)
def test_what_is_not_clear_is_told(run: RunDirectory, name: str, told: str) -> None:
    found = outcomes(run)[name]
    assert (found.action, found.exit_code, told in found.reason) == (AMBIGUOUS, 3, True)


@pytest.mark.parametrize(("tag", "is_told"), [("s100", False), ("s1000", True)])
def test_a_tag_of_two_saves_is_told(tag: str, is_told: bool) -> None:
    found = outcomes(lagging(0, 0, 0, 0, 9))[tag]
    assert (found.action, "may be of two saves" in found.reason) == (KEPT, is_told)


def test_a_save_under_way_is_nothing_unclear() -> None:
    run = RunDirectory((*STEPS, Tag("s1001", NOW, "no rank's files")), "s1000")
    assert outcomes(run)["s1001"].action == KEPT


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (RunDirectory(STEPS, None), "no 'latest'"),
        (RunDirectory(STEPS, "s7"), "names s7"),
        (RunDirectory((*STEPS, *tags("best")), "best"), "no step"),
        (RunDirectory(tags("s3.25", "s3.75", "s4.0"), "s4.0"), "no step"),
        (RunDirectory(STEPS, "s1000", problem="latest: Input/output error"), "Input/output"),
    ],
)
def test_without_a_latest_that_can_be_trusted_nothing_may_go(run: RunDirectory, told: str) -> None:
    assert told in (refusal(run) or "")


def test_those_after_the_newest_healthy_one_are_told() -> None:
    run = changed(ill(RUN, "s10", "s100", "s1000"), "s1000", changed_ns=NOW)
    found = outcomes(run)
    assert {name for name, tag in found.items() if tag.unhealthy} == {"s100", "s1000"}
    assert [found[name].exit_code for name in ("s10", "s100")] == [0, 6]
    told = {name: tag.reason for name, tag in found.items() if "NaN" in tag.reason}
    assert told == {
        "s10": "newer than the 2nd newest healthy one; not healthy: 3 NaN",
        "s100": "newer than the 2nd newest healthy one; not healthy: 3 NaN",
        "s1000": "changed 0.0 s ago, min_age= is 2h; not healthy: 3 NaN",
    }
    few = outcomes(ill(RUN, "s9", "s10", "s100", "s1000"))
    assert [few[name].reason for name in ("s10", "s11")] == [
        "fewer than 2 are healthy; not healthy: 3 NaN",
        "among the newest 2",
    ]


def test_one_that_cannot_be_read_is_ambiguous() -> None:
    run = replace(RUN, unhealthy=lambda tag: SourceError("I/O") if tag.name == "s100" else "")
    found = outcomes(run)
    assert (found["s100"].action, found["s100"].exit_code) == (AMBIGUOUS, 3)
    assert candidates(run) == ["s9", "s10"]


def test_the_states_of_the_newest_healthy_archive_are_not_dropped() -> None:
    """It may be the only one that a job can go on from, whatever is left in the run."""

    def of(name: str, run: RunDirectory) -> str:
        archives = Archived(removed={name: datetime.fromtimestamp(0, UTC)})
        found = outcomes(run, RULES.replaced(weights_only_older_than=DAY), archives)[name]
        return found.reason if found.action == KEPT else found.action

    assert of("s8", RUN) == WEIGHTS_ONLY
    assert of("s10", replace(RUN, tags=STEPS[2:])) == WEIGHTS_ONLY
    late = RunDirectory(tags("s100", "s1000"), "s1000")
    assert of("s50", late) == WEIGHTS_ONLY
    assert of("s50", ill(late, "s1000")) == WEIGHTS_ONLY
    none = "no newer tag is known to be healthy"
    assert of("s50", ill(late, "s1000", "s100")) == none
    older = replace(late, tags=tags("s9", "s100", "s1000"))
    assert of("s50", ill(older, "s1000", "s100")) == none


def test_the_trash_keeps_the_newest_healthy_one() -> None:
    """A tag that was moved there when others counted comes back when these do not."""
    run = RunDirectory(tags("s100", "s1000"), "s1000", trashed=tags("s9", "s10", "s11"))
    since = dict.fromkeys(("s9", "s10", "s11"), datetime.fromtimestamp(0, UTC))

    def left(run: RunDirectory) -> list[str]:
        found = outcomes(run, RULES.replaced(delete=True), Archived(since))
        return [name for name, tag in found.items() if tag.action == IN_TRASH]

    assert left(run) == []
    assert left(ill(run, "s1000")) == ["s11"]
    assert left(ill(run, "s1000", "s100", "s11")) == ["s9", "s10", "s11"]


# Histories ----------------------------------------------------------------------------------------


@dataclass
class History:
    """A job that saves, and nights that do what `prune` says."""

    now: datetime = datetime(2026, 11, 1, tzinfo=UTC)
    tags: dict[str, Tag] = field(default_factory=dict)
    trashed: dict[str, Tag] = field(default_factory=dict)
    ill: set[str] = field(default_factory=set)
    archives: Archived = field(default_factory=Archived)

    def save(self, step: int, what: str) -> None:
        name, changed_ns = f"s{step}", int(self.now.timestamp()) * 10**9
        problem = "torn" if what == "torn" else None
        if name not in self.trashed:
            self.tags[name] = Tag(name, changed_ns, problem, is_linked=what == "linked")
            self.ill = self.ill | {name} if what == "ill" else self.ill - {name}
            self.archives.removed.pop(name, None)  # the original is there again

    def happen(self, event: str, which: int) -> None:
        """Let a tag that is there turn bad, or go by the job's own rotation."""
        name = sorted(self.tags)[which % len(self.tags)] if self.tags else ""
        if event == "turns ill" and name:
            self.ill |= {name}
        elif event == "rotated" and name:
            del self.tags[name]

    def decided(self, rules: CompactOptions, order: int = 1) -> list[CompactedTag]:
        whole = [name for name, tag in self.tags.items() if tag.problem is None]
        latest = max(whole, key=step, default=None)
        trashed = tuple(self.trashed.values())[::order]
        run = RunDirectory(tuple(self.tags.values())[::order], latest, trashed=trashed)
        if refusal(run) is not None:
            return []
        return [*prune(ill(run, *self.ill), self.archives, rules, self.now)]

    def healthy(self, there: dict[str, Tag], count: int) -> set[str]:
        """Return the newest that are whole and healthy."""
        good = {n for n, tag in there.items() if tag.problem is None} - self.ill
        return {*sorted(good, key=step)[-count:]}

    def night(self, rules: CompactOptions) -> None:
        found = self.decided(rules)
        assert found == self.decided(rules, -1)  # whatever the order of a listing
        newest = self.healthy(self.tags, rules.keep_last)
        counted = self.healthy({**self.tags, **self.trashed}, rules.keep_last)
        for outcome in found:
            name, action = outcome.tag, outcome.action
            if action == TRASHED:
                tag = self.trashed[name] = self.tags.pop(name)
                self.archives.trashed[name] = self.now
                assert (tag.problem, tag.is_linked, rules.delete) == (None, False, True)
                assert tag.changed_ns / 10**9 <= (self.now - rules.min_age).timestamp()
                assert rules.keep_every is None or step(name) % rules.keep_every
                assert len(newest) == rules.keep_last
                assert step(name) < min(map(step, newest))
            elif action == PURGED:
                since = self.archives.trashed.pop(name)  # it has an archive
                assert rules.delete
                assert not rules.grace or self.now - since > rules.grace
                assert name not in counted
                assert rules.keep_every is None or step(name) % rules.keep_every
                del self.trashed[name]
                self.archives.removed[name] = self.now
            elif action == WEIGHTS_ONLY:
                assert self.now - self.archives.removed.pop(name) > DAY
                assert any(step(other) >= step(name) for other in newest)
            else:
                assert action in (KEPT, AMBIGUOUS, ARCHIVED, IN_TRASH)
        again = {(one.tag, one.action) for one in self.decided(rules)}
        moves = {TRASHED, WEIGHTS_ONLY, *([PURGED] if rules.grace else [])}
        assert not [action for _, action in again if action in moves]


def step(name: str) -> int:
    return step_of(name) or 0


SAVES = st.tuples(
    st.integers(1, 40), st.sampled_from(["good", "good", "good", "ill", "torn", "linked"])
)
NIGHTS = st.tuples(
    st.lists(SAVES, max_size=5),
    st.tuples(st.sampled_from(["nothing", "turns ill", "rotated"]), st.integers(0, 9)),
    st.sampled_from([timedelta(hours=1), DAY, 4 * DAY]),
    st.builds(
        RULES.replaced,
        keep_last=st.integers(2, 4),
        keep_every=st.none() | st.integers(2, 5),
        delete=st.sampled_from([True, True, False]),
        grace=st.sampled_from([timedelta(), DAY, 7 * DAY]),
        weights_only_older_than=st.none() | st.just(DAY),
    ),
)


@given(st.lists(NIGHTS, min_size=1, max_size=12))
def test_in_any_history_nothing_goes_that_is_needed(nights: list[Any]) -> None:
    history = History()
    for saves, event, time, rules in nights:
        for number, what in saves:
            history.save(number, what)
        history.happen(*event)
        history.now += time
        history.night(rules)


def test_what_no_receipt_tells_of_or_a_pattern_names_stays_in_the_trash() -> None:
    run = RunDirectory(STEPS, "s1000", trashed=tags("s5", "s6"))
    rules = RULES.replaced(delete=True, grace=timedelta(), keep_tags=["*6"])
    found = outcomes(run, rules, Archived({"s6": datetime.fromtimestamp(0, UTC)}))
    assert (found["s5"].action, found["s5"].reason) == (AMBIGUOUS, "no receipt of s5")
    assert (found["s6"].action, found["s6"].reason[:10]) == (IN_TRASH, "matches *6")


LAGS = st.lists(st.sampled_from([0, 0, 0, 1, 9, None]), min_size=5, max_size=5)


@given(LAGS, st.integers(2, 4))
def test_a_tag_that_may_be_of_two_saves_lets_no_more_go(lags: list[int], keep_last: int) -> None:
    rules = RULES.replaced(keep_last=keep_last)
    assert {*candidates(lagging(*lags), rules)} <= {*candidates(RUN, rules)}

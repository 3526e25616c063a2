"""Which tags may go: a table, and what must hold of any run directory whatever."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.formats.deepspeed.names import step_of
from streamshard.operations.compact.tag_choice import (
    AMBIGUOUS,
    CANDIDATE,
    KEPT,
    Rules,
    RunDirectory,
    Tag,
    choose,
    protection,
    protection_in_trash,
    refusal,
)

HOUR = 3600 * 10**9
NOW = 1000 * HOUR
OLD = NOW - 100 * HOUR
RULES = Rules(keep_last=2, min_age_ns=2 * HOUR)
TAGGED = replace(RULES, tags="s*")


def tags(*names: str) -> tuple[Tag, ...]:
    return tuple(Tag(name, OLD) for name in names)


STEPS = tags("s9", "s10", "s11", "s100", "s1000")
"""In this order only by their numbers."""


def lagging(*lags: int | None) -> RunDirectory:
    """Return a run whose steps lag so far behind, the last one being the one that is needed."""
    found = [replace(tag, lags=(lag,)) for tag, lag in zip(STEPS, lags, strict=True)]
    return RunDirectory(tuple(found), "s1000")


def verdicts(run: RunDirectory, rules: Rules = RULES) -> dict[str, str]:
    return {choice.tag.name: choice.verdict for choice in choose(run, rules, NOW)}


def candidates(run: RunDirectory, rules: Rules = RULES) -> list[str]:
    assert refusal(run) is None
    return [name for name, verdict in verdicts(run, rules).items() if verdict == CANDIDATE]


def changed(run: RunDirectory, name: str, **values: object) -> RunDirectory:
    """Return a run in which one tag is otherwise."""
    return replace(
        run,
        tags=tuple(replace(t, **values) if t.name == name else t for t in run.tags),  # type: ignore[arg-type]
    )


RUN = RunDirectory(STEPS, "s1000")

CASES = {
    "by number, not by name": (RUN, RULES, ["s9", "s10", "s11"]),
    "more are kept": (RUN, replace(RULES, keep_last=4), ["s9"]),
    "all are kept": (RUN, replace(RULES, keep_last=9), []),
    "every tenth": (RUN, replace(RULES, keep_every=10), ["s9", "s11"]),
    "by pattern": (RUN, replace(RULES, keep_tags=("s1?",)), ["s9"]),
    "by another pattern": (RUN, replace(RULES, keep_tags=("x*", "s9")), ["s10", "s11"]),
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
    "nearly all are": (lagging(0, 9, 0, 9, 0), replace(RULES, keep_last=4), []),
    "an older one goes as before": (lagging(0, 9, 0, 0, 0), RULES, ["s9", "s10", "s11"]),
    "an optimizer started afresh": (lagging(0, 0, 0, 9, 9), RULES, ["s9", "s10", "s11"]),
    "before the first that is left": (lagging(9, 9, 9, 9, 9), RULES, ["s9", "s10", "s11"]),
    "counts of another kind": (lagging(1, 2, 3, 4, 5), RULES, ["s9", "s10", "s11"]),
    "a count is not known": (lagging(0, 0, 0, 0, None), RULES, ["s9", "s10", "s11"]),
    "none counts between two": (lagging(0, 0, 9, None, 0), RULES, ["s9", "s10", "s11"]),
    "two names of a step count once": (
        RunDirectory((*STEPS, *tags("t1000")), "s1000"), RULES, ["s9", "s10", "s11"]
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
    (found,) = [choice for choice in choose(run, RULES, NOW) if choice.tag.name == name]
    assert (found.verdict, told in found.reason) == (AMBIGUOUS, True)


@pytest.mark.parametrize(("tag", "is_told"), [("s100", False), ("s1000", True)])
def test_a_tag_of_two_saves_is_told(tag: str, is_told: bool) -> None:
    (found,) = [c for c in choose(lagging(0, 0, 0, 0, 9), RULES, NOW) if c.tag.name == tag]
    assert (found.verdict, "may be of two saves" in found.reason) == (KEPT, is_told)


def test_a_save_under_way_is_nothing_unclear() -> None:
    run = RunDirectory((*STEPS, Tag("s1001", NOW, "no rank's files")), "s1000")
    assert verdicts(run)["s1001"] == KEPT


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


TAGS = st.builds(
    Tag,
    name=st.sampled_from(["s", "t", "best"]).flatmap(
        lambda head: st.integers(0, 30).map(lambda n: f"{head}{n}" if head != "best" else head)
    ),
    changed_ns=st.sampled_from([OLD, NOW]),
    problem=st.none() | st.just("torn"),
    is_linked=st.booleans(),
    lags=st.just(()) | st.tuples(st.none() | st.integers(0, 2)),
)
RUNS = st.lists(TAGS, min_size=1, max_size=12, unique_by=lambda tag: tag.name).flatmap(
    lambda found: st.builds(
        RunDirectory, st.just(tuple(found)), latest=st.sampled_from([tag.name for tag in found])
    )
)


@given(RUNS, st.integers(2, 4), st.none() | st.integers(1, 5))
def test_of_any_run_enough_is_left(
    run: RunDirectory, keep_last: int, keep_every: int | None
) -> None:
    if refusal(run) is not None:
        return
    rules = replace(RULES, keep_last=keep_last, keep_every=keep_every)
    gone = {choice.tag for choice in choose(run, rules, NOW) if choice.verdict == CANDIDATE}
    alike = replace(run, tags=tuple(replace(tag, lags=()) for tag in run.tags))
    assert {tag.name for tag in gone} <= {*candidates(alike, rules)}
    last = step_of(run.latest or "") or 0
    complete = [tag for tag in run.tags if tag.problem is None and (step_of(tag.name) or 0) <= last]
    left = {step_of(tag.name) for tag in complete if tag not in gone and tag.name != "best"}
    all_steps = {step_of(tag.name) for tag in complete if tag.name != "best"}
    assert len(left) >= min(keep_last, len(all_steps))
    # What goes is older than everything that is kept because it is new.
    newest = sorted(step for step in all_steps if step is not None)[-keep_last:]
    for tag in gone:
        step = step_of(tag.name)
        assert tag.problem is None
        assert not tag.is_linked
        assert tag.name != run.latest
        assert step is not None
        assert step < newest[0]
        assert tag.changed_ns == OLD


def ill(run: RunDirectory, *names: str) -> RunDirectory:
    """Return a run in which some tags hold NaN."""
    return replace(run, unhealthy=lambda tag: "3 NaN" if tag.name in names else "")


ILL = {
    "the newest is": (ill(RUN, "s1000"), RULES, ["s9", "s10"]),
    "one among the newest is": (ill(RUN, "s100"), RULES, ["s9", "s10"]),
    "two are": (ill(RUN, "s1000", "s100"), RULES, ["s9"]),
    "an older one is, and goes as before": (ill(RUN, "s10"), RULES, ["s9", "s10", "s11"]),
    "fewer are left than are to be kept": (ill(RUN, "s1000", "s100", "s11", "s9"), RULES, []),
    "none is left": (ill(RUN, "s9", "s10", "s11", "s100", "s1000"), RULES, []),
    "of a choice": (
        ill(replace(RUN, tags=(*STEPS, *tags("t10", "t12"))), "s100", "t12"), TAGGED, ["s9", "s10"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ILL)
def test_those_that_hold_nan_do_not_count(case: str) -> None:
    run, rules, wanted = ILL[case]
    assert candidates(run, rules) == wanted


def test_as_few_are_read_as_are_needed() -> None:
    asked: list[str] = []

    def look(tag: Tag) -> str:
        asked.append(tag.name)
        return "3 NaN" if tag.name == "s100" else ""

    choose(replace(RUN, unhealthy=look), RULES, NOW)
    assert asked == ["s1000", "s100", "s11"]


def test_those_after_the_newest_healthy_one_are_told() -> None:
    run = changed(ill(RUN, "s10", "s100", "s1000"), "s1000", changed_ns=NOW)
    found = {choice.tag.name: choice for choice in choose(run, RULES, NOW)}
    assert {name for name, choice in found.items() if choice.unhealthy} == {"s100", "s1000"}
    told = {name: choice.reason for name, choice in found.items() if "NaN" in choice.reason}
    assert told == {
        "s10": "newer than the 2nd newest healthy one; not healthy: 3 NaN",
        "s100": "newer than the 2nd newest healthy one; not healthy: 3 NaN",
        "s1000": "changed 0.0 s ago, min_age= is 2h; not healthy: 3 NaN",
    }
    few = choose(ill(RUN, "s9", "s10", "s100", "s1000"), RULES, NOW)
    assert [choice.reason for choice in few if choice.tag.name in ("s10", "s11")] == [
        "fewer than 2 are healthy; not healthy: 3 NaN",
        "among the newest 2",
    ]


def test_the_states_of_the_newest_healthy_archive_are_not_dropped() -> None:
    """It may be the only one that a job can go on from, whatever is left in the run."""
    of = partial(protection, rules=RULES)
    assert of("s8", run=RUN) is None
    assert of("s10", run=replace(RUN, tags=STEPS[2:])) is None
    late = RunDirectory(tags("s100", "s1000"), "s1000")
    assert of("s50", run=late) is None
    assert of("s50", run=ill(late, "s1000")) is None
    assert of("s50", run=ill(late, "s1000", "s100")) == "no newer tag is known to be healthy"


def test_the_trash_keeps_the_newest_healthy_one() -> None:
    """A tag that was moved there when others counted comes back when these do not."""
    run = RunDirectory(tags("s100", "s1000"), "s1000", trashed=tags("s9", "s10", "s11"))

    def left(run: RunDirectory) -> list[str]:
        kept = {t.name: protection_in_trash(t, run, RULES) for t in run.trashed}
        return [name for name, reason in kept.items() if reason]

    assert left(run) == []
    assert left(ill(run, "s1000")) == ["s11"]
    assert left(ill(run, "s1000", "s100", "s11")) == ["s9", "s10", "s11"]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12, unique=True),
    st.sets(st.integers(1, 60)),
    st.integers(2, 4),
)
def test_the_newest_healthy_one_never_goes(steps: list[int], bad: set[int], keep: int) -> None:
    names = [f"s{step}" for step in steps]
    run = ill(RunDirectory(tags(*names), f"s{max(steps)}"), *(f"s{step}" for step in bad))
    rules = replace(RULES, keep_last=keep)
    gone = {step_of(c.tag.name) for c in choose(run, rules, NOW) if c.verdict == CANDIDATE}
    healthy = sorted({*steps} - bad)
    assert not gone & {*healthy[-keep:]}
    assert len(healthy) >= keep or not gone

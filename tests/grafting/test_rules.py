"""The language of the rules: patterns, what excludes what, and the lines that are advised."""

import pytest

from streamshard.errors import UsageError
from streamshard.formats.name_patterns import Pattern
from streamshard.grafting.origins import Inventory, Origin, origins_of
from streamshard.grafting.rules import Rules

OLD = Inventory({"embed": (4, 2), "layers.0.w": (3,), "layers.1.w": (3,)}, {"pos": (8,)})


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("a.*.w", "a.1.b.w", ("1.b",)),
        ("*.*", "a.b.c", ("a", "b.c")),
        ("a[0].w", "a[0].w", ()),
        ("a[0].w", "a0.w", None),
        ("{q,k}.*", "k.w", ("k", "w")),
        ("{q,k}.*", "v.w", None),
        ("a", "ab", None),
    ],
)
def test_a_pattern_matches(pattern: str, name: str, found: tuple[str, ...] | None) -> None:
    assert Pattern(pattern).match(name) == found


def test_stars_and_lists_stand_for_what_they_matched() -> None:
    new, old = Pattern("model.*.{query,key}.*"), Pattern("*.{q,k}.*")
    assert new.translate("model.3.key.weight", old) == "3.k.weight"
    assert new.translate("other.3.key.weight", old) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rename a", "no rule; there are new, fresh"),
        ("new", "give one pattern"),
        ("new a b", "give one pattern"),
        ("drop warm a", "give one pattern"),
        ("copy a -> b", "write it as 'copy NEW <- OLD'"),
        ("move a <- b", "write it as 'move OLD -> NEW'"),
        ("move a.* -> b", "as many stars"),
        ("move {a,b} -> {c,d,e}", "equally long"),
        ("new {a", "a brace is open"),
        ("new {a.*,b}", "has no stars"),
    ],
)
def test_a_line_that_is_no_rule_is_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rules.of(line)


def test_comments_and_empty_lines_are_left_out() -> None:
    rules = Rules.of("# all\n\nnew  a.*   # a head\nscheduler start\nnew warm b\n")
    assert rules.lines == ["new a.*", "new warm b", "scheduler start"]
    assert rules.scheduler_of_start
    assert [rule.is_warm for rule in rules.rules] == [False, True]


def _start(**trained: tuple[int, ...]) -> Inventory:
    return Inventory({**OLD.trained, **trained}, OLD.untrained)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("new embed\nfresh embed", "exclude each other: new embed; fresh embed"),
        ("copy embed <- layers.0.w\nnew embed", "is new, and .* names its source"),
        ("copy layers.1.w <- embed\ncopy *.1.w <- *.0.w", "exclude each other"),
        ("new nothing", "'new nothing' matches no name of START; one is 'embed'"),
        ("drop nothing", "'drop nothing' matches no name of SRC"),
        ("drop embed", "is dropped, and START has its values"),
        ("move layers.0.w -> layers.1.w", "is moved to 'layers.1.w', and used once more"),
        ("copy embed <- nothing", "would be 'nothing', which SRC has no"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        origins_of(OLD, _start(), Rules.of(rules))


@pytest.mark.parametrize(
    ("start", "lines"),
    [
        (_start(embed=(6, 2)), ["rows embed"]),
        (_start(embed=(4, 3)), ["new embed"]),
        (_start(**{"head.w": (2,)}), ["new head.w"]),
        (_start(**{"layers.2.w": (3,), "layers.3.w": (3,)}), ["new layers.2.w", "new layers.3.w"]),
        (_start(**{"lora.0.a": (1,), "lora.1.a": (1,)}), ["new lora.*.a"]),
        (Inventory({**OLD.trained, **OLD.untrained}, {}), ["thaw pos"]),
        (
            Inventory({"embed": (4, 2)}, {**OLD.untrained, "layers.0.w": (3,)}),
            ["freeze layers.0.w", "drop layers.1.w"],
        ),
        (Inventory(OLD.trained, {}), ["drop pos"]),
        (Inventory({"embed": (4, 2)}, OLD.untrained), ["drop layers.*.w"]),
    ],
)  # fmt: skip
def test_the_lines_that_are_advised_name_every_difference(
    start: Inventory, lines: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        origins_of(OLD, start, Rules())
    assert refused.value.__notes__ == lines
    assert origins_of(OLD, start, Rules.of("\n".join(lines)))


@pytest.mark.parametrize(
    ("rules", "name", "origin"),
    [
        ("", "embed", Origin("kept", "embed", keeps_states=True)),
        ("new embed", "embed", Origin("new")),
        ("fresh embed", "embed", Origin("fresh", "embed")),
        ("rows embed", "embed", Origin("kept", "embed", keeps_states=True)),
        (
            "copy layers.1.w <- layers.0.w\ndrop layers.1.w",
            "layers.1.w",
            Origin("copy", "layers.0.w", keeps_states=True),
        ),
        ("fresh *", "pos", Origin("kept", "pos", "module")),
    ],
)  # fmt: skip
def test_a_rule_says_where_values_come_from(rules: str, name: str, origin: Origin) -> None:
    assert origins_of(OLD, _start(), Rules.of(rules))[name] == origin


def test_two_rules_may_go_together() -> None:
    start = Inventory(
        {"embed": (4, 2), "base.pos": (9,)}, {"base.layers.0.w": (3,), "layers.1.w": (3,)}
    )
    rules = "move {layers.0.w,pos} -> base.{layers.0.w,pos}\nfreeze *layers*\nrows *pos\nthaw *pos"
    found = origins_of(OLD, start, Rules.of(rules))
    assert found["base.pos"] == Origin("rows move thaw", "pos", "module", rows=8)
    assert found["base.layers.0.w"] == Origin("move freeze", "layers.0.w")


def test_what_another_one_takes_the_place_of_is_named_too() -> None:
    rules = "copy layers.1.w <- layers.0.w"
    with pytest.raises(UsageError) as refused:
        origins_of(OLD, _start(), Rules.of(rules))
    assert refused.value.__notes__ == ["drop layers.1.w"]
    assert origins_of(OLD, _start(), Rules.of(f"{rules}\ndrop layers.1.w"))

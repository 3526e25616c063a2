"""The language of the rules: patterns, what excludes what, and the lines that are advised."""

import random
from dataclasses import replace

import pytest

from streamshard.errors import UsageError
from streamshard.formats.name_patterns import Pattern
from streamshard.grafting import origins
from streamshard.grafting.origins import Inventory, Origin
from streamshard.grafting.rules import Rules

OLD = Inventory({"embed": (4, 2), "layers.0.w": (3,), "layers.1.w": (3,)}, {"pos": (8,)})


def origins_of(source: Inventory, start: Inventory, rules: Rules) -> dict[str, Origin]:
    """Decide it for a model in one part."""
    (found,) = origins.origins_of([(source, start)], rules)
    return found


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
        (_start(**{"layers.2.w": (3,), "layers.3.w": (3,)}), ["new layers.{2,3}.w"]),
        (_start(**{"layers.2.w": (3,), "x.0.1.w": (3,)}), ["new layers.2.w", "new x.0.1.w"]),
        (_start(**{"lora.0.a": (1,), "lora.1.a": (1,)}), ["new lora.*.a"]),
        (Inventory({**OLD.trained, **OLD.untrained}, {}), ["thaw pos"]),
        (
            Inventory({"embed": (4, 2)}, {**OLD.untrained, "layers.0.w": (3,)}),
            ["freeze layers.0.w", "drop layers.1.w"],
        ),
        (Inventory({**OLD.trained, "pos": (8, 2)}, {}), ["new pos"]),
        (Inventory(OLD.trained, {}), ["drop pos"]),
        (Inventory(OLD.trained, OLD.untrained, exact={"pos": "int64"}), ["new pos"]),
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


WRAPPED = [("embed", "layers.{}.w"), ("base.model.embed", "base.model.layers.{}.layer.w")]


@pytest.mark.parametrize("is_off", [False, True], ids=["put on", "taken off"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_a_wrapper_has_renamed_is_moved(is_frozen: bool, is_off: bool) -> None:
    sides = [
        {first: (4, 2), second.format(0): (3,), second.format(1): (3,)} for first, second in WRAPPED
    ]
    old, new = reversed(sides) if is_off else sides
    start = Inventory({"a": (2,)}, new) if is_frozen else Inventory({**new, "a": (2,)}, {})
    with pytest.raises(UsageError) as refused:
        origins_of(Inventory(old, {}), start, Rules())
    (first, second), (third, fourth) = reversed(WRAPPED) if is_off else WRAPPED
    second, fourth = second.format("*"), fourth.format("*")
    wanted = [f"move {first} -> {third}", f"move {second} -> {fourth}", "new a"]
    wanted += [f"freeze {third}", f"freeze {fourth}"] * is_frozen
    assert refused.value.__notes__ == wanted
    found = origins_of(Inventory(old, {}), start, Rules.of("\n".join(wanted)))
    assert {name: origin.source for name, origin in found.items()} == {
        "a": None,
        **dict(zip(new, old, strict=True)),
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"w": (3,)}, {"base.w": (2,)}),
        ({"x.w": (3,)}, {"base.w": (3,)}),
        ({"layers.0.w": (3,)}, {"base.layers.1.w": (3,)}),
        ({"w": (3,)}, {"base.w": (3,), "copy.w": (3,)}),
        ({"a.w": (3,), "b.w": (3,)}, {"a.b.w": (3,)}),
    ],
    ids=["shape", "parts", "number", "two new", "two old"],
)
def test_what_only_looks_alike_is_not_moved(
    old: dict[str, tuple[int, ...]], new: dict[str, tuple[int, ...]]
) -> None:
    with pytest.raises(UsageError) as refused:
        origins_of(Inventory(old, {}), Inventory(new, {}), Rules())
    wanted = [f"new {name}" for name in new] + [f"drop {n}" for n in old]
    assert [line for line in refused.value.__notes__ if not line.startswith("#")] == wanted


def test_a_comment_tells_how_one_of_several_new_names_is_kept() -> None:
    old, new = Inventory({"w": (3,)}, {}), Inventory({"base.w": (3,), "copy.w": (3,)}, {})
    with pytest.raises(UsageError) as refused:
        origins_of(old, new, Rules())
    (comment,) = (line for line in refused.value.__notes__ if line.startswith("#"))
    assert "'w' may be 'base.w' or 'copy.w'" in comment
    assert "'copy base.w <- w'" in comment
    assert origins_of(old, new, Rules.of("copy base.w <- w\nnew copy.w"))


def test_what_a_wrapper_has_renamed_and_untied_is_copied() -> None:
    old = Inventory({"embed.w": (4, 2)}, {}, tied={"head.w": "embed.w"})
    new = Inventory({"base.head.saved.w": (4, 2)}, {"base.embed.w": (4, 2)})
    with pytest.raises(UsageError) as refused:
        origins_of(old, new, Rules())
    assert refused.value.__notes__ == [
        "copy base.embed.w <- embed.w", "copy base.head.saved.w <- embed.w", "freeze base.embed.w",
    ]  # fmt: skip
    found = origins_of(old, new, Rules.of("\n".join(refused.value.__notes__)))
    assert {origin.source for origin in found.values()} == {"embed.w"}


def test_an_adapter_of_another_rank_is_new_unless_a_rule_says_otherwise() -> None:
    old, new = (Inventory({"q.lora_A.default.weight": (rank, 8)}, {}) for rank in (8, 16))
    with pytest.raises(UsageError) as refused:
        origins_of(old, new, Rules())
    line, way_out = refused.value.__notes__
    assert line == "new q.lora_A.default.weight"
    assert way_out.startswith("# An adapter of another rank")
    (found,) = origins_of(old, new, Rules.of("\n".join(refused.value.__notes__))).values()
    assert found == Origin("new")
    (found,) = origins_of(old, new, Rules.of("rows *lora_A*")).values()
    assert found.rows == 8


def test_frozen_weights_that_a_source_left_out_are_those_of_start() -> None:
    start = Inventory({"a": (2,)}, {"b": (3,), "c": (3,)}, frozen=frozenset({"b"}))
    left_out = Inventory({"a": (2,)}, {"c": (3,)}, lacks_frozen=True)
    assert origins_of(left_out, start, Rules())["b"] == Origin("unsaved")
    with pytest.raises(UsageError) as refused:  # a buffer would have been saved
        origins_of(replace(left_out, untrained={}), start, Rules())
    assert refused.value.__notes__ == ["new c"]
    with pytest.raises(UsageError) as refused:
        origins_of(replace(left_out, lacks_frozen=False), start, Rules())
    assert refused.value.__notes__ == ["new b"]


def test_frozen_weights_that_stage_1_may_have_by_another_name_are_moved() -> None:
    """A whole training goes on with an adapter: its weights are not those of START's file."""
    old = Inventory({"w": (3,), "v": (2,)}, {}, lacks_frozen=True)
    frozen = {"base.w": (3,), "base.other": (5,)}
    start = Inventory({"a": (2,), "v": (2,)}, frozen, frozen=frozenset(frozen))
    with pytest.raises(UsageError) as refused:
        origins_of(old, start, Rules())
    assert refused.value.__notes__ == ["move w -> base.w", "new a", "freeze base.w"]
    found = origins_of(old, start, Rules.of("\n".join(refused.value.__notes__)))
    assert found["base.w"] == Origin("move freeze", "w")
    assert found["base.other"] == Origin("unsaved")


TIES = {"head": "embed"}
EMBED, HEAD = ({name: (4, 2)} for name in ("embed", "head"))


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        (Inventory(EMBED, {}, tied=TIES), Inventory(HEAD, {}), []),
        (Inventory(EMBED, {}, tied=TIES), Inventory({**EMBED, "head": (6, 2)}, {}), ["rows head"]),
        (Inventory(EMBED, {}, tied=TIES), Inventory({}, HEAD), ["freeze head"]),
        (Inventory(EMBED, {}), Inventory(HEAD, {}, tied={"embed": "head"}), []),
        (Inventory({}, EMBED, tied=TIES), Inventory(HEAD, {}), ["thaw head"]),
    ],
    ids=["moved", "untied", "frozen", "tied there", "thawed"],
)  # fmt: skip
def test_what_is_tied_is_copied_by_its_other_name(
    old: Inventory, new: Inventory, lines: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        origins_of(old, new, Rules())
    assert refused.value.__notes__ == ["copy head <- embed", *lines]
    found = origins_of(old, new, Rules.of("\n".join(refused.value.__notes__)))
    assert found["head"].source == "embed"


@pytest.mark.parametrize(
    ("name", "ties", "lines"),
    [("head", TIES, ["new head", "drop embed"]), ("x.embed", {}, ["new x.embed", "drop embed"])],
)
def test_integers_of_another_dtype_are_neither_copied_nor_moved(
    name: str, ties: dict[str, str], lines: list[str]
) -> None:
    old = Inventory({}, EMBED, exact={"embed": "int64"}, tied=ties)
    new = Inventory({}, {name: (4, 2)}, exact={name: "int32"})
    with pytest.raises(UsageError) as refused:
        origins_of(old, new, Rules())
    assert refused.value.__notes__ == lines
    assert origins_of(old, new, Rules.of("\n".join(lines)))[name] == Origin("new")


def test_a_rule_for_a_tied_name_is_refused_with_the_name_that_has_the_values() -> None:
    tied = Inventory(EMBED, {}, tied=TIES)
    with pytest.raises(UsageError, match="but 'head', which is tied to 'embed'"):
        origins_of(tied, tied, Rules.of("rows *head"))
    with pytest.raises(UsageError, match="SRC has tied; give 'embed' in its place"):
        origins_of(tied, Inventory({**EMBED, "x": (4, 2)}, {}), Rules.of("copy x <- head"))


@pytest.mark.parametrize("key", ["a b", "a#b", "a{b", "a}b", "a*b", "{a,b}", "new -> x"])
def test_signs_of_rules_in_names_are_stars_in_what_is_advised(key: str) -> None:
    both = [{"w": (2,), f"{outer}n.{key}.w": (2,)} for outer in ("", "base.")]
    for old, new in (both, ({"w": (2,)}, both[0]), (both[0], {"w": (2,)})):
        with pytest.raises(UsageError) as refused:
            origins_of(Inventory(old, {}), Inventory(new, {}), Rules())
        (line,) = refused.value.__notes__
        assert origins_of(Inventory(old, {}), Inventory(new, {}), Rules.of(line)).keys() == {*new}


def test_what_another_one_takes_the_place_of_is_named_too() -> None:
    rules = "copy layers.1.w <- layers.0.w"
    with pytest.raises(UsageError) as refused:
        origins_of(OLD, _start(), Rules.of(rules))
    assert refused.value.__notes__ == ["drop layers.1.w"]
    assert origins_of(OLD, _start(), Rules.of(f"{rules}\ndrop layers.1.w"))


def _random(draw: random.Random, begin: str) -> Inventory:
    """Return what a job may have: weights trained, frozen and left out, buffers, tied names."""
    names = [begin + name for name in ("w", "e", "h", "l.0.w", "l.1.w", "m.0.k.b")]
    kinds = {n: draw.choice(["trained"] * 4 + ["frozen", "buffer", "unsaved", "no"]) for n in names}
    shapes = {name: draw.choice([(), (3,), (4, 2), (6, 2), (4, 3)]) for name in names}
    trained = {name: shapes[name] for name in names if kinds[name] == "trained"}
    others = {name: shapes[name] for name in names if kinds[name] in ("frozen", "buffer")}
    saved = [*trained, *others]
    absent = [name for name in names if kinds[name] == "no"]
    return Inventory(
        trained,
        others,
        unsaved=frozenset(name for name in names if kinds[name] == "unsaved"),
        frozen=frozenset(name for name in others if kinds[name] == "frozen"),
        lacks_frozen=draw.random() < 0.3,
        bare=frozenset(name for name in trained if draw.random() < 0.05),
        exact={name: "int64" for name in others if draw.random() < 0.3},
        tied={name: draw.choice(saved) for name in absent if saved},
    )


@pytest.mark.parametrize("seed", range(300))
def test_what_is_advised_is_taken_as_it_is_printed(seed: int) -> None:
    """What was not advised at first, as it depends on a rule, is advised the second time."""
    draw = random.Random(seed)
    old, new = (_random(draw, draw.choice(["", "base."])) for _ in range(2))
    text = ""
    for _ in range(2):
        try:
            origins_of(old, new, Rules.of(text))
        except UsageError as error:
            text = "\n".join((text, *error.__notes__))
    assert origins_of(old, new, Rules.of(text)).keys() == new.shapes.keys()

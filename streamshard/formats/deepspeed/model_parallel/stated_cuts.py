"""How tensor parallelism cut the parameters of a job, whatever tells it: files, or rules of a user.

A rule is a line, after a pattern of names and a colon. Patterns start at the beginning of a name,
as those do that DeepSpeed's files have::

    # Attention: query, key and value in one, each cut by itself.
    .*\\.qkv\\.weight: sub 0 [4096, 1024, 1024]
    .*\\.dense\\.weight: split 1
    .*norm: replicated
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from streamshard.errors import DisagreementError, UnsupportedError, UsageError
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import AS_SAVED
from streamshard.formats.facts import RuleLines
from streamshard.formats.pickle.inert import show
from streamshard.layout.boxes import NotTiledError
from streamshard.layout.model_cut import ModelCut, Shape, segments_cut, split_cut, whole_cut

_STEP: Final = re.compile(
    r"(?:\\[^A-Za-z0-9]|\\[dDwWsS]|\[[^]\\[^]+\]|[^][\\^$.*+?{}()|]|\.)([*+?]?)"
)
"""What stands for one character, or for several of a kind."""
_MOST_REPEATED: Final = 3
_LONGEST: Final = 512
"""Characters of a pattern, and of a name that it is tried on."""
_RULE: Final = re.compile(
    r"(?P<whole>replicated)|split +(?P<split>[0-9])|sub +(?P<sub>[0-9]) *\[(?P<sizes>[0-9, ]+)\]"
)
_MOST_DIGITS: Final = 13


class StatedCuts(ABC):
    """Tells how each parameter is cut among the tensor-parallel ranks."""

    @abstractmethod
    def cut(self, name: str, shards: Mapping[int, Shape], ranks: int) -> ModelCut:
        """Return how a parameter is cut; `shards`: rank → shape of its tensor."""

    def is_default(self, name: str) -> bool:
        """Tell whether a parameter is taken for cut only because no list has it."""
        return False

    def is_averaged(self, name: str) -> bool:
        """Tell whether each rank has a parameter with values of its own, and the mean counts."""
        return False

    def is_vocabulary(self, name: str) -> bool:
        """Tell whether a parameter has a row for each word, and more for padding."""
        return False


def cut_by_rule(
    name: str,
    shards: Mapping[int, Shape],
    ranks: int,
    rule: str,
    cut: Callable[[Sequence[Shape]], ModelCut],
) -> ModelCut:
    """Cut a tensor of these shards by a rule.

    `shards`: rank → shape of its tensor.
    `rule`: what holds the rule, for messages.
    `cut`: makes the cut of all ranks' shapes.
    """
    if len(shards) < ranks:
        message = f"'{name}' is on {len(shards)} of the {ranks} tensor-parallel ranks"
        raise UnsupportedError(f"{message}. {AS_SAVED}")
    shapes = [shards[rank] for rank in range(ranks)]
    try:
        return cut(shapes)
    except (IndexError, TypeError, ValueError, NotTiledError) as error:
        shown = " and ".join(str(list(shape)) for shape in shapes)
        message = f"'{name}' is {shown} on its ranks, which is not how {rule} has it"
        raise DisagreementError(f"{message} ({error})") from error


def replicated(shapes: Sequence[Shape]) -> ModelCut:
    """Return the cut of a tensor that each rank has whole."""
    if any(shape != shapes[0] for shape in shapes):
        raise NotTiledError("replicated, so all are alike")
    return whole_cut(shapes[0], [True] * len(shapes))


def split(shapes: Sequence[Shape], dimension: int) -> ModelCut:
    """Return the cut of a tensor of which each rank has a block along a dimension."""
    return split_cut(joined(shapes, dimension), dimension, [shape[dimension] for shape in shapes])


def even_widths(sizes: Sequence[int], ranks: int) -> Sequence[Sequence[int]]:
    """Return, for each sub-tensor of these sizes, the equal widths of the ranks' parts."""
    if not sizes or any(size % ranks for size in sizes):
        message = f"sub-parameters of {show(list(sizes))} on {ranks} ranks"
        raise NotTiledError(f"{message}, in unequal parts")
    return [[size // ranks] * ranks for size in sizes]


def joined(shapes: Sequence[Shape], dimension: int) -> Shape:
    """Return the shape of tensors one after the other, along a dimension."""
    if len(shapes[0]) <= dimension:
        raise NotTiledError(f"cut along dimension {dimension}")
    rest = {(*shape[:dimension], *shape[dimension + 1 :]) for shape in shapes}
    if len(rest) > 1:
        raise NotTiledError(f"cut along dimension {dimension}, so the others are alike")
    total = sum(shape[dimension] for shape in shapes)
    return (*shapes[0][:dimension], total, *shapes[0][dimension + 1 :])


_V = TypeVar("_V")


class NamePatterns(Generic[_V]):
    """A value for each parameter that a pattern of a file matches, as DeepSpeed runs `re.match`.

    AutoTP's patterns match one name each; Megatron-DeepSpeed's have the number of a layer in them
    (`\\d+`).
    """

    def __init__(self, patterns: Mapping[str, _V] | Iterable[tuple[str, _V]]) -> None:
        self._by_name: dict[str, _V] = {}
        self._others: list[tuple[re.Pattern[str], _V]] = []
        for pattern, value in patterns.items() if isinstance(patterns, Mapping) else patterns:
            text = str(pattern)
            name = re.sub(r"\\(.)", r"\1", text[1:-1])
            if text != f"^{re.escape(name)}$":
                self._others.append((_compiled(text), value))
            elif name in self._by_name:
                raise DisagreementError(f"'{name}' is matched by two patterns")
            else:
                self._by_name[name] = value

    def find(self, name: str) -> _V | None:
        """Return the value of the pattern that matches a name, if one does."""
        found = self.find_all(name)
        if len(found) > 1:
            raise DisagreementError(f"'{name}' is matched by several patterns of one kind")
        return found[0][1] if found else None

    def find_all(self, name: str) -> list[tuple[str, _V]]:
        """List the patterns that match a name, each with its value."""
        found = [(f"^{re.escape(name)}$", self._by_name[name])] if name in self._by_name else []
        if self._others and len(name) > _LONGEST:
            raise UnsupportedError(f"a name of {len(name):,} characters: {show(name)}")
        return found + [(each.pattern, value) for each, value in self._others if each.match(name)]


def _compiled(text: str) -> re.Pattern[str]:
    """Compile a pattern that cannot run without end: it repeats few characters, and no groups."""
    body = text.removeprefix("^").removesuffix("$") if len(text) <= _LONGEST else ""
    steps = list(_STEP.finditer(body))
    repeated = sum(1 for step in steps if step[1])
    if "".join(step[0] for step in steps) != body or repeated > _MOST_REPEATED or not body:
        raise UnsupportedError(
            f"{show(text)} is not a pattern of names that is run here: single characters and "
            f"classes of them, at most {_MOST_REPEATED} of them repeated"
        )
    return re.compile(text)


_OneRule = Callable[[Sequence[Shape]], ModelCut]


def _sub_cut(dimension: int, sizes: Sequence[int], shapes: Sequence[Shape]) -> ModelCut:
    widths = even_widths(sizes, len(shapes))
    return segments_cut(joined(shapes, dimension), dimension, widths)


class CutRules(StatedCuts):
    """The cut of each parameter that a rule is for."""

    def __init__(self, text: str, named: str) -> None:
        """Read lines of rules.

        `named`: where they are, for messages.
        """
        self.text = text
        self._named = named
        try:
            self._rules = NamePatterns(_read(text, named))
        except UnsupportedError as error:
            raise UsageError(f"{named}: {error}") from error
        except DisagreementError as error:
            raise UsageError(f"{named}: {error}; leave one") from error

    def cut(self, name: str, shards: Mapping[int, Shape], ranks: int) -> ModelCut:
        rules = self._rules.find_all(name)
        if not rules:
            raise UsageError(f"{self._named}: no rule is for '{name}'")
        if len(rules) > 1:
            patterns = " and ".join(f"'{pattern}'" for pattern, _ in rules[:2])
            raise UsageError(f"{self._named}: two rules match '{name}': {patterns}; leave one")
        (_, rule), *_ = rules
        return cut_by_rule(name, shards, ranks, self._named, rule)


def _read(text: str, named: str) -> Iterator[tuple[str, _OneRule]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pattern, _, stated = (part.strip() for part in line.rpartition(":"))
        rule = _RULE.fullmatch(stated)
        if not pattern or rule is None:
            raise UsageError(
                f"{named}, line {number}: '{line.strip()[:80]}' is no rule. A rule is a pattern of "
                "names, a colon, and one of: replicated; split 1; sub 0 [4096, 1024, 1024]"
            )
        digits = re.findall(r"\d+", rule["sizes"] or "")
        if any(len(size) > _MOST_DIGITS for size in digits):
            raise UsageError(f"{named}, line {number}: sizes have at most {_MOST_DIGITS} digits")
        if rule["split"]:
            yield pattern, partial(split, dimension=int(rule["split"]))
        elif rule["sub"]:
            yield pattern, partial(_sub_cut, int(rule["sub"]), [int(size) for size in digits])
        else:
            yield pattern, replicated


def read_rules(given: RuleLines | None) -> CutRules | None:
    """Read rules, if they are given."""
    return None if given is None else CutRules(given.text, given.name)

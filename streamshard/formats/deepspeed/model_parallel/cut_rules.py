"""RuleLines that a user gives for how tensor parallelism cut the parameters of a job.

Each is a line, after a pattern of names and a colon. Patterns start at the
beginning of a name, as those do that DeepSpeed's files have::

    # Attention: query, key and value in one, each cut by itself.
    .*\\.qkv\\.weight: sub 0 [4096, 1024, 1024]
    .*\\.dense\\.weight: split 1
    .*norm: replicated
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from streamshard.errors import DisagreementError, UnsupportedError, UsageError
from streamshard.formats.deepspeed.model_parallel.stated_cuts import (
    NamePatterns,
    StatedCuts,
    cut_by_rule,
    even_widths,
    joined,
    replicated,
    split,
)
from streamshard.formats.facts import RuleLines
from streamshard.layout.model_cut import ModelCut, Shape, segments_cut

_RULE: Final = re.compile(
    r"(?P<whole>replicated)|split +(?P<split>[0-9])|sub +(?P<sub>[0-9]) *\[(?P<sizes>[0-9, ]+)\]"
)
_MOST_DIGITS: Final = 13


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
        found = self._rules.find_all(name)
        if not found:
            raise UsageError(f"{self._named}: no rule is for '{name}'")
        if len(found) > 1:
            patterns = " and ".join(f"'{pattern}'" for pattern, _ in found[:2])
            raise UsageError(f"{self._named}: two rules match '{name}': {patterns}; leave one")
        (_, rule), *_ = found
        return cut_by_rule(name, shards, ranks, self._named, rule)


def _read(text: str, named: str) -> Iterator[tuple[str, _OneRule]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pattern, _, stated = (part.strip() for part in line.rpartition(":"))
        found = _RULE.fullmatch(stated)
        if not pattern or found is None:
            raise UsageError(
                f"{named}, line {number}: '{line.strip()[:80]}' is no rule. A rule is a pattern of "
                "names, a colon, and one of: replicated; split 1; sub 0 [4096, 1024, 1024]"
            )
        digits = re.findall(r"\d+", found["sizes"] or "")
        if any(len(size) > _MOST_DIGITS for size in digits):
            raise UsageError(f"{named}, line {number}: sizes have at most {_MOST_DIGITS} digits")
        if found["split"]:
            yield pattern, partial(split, dimension=int(found["split"]))
        elif found["sub"]:
            yield pattern, partial(_sub_cut, int(found["sub"]), [int(size) for size in digits])
        else:
            yield pattern, replicated


def read_rules(given: RuleLines | None) -> CutRules | None:
    """Read rules, if they are given."""
    return None if given is None else CutRules(given.text, given.name)

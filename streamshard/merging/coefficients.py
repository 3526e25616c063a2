"""The weights of a mean of checkpoints: as listed, or as a decay of the learning rate has them.

A decay takes the learning rate from 1 to 0 along a curve f, from the first checkpoint on. Merging k
checkpoints with the weights f(j/k) - f((j+1)/k), for j from 0 to k - 1, weighs what was learned
between them as this decay would have (arXiv 2507.17634). A linear one amounts to the mean.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from streamshard.errors import Option, UsageError
from streamshard.sizes import counted

_CURVES: Final[Mapping[str, Callable[[float], float]]] = {
    "1-sqrt": lambda at: 1 - math.sqrt(at),
    "cosine": lambda at: (1 + math.cos(math.pi * at)) / 2,
}
"""Name → learning rate at a part of the decay."""
_MEANS: Final = ("mean", "linear")
"""Names of equal weights, which are also those of a decay along a line."""
_EMA: Final = "ema:"
_FORMS: Final = f"{', '.join((*_MEANS, *_CURVES))}, {_EMA}0.9, or numbers such as 0.2,0.3,0.5"
_TOLERANCE: Final = 1e-9
"""What the sum of weights may be off; in float32 it makes no difference."""


def is_of_age(asked: str) -> bool:
    """Tell whether weights depend on which checkpoint is older.

    >>> is_of_age("1-sqrt"), is_of_age("ema:0.9"), is_of_age("mean"), is_of_age("0.5,0.5")
    (True, True, False, False)
    """
    return asked in _CURVES or asked.startswith(_EMA)


def as_text(weights: str | Sequence[float]) -> str:
    """Return weights as they are written on the command line.

    >>> as_text([0.25, 0.75]), as_text("mean")
    ('0.25,0.75', 'mean')
    """
    if isinstance(weights, str):
        return weights
    try:
        return ",".join(repr(float(weight)) for weight in weights)
    except (TypeError, ValueError) as error:
        message = f"{Option('weights', f'{weights}')}: choose one of {_FORMS}"
        raise UsageError(message) from error


def coefficients(asked: str, count: int) -> list[float]:
    """Return the weight of each of some checkpoints, the oldest first.

    >>> coefficients("mean", 4)
    [0.25, 0.25, 0.25, 0.25]
    >>> [round(one, 3) for one in coefficients("1-sqrt", 3)]
    [0.577, 0.239, 0.184]
    >>> coefficients("ema:0.5", 3)
    [0.25, 0.25, 0.5]
    """
    if asked in _MEANS:
        return [1 / count] * count
    if asked in _CURVES:
        rates = [_CURVES[asked](place / count) for place in range(count)]
        return [one - other for one, other in pairwise([*rates, 0.0])]
    if asked.startswith(_EMA):
        (kept,) = _numbers(asked, asked.removeprefix(_EMA).split("\n"))
        if not 0 <= kept < 1:
            raise UsageError(f"{Option('weights', asked)}: give a part that is kept, such as 0.9")
        newer = [(1 - kept) * kept**age for age in range(count - 1)]
        return [kept ** (count - 1), *newer[::-1]]
    return _listed(asked, count)


def _listed(asked: str, count: int) -> list[float]:
    words, option = asked.split(","), Option("weights", asked)
    found = _numbers(asked, words)
    if len(found) != count:
        both = f"{counted(len(found), 'weight')}, and {counted(count, 'checkpoint')}"
        raise UsageError(f"{option}: {both}; give one for each of them")
    total = math.fsum(found)
    if abs(total - 1) > _TOLERANCE:
        raise UsageError(
            f"{option}: their sum is {total:.12g}, not 1; give weights that add up to 1"
        )
    return found


def _numbers(asked: str, words: Sequence[str]) -> list[float]:
    try:
        found = [float(word) for word in words]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise UsageError(f"{Option('weights', asked)}: choose one of {_FORMS}")
    return found

"""Words the options in messages as the command line's flags."""

import argparse
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import Final

from streamshard.cli.parser import arguments_of
from streamshard.errors import Option
from streamshard.sizes import show_duration

_OTHERS: Final = {"address": "--dask", "plan.save()": "--dry-run --plan-out"}
"""Flags of what is no keyword of a verb."""
_IN_MIB: Final = "memory_limit"


def flag(option: Option) -> str:
    """Word an option as the command line's flag, with its value if it takes one."""
    text = " ".join([_flags().get(option.name, option.name), *_value(option)])
    return f"{option.what} given with {text}" if option.what else text


def _value(option: Option) -> Iterator[str]:
    value = option.value
    if isinstance(value, timedelta):
        yield show_duration(value)
    elif isinstance(value, list | tuple):
        yield ",".join(map(str, value))
    elif isinstance(value, int) and option.name == _IN_MIB:
        yield f"{value >> 20}MiB"
    elif value is not None and not isinstance(value, bool):
        yield str(value)


@cache
def _flags() -> Mapping[str, str]:
    """Return the flag of each keyword. The parser knows all of them."""
    found = dict(_OTHERS)
    for action in arguments_of()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for option in chain.from_iterable(verb._actions for verb in action.choices.values()):
                if option.option_strings:
                    found.setdefault(option.dest, option.option_strings[-1])
    return found

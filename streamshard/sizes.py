"""Sizes, durations and lists as people write them."""

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
"""Units in which sizes are shown."""
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse(text: str, *, whole: int | None = None, needs_unit: bool = False) -> int:
    """Read a size in bytes.

    Parameters
    ----------
    whole
        What a percentage is taken of; without it, percentages are refused.
    needs_unit
        Refuse a number alone where other programs count in KiB or MB.

    >>> parse("64MiB"), parse("5GB"), parse("1.5 KiB"), parse("50%", whole=1000)
    (67108864, 5000000000, 1536, 500)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*", text)
    unit = match[2].upper() if match else None
    if match and unit == "%" and whole is not None and float(match[1]) <= 100:
        return int(whole * float(match[1]) / 100)
    if match is None or unit not in _UNITS:
        percent = " or 50%" if whole is not None else ""
        raise ValueError(f"{text!r} is not a size; write 64MiB, 5GB{percent}")
    if not unit and needs_unit:
        raise ValueError(f"{text!r} has no unit; write {match[1]}MB or {match[1]}B")
    return int(float(match[1]) * _UNITS[unit])


def parse_time(text: str) -> timedelta:
    """Read a duration.

    >>> str(parse_time("7d")), str(parse_time("90 m")), str(parse_time("0"))
    ('7 days, 0:00:00', '1:30:00', '0:00:00')
    """
    match = re.fullmatch(r"\s*(?:(\d{1,6})\s*([smhdw])|0)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a length of time; write 2h, 7d, 30m")
    return timedelta(seconds=int(match[1] or 0) * _SECONDS[match[2] or "s"])


def show_duration(time: timedelta) -> str:
    """Format a duration as options take it, in the largest unit that leaves no remainder.

    >>> show_duration(timedelta(days=7)), show_duration(timedelta(minutes=90))
    ('7d', '90m')
    >>> show_duration(timedelta(hours=2)), show_duration(timedelta(0))
    ('2h', '0s')
    """
    seconds = int(time.total_seconds())
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds // _SECONDS[unit]}{unit}"
    return f"{seconds}s"


def show_bytes(nbytes: int) -> str:
    """Format a size for people.

    >>> show_bytes(0), show_bytes(1536), show_bytes(5 << 30)
    ('0 B', '1.5 KiB', '5.0 GiB')
    """
    value = float(nbytes)
    *small, largest = UNITS
    for unit in small:
        if value < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {largest}"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun, in the plural where needed.

    >>> counted(1, "rank"), counted(1024, "data-parallel rank")
    ('1 rank', '1,024 data-parallel ranks')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def ordinal(number: int) -> str:
    """Format a place in an order.

    >>> ordinal(2), ordinal(11), ordinal(23), ordinal(104)
    ('2nd', '11th', '23rd', '104th')
    """
    last = 0 if number // 10 % 10 == 1 else number % 10
    return str(number) + {1: "st", 2: "nd", 3: "rd"}.get(last, "th")


def show_ranks(ranks: Sequence[int]) -> str:
    """List ranks as text, with consecutive ranks as ranges.

    >>> show_ranks([3]), show_ranks([4, 5, 6, 9])
    ('rank 3', 'ranks 4 to 6 and 9')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run))
             for run in runs]  # fmt: skip
    listed = ", ".join(named[:-1]) + " and " * (len(named) > 1) + named[-1]
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def some_of(names: Sequence[object], most: int = 8) -> str:
    """Join the first of some names, and count the others.

    >>> some_of(["a", "b", "c"], 2), some_of(["a", "b"], 2)
    ('a, b and 1 more', 'a, b')
    """
    shown, left = ", ".join(map(str, names[:most])), len(names) - most
    return f"{shown} and {left:,} more" if left > 0 else shown


def show_time(seconds: float) -> str:
    """Format a duration for people.

    >>> show_time(0.25), show_time(9.6), show_time(200), show_time(7500)
    ('0.2 s', '10 s', '3 min 20 s', '2 h 5 min')
    """
    if seconds < 5:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

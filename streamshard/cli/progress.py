"""Shows a run's progress: to a person at a terminal, or in a log file."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol, Self, TextIO

from streamshard.engine.run.phases import READING, READING_HEADERS, Progress, Silent
from streamshard.sizes import show_bytes, show_time

_RATE_SECONDS: Final = 10
"""The rate is the average over this time, as disks are faster at first."""
_QUIET_SECONDS: Final = 5
"""Shorter runs print no lines; lines are at least this far apart."""
_MOST_SECONDS: Final = 60
"""After this time there is a line although no tenth has passed."""
_WIDTH: Final = 80
"""Width of a terminal that does not report its own."""
_ERASE_REST: Final = "\x1b[K"


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of a run's progress."""

    phase: str
    """What the run does; `compact` puts the tag before it: `global_step80: writing`."""
    done_bytes: int
    """Bytes processed so far, including those that an earlier run wrote."""
    total_bytes: int | None
    """Bytes to process in this phase, before compression; None until known."""
    bytes_per_second: int | None
    """Rate of the last seconds, without bytes of an earlier run; None before any progress."""
    eta_seconds: float | None
    """Time left at that rate."""
    elapsed_seconds: float
    """Time since the command began."""

    @property
    def percent(self) -> int | None:
        """The part of the total that is done, in percent; None until the total is known."""
        if self.total_bytes is None:
            return None
        return 100 * self.done_bytes // max(1, self.total_bytes)

    @property
    def is_all(self) -> bool:
        """Whether no bytes are left to process."""
        return self.total_bytes is not None and self.done_bytes >= self.total_bytes


class Style(Protocol):
    """A way to show moments."""

    interval_seconds: float
    """Minimum time between two calls of `tell` in one phase."""
    end: str
    """Text that cleans up at the end."""

    def tell(self, moment: Moment) -> str:
        """Return the text to write now; empty if there is none."""


def display(
    *, is_quiet: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> AbstractContextManager[Progress]:
    """Show progress until the context ends: a bar on a terminal that can erase a line, else lines.

    `stream`: where progress is written; by default standard error.
    """
    if is_quiet:
        return nullcontext(Silent())
    stream = sys.stderr if stream is None else stream
    has_bar = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Display(Bar(lambda: _width(stream)) if has_bar else Lines(), stream, clock)


class Display:
    """Counts the progress that several threads report, and shows it in a style.

    If it cannot be written, for example because the reader is gone, the run continues.
    """

    def __init__(self, style: Style, stream: TextIO, clock: Callable[[], float]) -> None:
        self._style = style
        self._stream = stream
        self._clock = clock
        self._is_broken = False
        """Whether progress cannot be written any more."""
        self._lock = threading.Lock()
        self._phase = READING_HEADERS
        self._total_bytes: int | None = None
        self._done_bytes = self._kept_bytes = 0
        self._began = clock()
        self._next = self._began
        """Time from which progress may be shown again."""
        self._past: deque[tuple[float, int]] = deque()
        """(time, bytes processed by this run) of the moments that give the rate."""

    def __enter__(self) -> Self:
        with self._lock:
            self._show(is_due=True)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._show(is_due=True)
            self._write(self._style.end)

    def start(self, total_bytes: int, phase: str = READING) -> None:
        """Begin a new count; many short sections of one phase are not shown one by one."""
        with self._lock:
            is_new, self._phase = phase != self._phase, phase
            self._total_bytes = total_bytes
            self._done_bytes = self._kept_bytes = 0
            self._past = deque([(self._clock(), 0)])
            self._show(is_due=is_new)

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done_bytes += nbytes
            self._show()

    def keep(self, nbytes: int) -> None:
        """Leave bytes out of the rate."""
        with self._lock:
            self._kept_bytes += nbytes

    def enter(self, phase: str) -> None:
        """Show another phase, at once."""
        with self._lock:
            if phase != self._phase:
                self._phase = phase
                self._show(is_due=True)

    def _show(self, *, is_due: bool = False) -> None:
        now = self._clock()
        if is_due or now >= self._next:
            self._next = now + self._style.interval_seconds
            self._write(self._style.tell(self._moment(now)))

    def _moment(self, now: float) -> Moment:
        rate = self._rate(now)
        done, remainder = self._done_bytes, None
        if self._total_bytes is not None:
            # The estimated total may be a little less than the bytes that are read.
            done = min(done, self._total_bytes)
            remainder = self._total_bytes - done
        return Moment(
            phase=self._phase,
            done_bytes=done,
            total_bytes=self._total_bytes,
            bytes_per_second=rate,
            eta_seconds=None if remainder is None or rate is None else round(remainder / rate, 1),
            elapsed_seconds=round(now - self._began, 1),
        )

    def _rate(self, now: float) -> int | None:
        """Return the rate of the last seconds; None if there was no progress."""
        done = max(0, self._done_bytes - self._kept_bytes)
        self._past.append((now, done))
        while len(self._past) > 2 and self._past[1][0] <= now - _RATE_SECONDS:
            self._past.popleft()
        before, already = self._past[0]
        return int((done - already) / max(now - before, 1e-9)) or None

    def _write(self, text: str) -> None:
        if not text or self._is_broken:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._is_broken = True


class Bar:
    """One terminal line that is redrawn, and erased at the end.

    tqdm draws it, without colours. The counting is our own: tqdm knows neither phases nor bytes
    that an earlier run wrote.
    """

    interval_seconds = 0.1
    end = f"\r{_ERASE_REST}"

    def __init__(self, width: Callable[[], int]) -> None:
        from tqdm import tqdm  # slow to import, and only a terminal needs it

        self._width = width
        self._draw = tqdm.format_meter

    def tell(self, moment: Moment) -> str:
        if moment.total_bytes is None:
            return f"\r{moment.phase}{_ERASE_REST}"
        drawn = self._draw(
            moment.done_bytes,
            moment.total_bytes,
            moment.elapsed_seconds,
            ncols=self._width() - 1,  # text in the last column would wrap the line
            prefix=moment.phase,
            ascii=True,
            bar_format=f"{{l_bar}}{{bar}}| {', '.join(_facts(moment))}",
        )
        return f"\r{drawn}{_ERASE_REST}"


class Lines:
    """A line at the start, and when a tenth or a minute has passed, for pipes and log files."""

    interval_seconds = 0.5
    end = ""

    def __init__(self) -> None:
        self._tenth = 0
        self._last_at = 0.0

    def tell(self, moment: Moment) -> str:
        """Write a line, unless nothing is new or the last line is too recent."""
        now, tenth = moment.elapsed_seconds, (moment.percent or 0) // 10
        self._tenth = min(self._tenth, tenth)  # a new count begins below it
        is_new = self._last_at == 0 or tenth > self._tenth
        if now < self._last_at + (_QUIET_SECONDS if is_new else _MOST_SECONDS):
            return ""
        self._tenth, self._last_at = tenth, now
        return f"streamshard: {', '.join([_said(moment), *_facts(moment)])}\n"


def _said(moment: Moment) -> str:
    return moment.phase if moment.percent is None else f"{moment.phase} {moment.percent}%"


def _facts(moment: Moment) -> list[str]:
    """Format how much is done, the rate, and the time left."""
    if moment.total_bytes is None:
        return []
    facts = [f"{show_bytes(moment.done_bytes)} of {show_bytes(moment.total_bytes)}"]
    if moment.bytes_per_second is not None:
        facts.append(f"{show_bytes(moment.bytes_per_second)}/s")
    if moment.eta_seconds is not None and not moment.is_all:
        eta = moment.eta_seconds
        facts.append(f"{'less than a second' if eta < 1 else show_time(eta)} left")
    return facts


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    except (OSError, ValueError):
        return _WIDTH

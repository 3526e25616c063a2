"""Shows how far a run is: to a person at a terminal, to a log file, to another program."""

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Final, Protocol, Self, TextIO

from tqdm import tqdm

from streamshard.engine.run.phases import READING, READING_HEADERS
from streamshard.operations.transfer.report import Progress, Silent
from streamshard.sizes import show_bytes, show_time

_RATE_SECONDS: Final = 10
"""The rate is that of so long a time, as disks are faster at first."""
_QUIET_SECONDS: Final = 5
"""What ends before that needs no lines, and no two tenths are told sooner after each other."""
_PHASE_SECONDS: Final = 1
"""Lines for phases that follow each other sooner are left out."""
_WIDTH: Final = 80
"""Of a terminal that does not tell its own."""
_ERASE_REST: Final = "\x1b[K"


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a run is; what `--progress json` writes, one object on a line."""

    phase: str
    """What is being done: `reading headers`, `writing`, `syncing`, `verifying` and `comparing` with
    `--verify`, `committing`; `comparing` first with `--if-needed`; `reading` where nothing is
    written. `compact` has the tag before it: `global_step80: writing`.
    """
    done_bytes: int
    """Dealt with so far, what an earlier run has left included."""
    total_bytes: int | None
    """To be dealt with in this phase: bytes to be written, before any compression; with `--verify`
    then those of files whose checksums are verified, and those that are compared with the source.
    `verify` and `compact` go through several stretches, each with its own. None before that is
    known."""
    bytes_per_second: int | None
    """In the last seconds, without what an earlier run has left; None before anything was done."""
    eta_seconds: float | None
    """Time left at that rate."""
    elapsed_seconds: float
    """Since the command began."""

    @property
    def percent(self) -> int | None:
        """How much is done; None before it is known how much there is to do."""
        if self.total_bytes is None:
            return None
        return 100 * self.done_bytes // max(1, self.total_bytes)

    @property
    def is_all(self) -> bool:
        """Whether nothing is left to be dealt with."""
        return self.total_bytes is not None and self.done_bytes >= self.total_bytes


class Style(Protocol):
    """A way to show moments."""

    interval_seconds: float
    """How often it wants to know, at most."""

    def tell(self, moment: Moment, *, is_last: bool) -> str:
        """Spell what is to be written now; empty if nothing is."""

    def end(self) -> str:
        """Spell what leaves everything in order."""


def display(
    mode: str,
    *,
    stream: TextIO | None = None,
    is_quiet: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> AbstractContextManager[Progress]:
    """Choose how progress is shown, from here until the context is left.

    Parameters
    ----------
    mode
        One of `PROGRESS_MODES`. `auto` is a bar on a terminal that can erase a line, else lines.
    stream
        Where to; by default standard error.
    """
    stream = sys.stderr if stream is None else stream
    if mode == "auto":
        mode = "bar" if stream.isatty() and os.environ.get("TERM") != "dumb" else "lines"
    styles: dict[str, Callable[[], Style]] = {
        "bar": lambda: Bar(lambda: _width(stream)),
        "lines": Lines,
        "json": JsonLines,
    }
    if is_quiet or mode not in styles:
        return nullcontext(Silent())
    return Display(styles[mode](), stream, clock)


class Display:
    """Counts what it is told, by several threads, and shows it in a style.

    What cannot be written, because nobody reads it any more for instance, ends no run.
    """

    def __init__(self, style: Style, stream: TextIO, clock: Callable[[], float]) -> None:
        self._style = style
        self._stream = stream
        self._clock = clock
        self._lock = threading.Lock()
        self._phase = READING_HEADERS
        self._total_bytes: int | None = None
        self._done_bytes = self._kept_bytes = 0
        self._began = clock()
        self._next = self._began
        """When something may be shown again."""
        self._past: deque[tuple[float, int]] = deque()
        """(time, bytes dealt with by this run) of moments that the rate is taken from."""

    def __enter__(self) -> Self:
        with self._lock:
            self._show(is_due=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._show(is_due=True, is_last=True)
            self._write(self._style.end())

    def start(self, total_bytes: int, phase: str = READING) -> None:
        """Begin to count anew; many small stretches of one phase are not shown one by one."""
        with self._lock:
            is_new, self._phase = phase != self._phase, phase
            self._total_bytes = total_bytes
            self._done_bytes = self._kept_bytes = 0
            self._past = deque([(self._clock(), 0)])
            self._show(is_due=is_new)

    def advance(self, nbytes: int) -> None:
        """Count bytes."""
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

    def stop(self) -> None:
        """End what `start` began; what comes next may be another."""
        with self._lock:
            self._show()

    def _show(self, *, is_due: bool = False, is_last: bool = False) -> None:
        now = self._clock()
        if is_due or now >= self._next:
            self._next = now + self._style.interval_seconds
            self._write(self._style.tell(self._moment(now), is_last=is_last))

    def _moment(self, now: float) -> Moment:
        rate = self._rate(now)
        done, left = self._done_bytes, None
        if self._total_bytes is not None:
            # What was reckoned beforehand may be a little less than what then is read.
            done = min(done, self._total_bytes)
            left = self._total_bytes - done
        return Moment(
            phase=self._phase,
            done_bytes=done,
            total_bytes=self._total_bytes,
            bytes_per_second=rate,
            eta_seconds=None if left is None or rate is None else round(left / rate, 1),
            elapsed_seconds=round(now - self._began, 1),
        )

    def _rate(self, now: float) -> int | None:
        """Tell the rate of the last seconds; None if nothing was done in them."""
        done = max(0, self._done_bytes - self._kept_bytes)
        self._past.append((now, done))
        while len(self._past) > 2 and self._past[1][0] <= now - _RATE_SECONDS:
            self._past.popleft()
        before, already = self._past[0]
        return int((done - already) / max(now - before, 1e-9)) or None

    def _write(self, text: str) -> None:
        if not text:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._style = Nothing()


class Nothing:
    """Shows nothing."""

    interval_seconds = float("inf")

    def tell(self, moment: Moment, *, is_last: bool) -> str:
        """Write nothing."""
        return ""

    def end(self) -> str:
        """Leave everything as it is."""
        return ""


class Bar:
    """One line of a terminal that is written again and again, and erased in the end.

    It is drawn by tqdm, without colours. The counting is our own: tqdm knows neither phases nor
    what an earlier run has left.
    """

    interval_seconds = 0.1

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width

    def tell(self, moment: Moment, *, is_last: bool) -> str:
        """Draw the line over itself."""
        if moment.total_bytes is None:
            return f"\r{moment.phase}{_ERASE_REST}"
        drawn = tqdm.format_meter(
            moment.done_bytes,
            moment.total_bytes,
            moment.elapsed_seconds,
            ncols=self._width() - 1,  # the last column would break the line
            prefix=moment.phase,
            ascii=True,
            bar_format=f"{{l_bar}}{{bar}}| {', '.join(_facts(moment))}",
        )
        return f"\r{drawn}{_ERASE_REST}"

    def end(self) -> str:
        """Erase the line."""
        return f"\r{_ERASE_REST}"


class Lines:
    """A line for every tenth and every phase, for pipes and log files."""

    interval_seconds = 0.5

    def __init__(self) -> None:
        self._told: tuple[str, int, int | None] | None = None
        """Phase, tenth and total of the last line."""
        self._told_at = 0.0

    def tell(self, moment: Moment, *, is_last: bool) -> str:
        """Write a line, unless there is nothing new, or the run is too young."""
        now = moment.elapsed_seconds
        new = moment.phase, (moment.percent or 0) // 10, moment.total_bytes
        gap = _QUIET_SECONDS
        if self._told is not None and self._told[0] != moment.phase:
            gap = _PHASE_SECONDS
        if new == self._told or now < self._told_at + gap:
            return ""
        self._told, self._told_at = new, now
        return f"streamshard: {', '.join([_said(moment), *_facts(moment)])}\n"

    def end(self) -> str:
        """Leave the lines as they are."""
        return ""


class JsonLines:
    """A JSON object on a line for every second and every phase, for programs; see `Moment`."""

    interval_seconds = 1.0

    def __init__(self) -> None:
        self._told: tuple[str, int, int | None] | None = None

    def tell(self, moment: Moment, *, is_last: bool) -> str:
        """Write an object, but the last not twice."""
        new = moment.phase, moment.done_bytes, moment.total_bytes
        if is_last and new == self._told:
            return ""
        self._told = new
        return json.dumps(asdict(moment)) + "\n"

    def end(self) -> str:
        """Leave the lines as they are."""
        return ""


def _said(moment: Moment) -> str:
    return moment.phase if moment.percent is None else f"{moment.phase} {moment.percent}%"


def _facts(moment: Moment) -> list[str]:
    """Spell how much is done, how fast, and how long it will take."""
    if moment.total_bytes is None:
        return []
    facts = [f"{show_bytes(moment.done_bytes)} of {show_bytes(moment.total_bytes)}"]
    if moment.bytes_per_second is not None:
        facts.append(f"{show_bytes(moment.bytes_per_second)}/s")
    if moment.eta_seconds is not None and not moment.is_all:
        facts.append(f"{show_time(moment.eta_seconds)} left")
    return facts


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    except (OSError, ValueError):
        return _WIDTH

"""What may go wrong at a call, and how a run may end then."""

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tests.faults.shim import DIED, NO_KIND, Action, Arming, Call, Kind, Side

_SOURCE_CODE: Final = 3
_TARGET_CODE: Final = 4
_KILLED: Final = -9

_ANY: Final = ~NO_KIND
_USUAL: Final = Kind.READ | Kind.WRITE | Kind.LOOK | Kind.MAKE | Kind.DROP | Kind.CHANGE | Kind.SYNC
_GROWS: Final = Kind.WRITE | Kind.MAKE | Kind.SYNC | Kind.RESERVE
_NAMES: Final = Kind.LOOK | Kind.MAKE | Kind.DROP | Kind.CHANGE
_ALTERS: Final = Kind.WRITE | Kind.MAKE | Kind.DROP | Kind.CHANGE | Kind.SYNC | Kind.RESERVE
_TRANSFERS: Final = Kind.READ | Kind.WRITE


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that may happen at a call."""

    name: str
    side: Side
    kinds: Kind
    """Calls at which it may happen."""
    action: Action
    error: int = 0
    onward: Kind = NO_KIND
    """Kinds of the calls that fail as well from there on."""
    codes: frozenset[int] = frozenset()
    """Exit codes that are right. 0 is too, if nothing that a run cannot do without has failed."""
    must_be_got_over: bool = False

    @property
    def is_death(self) -> bool:
        """Whether the process ends at the call."""
        return Action.DIE_BEFORE <= self.action <= Action.KILL_AFTER

    def fits(self, call: Call) -> bool:
        """Tell whether it may happen at a call."""
        return bool(call.side & self.side) and bool(call.kind & self.kinds)

    def at(self, number: int) -> Arming:
        """Have it happen at a call, or at the first after it that it fits."""
        return Arming(number, self.action, self.error, self.kinds, self.side, self.onward)


def _fails(
    side: Side,
    error: int,
    kinds: Kind,
    onward: Kind = NO_KIND,
    *,
    or_done: bool = False,
    must_be_got_over: bool = False,
) -> Fault:
    """Make a fault of an error: of one call, or of all from there on."""
    code = _SOURCE_CODE if side == Side.SOURCE else _TARGET_CODE
    duration = "from there on" if onward else "once"
    return Fault(
        name=f"{side.name} {errno.errorcode[error]} {duration}".lower(),
        side=side,
        kinds=kinds,
        action=Action.FAIL,
        error=error,
        onward=onward,
        codes=frozenset({0}) if must_be_got_over else frozenset({code, 0} if or_done else {code}),
        must_be_got_over=must_be_got_over,
    )


def _on_target() -> Iterable[Fault]:
    side = Side.TARGET
    for error in (errno.ENOSPC, errno.EDQUOT):
        yield _fails(side, error, _GROWS)
        yield _fails(side, error, _GROWS, _GROWS)
    yield _fails(side, errno.EIO, _USUAL)
    yield _fails(side, errno.EIO, _USUAL, _USUAL)
    yield _fails(side, errno.EACCES, _NAMES)
    yield _fails(side, errno.EACCES, _NAMES, _NAMES)
    yield _fails(side, errno.EROFS, _ALTERS)
    yield _fails(side, errno.EROFS, _ALTERS, _ALTERS)
    for error in (errno.ESTALE, errno.ETIMEDOUT):
        yield _fails(side, error, _USUAL, or_done=True)
        yield _fails(side, error, _USUAL, _USUAL)
    # A network file system may write what is left when a file is closed.
    for error in (errno.EDQUOT, errno.EIO):
        yield replace(
            _fails(side, error, Kind.CLOSE, or_done=True),
            name=f"target {errno.errorcode[error].lower()} at close",
        )
    interrupted = Kind.READ | Kind.WRITE | Kind.SYNC | Kind.LOCK | Kind.RESERVE
    yield _fails(side, errno.EINTR, interrupted, or_done=True)
    # Without locks nothing keeps two runs from one target, so a run wants to be told to.
    for error in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        yield _fails(side, error, Kind.LOCK, Kind.LOCK)
    # What a file system may not be able to do, and a run can do without.
    for error in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        yield _fails(side, error, Kind.HINT, Kind.HINT, must_be_got_over=True)
        yield _fails(side, error, Kind.EXCHANGE, Kind.EXCHANGE, must_be_got_over=True)


def _on_source() -> Iterable[Fault]:
    side, kinds = Side.SOURCE, Kind.READ | Kind.LOOK
    for error in (errno.EIO, errno.EACCES):
        some = Kind.LOOK if error == errno.EACCES else kinds
        yield _fails(side, error, some)
        yield _fails(side, error, some, some)
    # What passes by itself is tried again a few times where content is read.
    for error in (errno.ESTALE, errno.ETIMEDOUT):
        yield _fails(side, error, kinds, or_done=True)
        yield _fails(side, error, kinds, kinds)
    for error in (errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH):
        yield _fails(side, error, Kind.READ, or_done=True)
    yield _fails(side, errno.ECONNRESET, Kind.READ, or_done=True)
    yield _fails(side, errno.EINTR, Kind.READ, or_done=True)
    yield _fails(side, errno.EPERM, Kind.NO_ATIME, Kind.NO_ATIME, must_be_got_over=True)
    yield _fails(side, errno.EOPNOTSUPP, Kind.HINT, Kind.HINT, must_be_got_over=True)


def _short() -> Iterable[Fault]:
    for side in (Side.SOURCE, Side.TARGET):
        for onward in (NO_KIND, _TRANSFERS):
            yield Fault(
                name=f"{side.name} short {'from there on' if onward else 'once'}".lower(),
                side=side,
                kinds=_TRANSFERS,
                action=Action.SHORT,
                onward=onward,
                codes=frozenset({0}),
                must_be_got_over=True,
            )


def _deaths() -> Iterable[Fault]:
    both = Side.SOURCE | Side.TARGET
    for action, code in (
        (Action.KILL_BEFORE, _KILLED),
        (Action.KILL_AFTER, _KILLED),
        (Action.DIE_BEFORE, DIED),
        (Action.DIE_AFTER, DIED),
    ):
        name = action.name.lower().replace("_", " ")
        yield Fault(name, both, _ANY, action, codes=frozenset({code}))


FAULTS: Final[Sequence[Fault]] = (*_on_target(), *_on_source(), *_short(), *_deaths())

"""Compares what a run reads of its sources with the checksums that these record.

A worker notes the CRC-32 of each range that it reads. Ranges that follow each other are joined,
until they are a whole record. A record that is read twice, in two ways, is two chains of ranges.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.checksums import crc32, difference, join_crc32
from streamshard.errors import IntegrityError
from streamshard.model import SourceFile

Ranges = NDArray[np.int64]
"""Rows of file, start, stop and CRC-32."""

_MOST_WAITING: Final = 1 << 14
"""Ranges that wait to be joined, unless more are apart."""
_MOST_APART: Final = 1 << 15
"""Ranges that may be apart; beyond that, records are read again that are in many ranges."""
_MANY: Final = 64
_PER_BYTE: Final = 100
"""Bytes that a run has read for each byte that it may read for this check alone."""
_LITTLE_BYTES: Final = 1 << 20
"""It may always read so many, which takes no time."""
_OPEN, _DONE, _AGAIN = range(3)


class ReadLog:
    """The ranges that a worker has read of files with recorded checksums."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._is_recorded = [file.recorded is not None for file in files]
        self._last: dict[int, list[int]] = {}
        """File → its last range, which may go on."""
        self._ranges: list[list[int]] = []

    def add(self, file: int, offset: int, view: memoryview) -> int | None:
        """Note a range that was read; returns its CRC-32, None if the file records none."""
        if not self._is_recorded[file]:
            return None
        checksum, last = crc32(view), self._last.get(file)
        if last is not None and last[2] == offset:
            last[2:] = offset + len(view), join_crc32(last[3], checksum, len(view))
        else:
            self._last[file] = [file, offset, offset + len(view), checksum]
            self._ranges.append(self._last[file])
        return checksum

    def take(self) -> Ranges:
        ranges, self._ranges = self._ranges, []
        self._last.clear()
        return np.array(ranges, dtype=np.int64).reshape(-1, 4)


class SourceCheck:
    """How far the records of a run's sources are read and compared."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._states: dict[int, NDArray[np.int8]] = {}
        """File → of each of its records, whether it is open, done, or to be read again."""
        self._apart = np.empty((0, 5), dtype=np.int64)
        """Ranges of open records, and the number of each one's record; by file and start."""
        self._new: list[Ranges] = []
        self._waiting = self._read_bytes = 0

    def add(self, ranges: Ranges) -> None:
        """Take ranges that were read; raises an `IntegrityError` if a record differs."""
        self._new.append(ranges)
        self._waiting += len(ranges)
        self._read_bytes += int((ranges[:, 2] - ranges[:, 1]).sum())
        if self._waiting > max(_MOST_WAITING, len(self._apart)):
            self._join()

    def settle(self, read: Callable[[Ranges], None]) -> Sequence[SourceFile]:
        """Have the rest of records read if that is little; return the files with other records.

        `read`: reads ranges, and calls `add`.
        """
        self._join()
        allowed = max(self._read_bytes // _PER_BYTE, _LITTLE_BYTES)
        missing = [*self._missing(allowed)]
        if missing:
            read(np.concatenate(missing))
            self._join()
        return [self._files[file] for file in np.unique(self._apart[:, 0]).tolist()]

    def _missing(self, allowed: int) -> Iterator[Ranges]:
        """Yield what is missing of records, those first of which it is least."""
        gaps = []
        for (file, record), ranges in groupby(self._apart.tolist(), key=itemgetter(0, 4)):
            at, stop = self._bounds(file, record)
            rows = []
            for _, start, end, *_ in ranges:
                if start > at:
                    rows.append((file, at, start, 0))
                at = end if start >= at else at
            rows += [(file, at, stop, 0)] if at < stop else []
            gaps.append(np.array(rows, dtype=np.int64))
        for missing in sorted(gaps, key=_nbytes):
            allowed -= _nbytes(missing)
            if allowed < 0:
                break
            yield missing
        for file, states in self._states.items():
            for record in np.flatnonzero(states == _AGAIN).tolist():
                states[record] = _OPEN
                yield np.array([(file, *self._bounds(file, record), 0)], dtype=np.int64)

    def _bounds(self, file: int, record: int) -> tuple[int, int]:
        recorded = self._files[file].recorded
        if recorded is None:
            raise TypeError("a file without checksums")
        return int(recorded.starts[record]), int(recorded.stops[record])

    def _join(self) -> None:
        """Join ranges that follow each other, and compare those that are whole records."""
        new = [self._numbered(ranges) for ranges in self._by_file()]
        self._new, self._waiting = [], 0
        rows = np.concatenate([self._apart, *new])
        rows = rows[np.lexsort((-rows[:, 2], rows[:, 1], rows[:, 0]))]
        joined: list[list[int]] = []
        by_end: dict[tuple[int, int], list[int]] = {}
        before: list[int] = []
        for row in rows.tolist():
            if row == before:
                continue  # it was read twice
            before = row.copy()
            first = by_end.pop((row[0], row[1]), None)
            if first is not None:
                first[2:4] = row[2], join_crc32(first[3], row[3], row[2] - row[1])
                row = first
            else:
                joined.append(row)
            other = by_end.get((row[0], row[2]))
            if other is None or other[1] > row[1]:
                by_end[row[0], row[2]] = row
        left = [row for row in joined if not self._is_done(row)]
        self._apart = np.array(left, dtype=np.int64).reshape(-1, 5)
        if len(left) > _MOST_APART:
            self._give_up()

    def _by_file(self) -> Iterator[Ranges]:
        if self._new:
            rows = np.concatenate(self._new)
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
            yield from np.split(rows, np.flatnonzero(np.diff(rows[:, 0])) + 1)

    def _numbered(self, ranges: Ranges) -> Ranges:
        """Add the number of its record to each range of a file; leave out what is in none open."""
        file = int(ranges[0, 0]) if len(ranges) else -1
        recorded = self._files[file].recorded if len(ranges) else None
        if recorded is None or not len(recorded.starts):
            return np.empty((0, 5), dtype=np.int64)
        states = self._states.setdefault(file, np.zeros(len(recorded.starts), dtype=np.int8))
        record = np.searchsorted(recorded.starts, ranges[:, 1], side="right") - 1
        is_inside = (record >= 0) & (ranges[:, 2] <= recorded.stops[record])
        chosen = is_inside & (states[record] == _OPEN)
        numbered: Ranges = np.column_stack([ranges, record])[chosen]
        return numbered

    def _is_done(self, row: Sequence[int]) -> bool:
        """Compare a range with its record, if it is all of it."""
        file, start, stop, checksum, record = row
        recorded = self._files[file].recorded
        if recorded is None or (start, stop) != self._bounds(file, record):
            return bool(self._states[file][record] == _DONE)
        if checksum != recorded.crc32s[record]:
            name = recorded.names[record] if recorded.names else f"at byte {start:,}"
            message = difference(name, stop - start, checksum, int(recorded.crc32s[record]))
            raise IntegrityError(message, path=self._files[file].path)
        self._states[file][record] = _DONE
        return True

    def _give_up(self) -> None:
        """Forget the ranges of records that are in many: such a record is read again at the end."""
        both, index, counts = np.unique(
            self._apart[:, [0, 4]], axis=0, return_inverse=True, return_counts=True
        )
        for file, record in both[counts > _MANY].tolist():
            self._states[file][record] = _AGAIN
        self._apart = self._apart[counts[index] <= _MANY]


def _nbytes(ranges: Ranges) -> int:
    return int((ranges[:, 2] - ranges[:, 1]).sum())

"""Distributes tensors among files of limited size."""

from collections.abc import Sequence


def shards(sizes: Sequence[int], most_bytes: int) -> list[range]:
    """Distribute tensors of these sizes, in order, among files of at most `most_bytes`.

    A larger tensor gets a file of its own. Without tensors there is one empty file.

    >>> shards([3, 3, 1, 9, 1], 6)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    found, first, held = [], 0, 0
    for index, nbytes in enumerate(sizes):
        if index > first and held + nbytes > most_bytes:
            found.append(range(first, index))
            first, held = index, 0
        held += nbytes
    return [*found, range(first, len(sizes))]

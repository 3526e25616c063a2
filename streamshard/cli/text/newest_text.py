"""Formats what `newest` passed over as lines for standard error."""

from collections.abc import Iterator

from streamshard.cli.text.escaping import one_line
from streamshard.operations.newest.newest import Newest


def newest_lines(found: Newest) -> list[str]:
    """Say why newer checkpoints were passed over, and what is suspicious about the one found."""
    return [one_line(f"streamshard: {line}") for line in _lines(found)]


def _lines(found: Newest) -> Iterator[str]:
    yield from found.notes
    for one in found.passed_over:
        yield f"passed over {one.path}: {one.reason}"
    for one in found.checkpoints:
        if one.path == found.path:
            yield from (f"{one.path}: {warning}" for warning in one.warnings)

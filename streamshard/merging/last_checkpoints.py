"""Finds the newest whole checkpoints of a run directory."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from streamshard.errors import IncompleteError, Option
from streamshard.operations.inspect.checkpoint_list import summaries
from streamshard.operations.inspect.inspect_report import CheckpointSummary
from streamshard.sizes import counted, some_of

_MOST_NAMED: Final = 3


def last_whole(root: Path, count: int) -> tuple[list[Path], list[str]]:
    """Return the newest whole checkpoints in a directory, the oldest first, and notes on others.

    What is newer than the one that `latest` names is passed over: a job that was resumed from an
    earlier checkpoint has left it behind.
    """
    found = summaries(root)
    ends = [number for number, one in enumerate(found) if one.is_latest and one.is_whole]
    reached = found[: ends[-1] + 1] if ends else found
    by_step: dict[int, CheckpointSummary] = {}
    for one in reached:
        # A store of a tag that is there too is no other checkpoint.
        if (
            one.is_whole
            and one.step is not None
            and (one.kind == "native" or one.step not in by_step)
        ):
            by_step[one.step] = one
    chosen = [by_step[step] for step in sorted(by_step)][-count:]
    if len(chosen) < count:
        message = f"{Option('last', count)}: {counted(len(chosen), 'whole checkpoint')} in it"
        raise IncompleteError(message, path=root)
    newer = [one for one in found if _is_newer(one, chosen) and one.step not in by_step]
    return [root / one.path for one in chosen], list(_passed_over(newer))


def _is_newer(one: CheckpointSummary, chosen: Sequence[CheckpointSummary]) -> bool:
    """Tell whether a checkpoint is newer than the oldest that is chosen; so may be an unknown."""
    oldest = chosen[0].step
    return one.step is None or oldest is None or one.step > oldest


def _passed_over(others: Sequence[CheckpointSummary]) -> Iterator[str]:
    torn = [one.path for one in others if not one.is_whole]
    left = [one.path for one in others if one.is_whole]
    if torn:
        yield f"Passed over, as they are not whole: {some_of(torn, _MOST_NAMED)}."
    if left:
        yield f"Passed over, as 'latest' names an older one: {some_of(left, _MOST_NAMED)}."

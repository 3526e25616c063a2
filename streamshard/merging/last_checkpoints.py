"""Finds the newest whole checkpoints of a run directory."""

from streamshard.errors import IncompleteError, Option
from streamshard.io.object_path import PACKED_SUFFIX
from streamshard.operations.checks.assessment import AssessedCheckpoint, RunAssessment
from streamshard.operations.transfer.execution import Limits
from streamshard.operations.transfer.report import Silent
from streamshard.sizes import counted


def last_whole(directory: str, count: int) -> tuple[list[str], list[str]]:
    """Return the newest whole checkpoints in a directory, the oldest first, and notes on others.

    Headers alone are read: the merge itself refuses what is not healthy.
    """
    assessment = RunAssessment(directory, Limits(0, None, None), Silent(), is_quick=True)
    chosen, passed_over = dict[int, str](), list[str]()
    # A store of a tag that is there too is no other checkpoint.
    for one in sorted(assessment.order(), key=_rank):
        if len(chosen) == count:
            break
        if one.step is not None and one.step not in chosen:
            found = assessment.assess(one)
            if found.is_good:
                chosen[one.step] = found.path
            else:
                passed_over.append(f"Passed over {found.path}: {found.reason}.")
    if len(chosen) < count:
        known = f"it holds {counted(len(chosen), 'whole checkpoint')} with a known step"
        advice = f"; write {Option('last', len(chosen))}" if len(chosen) > 1 else ""
        error = IncompleteError(f"{directory}: {Option('last', count)}: {known}{advice}")
        for reason in passed_over:
            error.add_note(reason)
        raise error
    return [*chosen.values()][::-1], [*assessment.notes, *passed_over]


def _rank(one: AssessedCheckpoint) -> tuple[int, bool]:
    """Return a sort key: newest first, and of one step the store last."""
    return -(one.step or 0), one.path.endswith((".zarr", PACKED_SUFFIX))

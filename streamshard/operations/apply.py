"""`apply`: plans a saved plan's command again, and refuses to run if the result differs."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from streamshard.errors import Option, SourceError, TargetExistsError, UsageError
from streamshard.io.object_path import as_path
from streamshard.operations.convert.convert import plan_convert
from streamshard.operations.export.export import plan_export
from streamshard.operations.repartition.repartition import plan_repartition
from streamshard.operations.transfer import plan_file
from streamshard.operations.transfer.plan import TransferPlan

PLANNERS: Final[Mapping[str, Callable[..., TransferPlan]]] = {
    "repartition": plan_repartition,
    "convert": plan_convert,
    "export": plan_export,
}
"""The function that plans each verb that writes."""
_NEW_PLAN: Final = Option("plan.save()")


def load_plan(
    path: str | os.PathLike[str],
    *,
    memory_limit: int | None = None,
    workers: int | None = None,
) -> TransferPlan:
    """Read a plan that `plan.save` wrote, and plan it again; writes nothing.

    Call `run` of the result to carry out the plan. If that run is interrupted, apply the plan
    again, or run the command that the plan was made with: either one continues the run.

    Parameters
    ----------
    memory_limit, workers
        Limits of the run; by default those with which the plan was made.

    Raises
    ------
    UsageError
        There is no such plan, or the same options would have another result now.
    SourceError
        The source cannot be read, or has changed since; the message names the change.
    StreamshardError
        Any other error that planning raises.
    """
    place = as_path(path)
    saved = plan_file.read(place)
    options: dict[str, Any] = dict(saved.options)
    if memory_limit is not None:
        options["memory_limit"] = memory_limit
    if workers is not None:
        options["workers"] = workers
    try:
        plan = PLANNERS[saved.verb](saved.source, saved.target, **options)
    except TargetExistsError as error:
        if not options["overwrite"]:
            replace = Option("overwrite", True)
            message = f"{place}: was made without {replace}. Make a new plan with {_NEW_PLAN}, and"
            error.add_note(f"{message} with {replace}")
        raise
    difference = plan.identity.difference(saved.identity)
    if difference is not None:
        own = plan.identity.header
        same = all(own[key] == saved.identity[key] for key in ("format", "options"))
        message = f"{place}: {difference}. Make a new plan with {_NEW_PLAN}"
        raise (SourceError if same else UsageError)(message)
    sizes = plan.sizes()
    if plan_file.plan_digest(sizes) != saved.sizes:
        message = f"{place}: was to write {saved.bytes_written:,} bytes into {saved.files:,} files"
        now = f"{sum(sizes.values()):,} bytes into {len(sizes):,} files"
        raise UsageError(
            f"{message}, and would write {now}, or others, now. Make a new plan with {_NEW_PLAN}"
        )
    return plan

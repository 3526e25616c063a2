"""`apply`: plans a saved plan's command again, and refuses to run if the result differs."""

from collections.abc import Mapping
from typing import Final

from streamshard import registry
from streamshard.errors import Option, SourceError, TargetExistsError, UsageError
from streamshard.io.object_path import as_path
from streamshard.operations.transfer import plan_file
from streamshard.operations.transfer.plan import TransferPlan
from streamshard.options import takes
from streamshard.verb_options import ApplyOptions

PLANNERS: Final[Mapping[str, str]] = {
    "repartition": "streamshard.operations.repartition.repartition:plan_repartition",
    "convert": "streamshard.operations.convert.convert:plan_convert",
    "export": "streamshard.operations.export.export:plan_export",
    "merge": "streamshard.merging.merge:plan_merge",
}
"""The function that plans each verb that writes, by text: a verb loads only its own."""
_NEW_PLAN: Final = Option("plan.save()")


@takes(ApplyOptions)
def load_plan(options: ApplyOptions) -> TransferPlan:
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
    place = as_path(options.path)
    saved = plan_file.read(place)
    limits = {"memory_limit": options.memory_limit, "workers": options.workers}
    given = {**saved.options, **{k: value for k, value in limits.items() if value is not None}}
    try:
        plan: TransferPlan = registry.load(PLANNERS[saved.verb])(
            saved.source, saved.target, **given
        )
    except TargetExistsError as error:
        if not given.get("overwrite"):
            replace = Option("overwrite", True)
            message = f"{place}: was made without {replace}. Make a new plan with {_NEW_PLAN}, and"
            error.__notes__ = [f"{message} with {replace}"]  # in place of other advice
        raise
    difference = plan.identity.difference(saved.purpose)
    if difference is not None:
        own = plan.identity.header
        same = all(own[key] == saved.purpose[key] for key in ("format", "options"))
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

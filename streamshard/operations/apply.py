"""`apply`: makes a saved plan again, and refuses it if it comes out otherwise."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from streamshard.errors import SourceError, TargetExistsError, UsageError
from streamshard.operations.convert.convert import ConvertPlan, plan_convert
from streamshard.operations.export.export import ExportPlan, plan_export
from streamshard.operations.repartition.repartition import RepartitionPlan, plan_repartition
from streamshard.operations.transfer import plan_file

Plan: TypeAlias = RepartitionPlan | ConvertPlan | ExportPlan

PLANNERS: Final[Mapping[str, Callable[..., Plan]]] = {
    "repartition": plan_repartition,
    "convert": plan_convert,
    "export": plan_export,
}
_ANEW: Final = "Plan anew with --dry-run --plan-out"


def load_plan(
    path: str | os.PathLike[str],
    *,
    memory_limit: int | None = None,
    workers: int | None = None,
) -> Plan:
    """Read a plan that `--plan-out` or `plan.save` has written, and make it again; writes nothing.

    Its `run` then does what the plan says; cut off, it goes on as any other run, also by the
    command that the plan was made with.

    Parameters
    ----------
    memory_limit, workers
        What the run may use, if not what was said when the plan was made.

    Raises
    ------
    UsageError
        There is no such plan, or what was asked for would mean something else now.
    SourceError
        The source cannot be read, or has changed since; the message names what has.
    StreamshardError
        Whatever else planning raises.
    """
    place = Path(path)
    saved = plan_file.read(place)
    asked = saved.asked
    options: dict[str, Any] = dict(asked.options)
    if memory_limit is not None:
        options["memory_limit"] = memory_limit
    if workers is not None:
        options["workers"] = workers
    try:
        plan = PLANNERS[asked.verb](asked.source, asked.target, **options)
    except TargetExistsError as error:
        if not options["overwrite"]:
            error.add_note(f"{place}: was made without --overwrite. {_ANEW}, and with --overwrite")
        raise
    difference = plan.purpose.difference(saved.purpose)
    if difference is not None:
        own = plan.purpose.header
        same = all(own[key] == saved.purpose[key] for key in ("format", "options"))
        raise (SourceError if same else UsageError)(f"{place}: {difference}. {_ANEW}")
    sizes = plan.sizes()
    if plan_file.plan_digest(sizes) != saved.sizes:
        message = f"{place}: was to write {saved.bytes_written:,} bytes into {saved.files:,} files"
        now = f"{sum(sizes.values()):,} bytes into {len(sizes):,} files"
        raise UsageError(f"{message}, and would write {now}, or others, now. {_ANEW}")
    return plan

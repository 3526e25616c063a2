"""`if_needed`: finds out whether the target already holds what a run would write.

What a target records is compared with what the run would write: the names and sizes of its files,
and their beginnings, which hold the step, the settings, the names of the tensors and the first
elements. No file of the source may be newer than the target. With `verify`, every byte is compared;
also where facts that are in no checkpoint decide what the target holds, as its beginnings may not
tell these.
"""

from collections.abc import Iterable, Iterator

from streamshard.checks.packed_check import check_packed
from streamshard.checks.problems import Findings
from streamshard.engine.run.phases import COMPARING, Progress, Silent
from streamshard.engine.scan.target_comparison import first_difference
from streamshard.errors import (
    IntegrityError,
    Option,
    SourceError,
    StreamshardError,
    TargetError,
    TargetExistsError,
)
from streamshard.formats.deepspeed import names
from streamshard.formats.zarr.packed_place import packed
from streamshard.io.entries import entries_below, examine, is_directory
from streamshard.io.files import target_errors
from streamshard.io.object_path import is_object
from streamshard.io.readable import Status
from streamshard.source.source import open_source
from streamshard.source.unfinished import COMMITTED, JOURNAL
from streamshard.transfer.file_layout import Divider, Layout
from streamshard.transfer.plan import TransferPlan
from streamshard.transfer.report import Report, nothing_done
from streamshard.transfer.target import require_space
from streamshard.transfer.target_state import TargetState


def found(plan: TransferPlan, progress: Progress | None = None) -> Report | None:
    """Return a report if the target holds what the run would write, else None."""
    difference, state = None, TargetState.of(plan.target, plan.output.template)
    if not state.is_settled:
        progress = progress or Silent()
        try:
            progress.start(plan.report.bytes_written, COMPARING)
            whole = plan.options.verify or any(map(plan.options.is_given, ("facts", "like")))
            difference = _difference(plan, progress) if whole else _other_record(plan, progress)
        except (IntegrityError, SourceError, TargetError) as error:
            is_ours = plan.output.packs or not isinstance(error, TargetError)
            if not is_ours or _is_elsewhere(plan, error):
                raise
            difference = f"{error}"  # it is damaged, or another file is packed in it
        if difference is None:
            return nothing_done(plan.report, "target", plan.report.target)
    try:
        state.require_free(overwrite=plan.options.overwrite)
    except TargetExistsError as error:
        what = f"{plan.target}: is not what this command makes: {difference}"
        error.__notes__ = [] if difference is None else [what]  # in place of other advice
        raise
    require_space(plan.target, plan.report.bytes_written)
    return None


def _is_elsewhere(plan: TransferPlan, error: StreamshardError) -> bool:
    """Tell whether an error is about another file than the target, or one packed in it."""
    return error.path is None or plan.target not in (error.path, *error.path.parents)


def _other_names(plan: TransferPlan) -> str | None:
    """Describe a file that is missing, or that is there and should not; None if none is."""
    output, latest = plan.output, plan.output.latest
    if is_directory(plan.target) == output.packs:
        return "it is a directory" if output.packs else "it is not a directory"
    with target_errors(plan.target):
        target_paths = {path for path, _ in _files(plan)}
        named = names.latest_of(plan.target) if latest is not None else None
    if named != latest:
        what = "there is no 'latest'" if named is None else f"its 'latest' names {named!r}"
        return f"{what}, not {latest!r}"
    paths_to_write = output.writer.byte_counts().sizes.keys()
    for problem, paths in (
        ("is missing", paths_to_write - target_paths),
        ("is not one of its files", target_paths - paths_to_write),
    ):
        if paths:
            more = f", and {len(paths) - 1:,} more" if len(paths) > 1 else ""
            return f"{min(paths)} {problem}{more}"
    return None


def _files(plan: TransferPlan) -> Iterator[tuple[str, Status]]:
    if plan.output.packs:
        yield plan.target.name, examine(plan.target)
        return
    own = (COMMITTED, JOURNAL) if is_object(plan.target) else ()
    for entry in entries_below(plan.target):
        path = entry.path.relative_to(plan.target)
        if not entry.is_directory and path.parts[0] not in own:
            yield path.as_posix(), entry.status()


def _other_record(plan: TransferPlan, progress: Progress) -> str | None:
    """Describe a difference to what the target records; None if there is none."""
    if (other := _other_names(plan) or _other_sizes(plan)) is not None:
        return other
    if plan.output.encode is not None:
        open_source(plan.target)  # which compares the sizes with those that it records
    return _other_bytes(plan, plan.output.writer.beginnings(), progress, to_end=False)


def _other_sizes(plan: TransferPlan) -> str | None:
    """Describe a file of another size, or one of the source that is newer than the target."""
    sizes, oldest = plan.output.writer.byte_counts().sizes, []
    for path, status in _files(plan):
        oldest.append(status.modified_ns)
        if plan.output.encode is None and status.nbytes != sizes[path]:
            return f"{path} has {status.nbytes:,} bytes, not {sizes[path]:,}"
    # Times in buckets are of whole seconds.
    unit = 10**9 if is_object(plan.target) or is_object(plan.output.source.path) else 1
    for source in dict.fromkeys(file.path for file in plan.output.source.files):
        if examine(source).modified_ns // unit > min(oldest) // unit:
            return f"{source} has changed since; {Option('verify', True)} compares bytes"
    return None


def _difference(plan: TransferPlan, progress: Progress) -> str | None:
    if (difference := _other_names(plan)) is not None:
        return difference
    writer, latest = plan.output.writer, plan.output.latest
    if latest is not None:
        progress.advance(len(latest.encode()))  # no pass makes this file
    for layouts in writer.passes():
        if (difference := _other_bytes(plan, layouts(), progress)) is not None:
            return difference
    findings = Findings()
    if plan.output.packs:
        check_packed(packed(plan.target), findings)
    return next((problem.message for problem in findings.problems), None)


def _other_bytes(
    plan: TransferPlan, layouts: Iterable[Layout], progress: Progress, *, to_end: bool = True
) -> str | None:
    source, divider = plan.output.source, Divider(plan.output.source)
    path = first_difference(
        packed(plan.target) if plan.output.packs else plan.target,
        (layout.divided(divider) for layout in layouts),
        source.files,
        plan.memory,
        progress.advance,
        to_end=to_end,
    )
    return None if path is None else f"{path} holds other bytes"

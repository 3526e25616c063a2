"""Formats what a run did, or would do: what was written, from what, in which memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamshard.cli.text.tables import facts_text, paragraph, table
from streamshard.registry import reader_of
from streamshard.sizes import counted, show_bytes, some_of
from streamshard.transfer.report import Report

if TYPE_CHECKING:
    from streamshard.checks.problems import Verification
    from streamshard.cluster.dask_executor import WorkerRate
    from streamshard.operations.diff.diff_report import DiffReport


def report_text(report: Report, tables: str = "", *, verbose: bool) -> str:
    """Format what a run did, or would do."""
    if report.found is not None:
        return _found(report)
    done = report.seconds is not None
    facts: list[tuple[str, object]] = [
        ("wrote" if done else "would write", target_text(report)),
        ("tag", report.tag),
        resize_fact(report),
        ("files", f"{report.files:,}, {show_bytes(report.bytes_written)}"),
        ("memory", memory_text(report, verbose=verbose)),
    ]
    if report.is_verified:
        facts.append(("verified", "read back: no difference" if done else "will be"))
    if verbose and report.unchecked:
        partly = "read in part, so that their checksums were not compared"
        facts.append(("not checked", f"{some_of(report.unchecked)}: {partly}"))
    if report.seconds is not None:
        rate = report.bytes_written / max(report.seconds, 1e-9)
        facts.append(("took", f"{report.seconds:.1f} s, {show_bytes(int(rate))}/s"))
    blocks = [facts_text(facts), tables, *map(paragraph, report.notes)]
    return "\n\n".join(filter(None, blocks))


def target_text(report: Report) -> str:
    """Name the target; a store is marked as one, as its name need not show that."""
    is_store = report.tensors is None and (report.world_size is None or report.verb == "convert")
    return f"{report.target} ({reader_of('store').title})" if is_store else report.target


def resize_fact(report: Report) -> tuple[str, str]:
    """Say for how many ranks a target is, or how many tensors an export has."""
    if report.tensors is not None:
        return "tensors", f"{report.tensors:,}" + (f", {report.dtype}" if report.dtype else "")
    if report.world_size is None:
        limit = "" if report.block == 1 else f" that divides no block of {report.block} elements"
        return "world size", f"{report.source_world_size} -> any{limit}"
    stage = "" if report.zero_stage is None else f", ZeRO stage {report.zero_stage}"
    return "world size", f"{report.source_world_size} -> {report.world_size}{stage}"


def _found(report: Report) -> str:
    if report.found == "source":
        ranks = counted(report.source_world_size, "rank")
        return f"Nothing to do: a job with {ranks} resumes from {report.path}."
    return f"Nothing to do: {report.path} is already what this would make."


def memory_text(report: "Report | Verification | DiffReport", *, verbose: bool) -> str:
    """Format the measured or projected memory above the program's own."""
    projected = show_bytes(report.projected_bytes - report.floor_bytes)
    above = f"above the program's {show_bytes(report.floor_bytes)}"
    if report.peak_bytes is None:
        return f"at most {projected} {above}"
    measured = f"{show_bytes(max(0, report.peak_bytes - report.floor_bytes))} {above}"
    return f"{measured}; projected {projected}" if verbose else measured


def read_text(report: "Verification | DiffReport") -> str:
    """Say how much was read, and how fast."""
    rate = show_bytes(int(report.bytes_read / max(report.seconds, 1e-9)))
    return f"{show_bytes(report.bytes_read)} in {report.seconds:.1f} s, {rate}/s"


def worker_text(rates: Mapping[str, "WorkerRate"]) -> str:
    """Format what each worker of a cluster did; the rate is that of one thread."""
    rows: list[tuple[str, ...]] = [("worker", "jobs", "bytes", "a second")]
    for address, rate in sorted(rates.items()):
        per_second = int(rate.nbytes / rate.seconds) if rate.seconds else 0
        shown = show_bytes(rate.nbytes), f"{show_bytes(per_second)}/s"
        rows.append((address, f"{rate.jobs:,}", *shown))
    return table(rows)

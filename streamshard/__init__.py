"""Reshard DeepSpeed ZeRO checkpoints to another number of GPUs, in bounded memory."""

import typing

if typing.TYPE_CHECKING:
    from streamshard.checks.problems import Difference, Problem, Verification
    from streamshard.cluster.connections import executor
    from streamshard.compare.assessment import AssessedCheckpoint
    from streamshard.errors import StreamshardError
    from streamshard.grafting.graft import graft, plan_graft
    from streamshard.health import TensorHealth
    from streamshard.merging.merge import merge, plan_merge
    from streamshard.operations.compact.compact import compact
    from streamshard.operations.compact.compact_report import CompactedTag, Compaction, RunRecord
    from streamshard.operations.compact.compact_status import (
        CompactStatus,
        TagStatus,
        compact_status,
    )
    from streamshard.operations.convert.convert import convert, plan_convert
    from streamshard.operations.diff.diff import diff
    from streamshard.operations.diff.diff_report import DiffReport, Distance, StateDiff, TensorDiff
    from streamshard.operations.export.export import export, plan_export
    from streamshard.operations.inspect.inspect import inspect
    from streamshard.operations.inspect.inspect_report import Inspection
    from streamshard.operations.newest.newest import Newest, newest
    from streamshard.operations.read.open_checkpoint import OpenCheckpoint, Parameter, open
    from streamshard.operations.repartition.repartition import plan_repartition, repartition
    from streamshard.operations.verify.verify import verify
    from streamshard.source.lazy_tensor import LazyTensor
    from streamshard.transfer.estimate import Estimate
    from streamshard.transfer.report import Report

__all__ = [
    "AssessedCheckpoint",
    "CompactStatus",
    "CompactedTag",
    "Compaction",
    "DiffReport",
    "Difference",
    "Distance",
    "Estimate",
    "Inspection",
    "LazyTensor",
    "Newest",
    "OpenCheckpoint",
    "Parameter",
    "Problem",
    "Report",
    "RunRecord",
    "StateDiff",
    "StreamshardError",
    "TagStatus",
    "TensorDiff",
    "TensorHealth",
    "Verification",
    "compact",
    "compact_status",
    "convert",
    "diff",
    "executor",
    "export",
    "graft",
    "inspect",
    "merge",
    "newest",
    "open",
    "plan_convert",
    "plan_export",
    "plan_graft",
    "plan_merge",
    "plan_repartition",
    "repartition",
    "verify",
]

_HOMES = {
    "AssessedCheckpoint": "compare.assessment",
    "CompactStatus": "operations.compact.compact_status",
    "CompactedTag": "operations.compact.compact_report",
    "Compaction": "operations.compact.compact_report",
    "DiffReport": "operations.diff.diff_report",
    "Difference": "checks.problems",
    "Distance": "operations.diff.diff_report",
    "Estimate": "transfer.estimate",
    "Inspection": "operations.inspect.inspect_report",
    "LazyTensor": "source.lazy_tensor",
    "Newest": "operations.newest.newest",
    "OpenCheckpoint": "operations.read.open_checkpoint",
    "Parameter": "operations.read.open_checkpoint",
    "Problem": "checks.problems",
    "Report": "transfer.report",
    "RunRecord": "operations.compact.compact_report",
    "StateDiff": "operations.diff.diff_report",
    "StreamshardError": "errors",
    "TagStatus": "operations.compact.compact_status",
    "TensorDiff": "operations.diff.diff_report",
    "TensorHealth": "health",
    "Verification": "checks.problems",
    "compact": "operations.compact.compact",
    "compact_status": "operations.compact.compact_status",
    "convert": "operations.convert.convert",
    "diff": "operations.diff.diff",
    "executor": "cluster.connections",
    "export": "operations.export.export",
    "graft": "grafting.graft",
    "inspect": "operations.inspect.inspect",
    "merge": "merging.merge",
    "newest": "operations.newest.newest",
    "open": "operations.read.open_checkpoint",
    "plan_convert": "operations.convert.convert",
    "plan_export": "operations.export.export",
    "plan_graft": "grafting.graft",
    "plan_merge": "merging.merge",
    "plan_repartition": "operations.repartition.repartition",
    "repartition": "operations.repartition.repartition",
    "verify": "operations.verify.verify",
}
"""Public name → its module, which is imported at the first use of the name: `--help` needs none.
The imports above are for type checkers; a test compares both lists."""


def __dir__() -> list[str]:
    """List the imported names and the public names."""
    return sorted({*globals(), *__all__})


if not typing.TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import a public name at its first use."""
        from importlib import import_module

        if name == "deepspeed":
            return import_module("streamshard.deepspeed")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        value = getattr(import_module(f"streamshard.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

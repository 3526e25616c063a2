"""Reshard DeepSpeed ZeRO checkpoints to another number of GPUs, in bounded memory."""

import typing

if typing.TYPE_CHECKING:
    from streamshard.errors import StreamshardError
    from streamshard.operations.applying import load_plan
    from streamshard.operations.compact import compact
    from streamshard.operations.compaction import CompactedTag, Compaction
    from streamshard.operations.convert import convert, plan_convert
    from streamshard.operations.diff import diff
    from streamshard.operations.distances import DiffReport, Distance, StateDiff, TensorDiff
    from streamshard.operations.export import export, plan_export
    from streamshard.operations.inspect import inspect
    from streamshard.operations.inspection import Inspection
    from streamshard.operations.lazy import LazyTensor
    from streamshard.operations.opening import OpenCheckpoint, Parameter, open
    from streamshard.operations.outlook import Outlook
    from streamshard.operations.pickles import NamedGlobal, PickledFile, PickleListing, list_pickles
    from streamshard.operations.repartition import plan_repartition, repartition
    from streamshard.operations.report import Report
    from streamshard.operations.verification import Difference, Problem, Verification
    from streamshard.operations.verify import verify

__all__ = [
    "CompactedTag",
    "Compaction",
    "DiffReport",
    "Difference",
    "Distance",
    "Inspection",
    "LazyTensor",
    "NamedGlobal",
    "OpenCheckpoint",
    "Outlook",
    "Parameter",
    "PickleListing",
    "PickledFile",
    "Problem",
    "Report",
    "StateDiff",
    "StreamshardError",
    "TensorDiff",
    "Verification",
    "compact",
    "convert",
    "diff",
    "export",
    "inspect",
    "list_pickles",
    "load_plan",
    "open",
    "plan_convert",
    "plan_export",
    "plan_repartition",
    "repartition",
    "verify",
]

_HOMES = {
    "CompactedTag": "operations.compaction",
    "Compaction": "operations.compaction",
    "DiffReport": "operations.distances",
    "Difference": "operations.verification",
    "Distance": "operations.distances",
    "Inspection": "operations.inspection",
    "LazyTensor": "operations.lazy",
    "NamedGlobal": "operations.pickles",
    "OpenCheckpoint": "operations.opening",
    "Outlook": "operations.outlook",
    "Parameter": "operations.opening",
    "PickleListing": "operations.pickles",
    "PickledFile": "operations.pickles",
    "Problem": "operations.verification",
    "Report": "operations.report",
    "StateDiff": "operations.distances",
    "StreamshardError": "errors",
    "TensorDiff": "operations.distances",
    "Verification": "operations.verification",
    "compact": "operations.compact",
    "convert": "operations.convert",
    "diff": "operations.diff",
    "export": "operations.export",
    "inspect": "operations.inspect",
    "list_pickles": "operations.pickles",
    "load_plan": "operations.applying",
    "open": "operations.opening",
    "plan_convert": "operations.convert",
    "plan_export": "operations.export",
    "plan_repartition": "operations.repartition",
    "repartition": "operations.repartition",
    "verify": "operations.verify",
}
"""The module of each name above, loaded at the first use of the name: `--help` needs none of them.
The imports above are for type checkers; a test compares both."""


def __dir__() -> list[str]:
    """List what has been imported, and what can be."""
    return sorted({*globals(), *__all__})


if not typing.TYPE_CHECKING:  # else any name would do for a type checker

    def __getattr__(name: str) -> object:
        """Import what is public at its first use."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        from importlib import import_module

        value = getattr(import_module(f"streamshard.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

"""Reshard DeepSpeed ZeRO checkpoints to another number of GPUs, in bounded memory."""

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

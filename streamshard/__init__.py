"""Reshard DeepSpeed ZeRO checkpoints to another number of GPUs, in bounded memory."""

from streamshard.errors import StreamshardError
from streamshard.operations.applying import load_plan
from streamshard.operations.compact import compact
from streamshard.operations.compaction import CompactedTag, Compaction
from streamshard.operations.convert import convert, plan_convert
from streamshard.operations.export import export, plan_export
from streamshard.operations.inspect import Inspection, inspect
from streamshard.operations.outlook import Outlook
from streamshard.operations.pickles import NamedGlobal, PickledFile, PickleListing, list_pickles
from streamshard.operations.repartition import plan_repartition, repartition
from streamshard.operations.report import Report
from streamshard.operations.verification import Difference, Problem, Verification
from streamshard.operations.verify import verify

__all__ = [
    "CompactedTag",
    "Compaction",
    "Difference",
    "Inspection",
    "NamedGlobal",
    "Outlook",
    "PickleListing",
    "PickledFile",
    "Problem",
    "Report",
    "StreamshardError",
    "Verification",
    "compact",
    "convert",
    "export",
    "inspect",
    "list_pickles",
    "load_plan",
    "plan_convert",
    "plan_export",
    "plan_repartition",
    "repartition",
    "verify",
]

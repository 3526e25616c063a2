"""Reshard DeepSpeed ZeRO checkpoints to another number of GPUs, in bounded memory."""

from streamshard.errors import StreamshardError
from streamshard.operations.convert import convert, plan_convert
from streamshard.operations.inspect import Inspection, inspect
from streamshard.operations.repartition import plan_repartition, repartition
from streamshard.operations.report import Report
from streamshard.operations.verification import Difference, Problem, Verification
from streamshard.operations.verify import verify

__all__ = [
    "Difference",
    "Inspection",
    "Problem",
    "Report",
    "StreamshardError",
    "Verification",
    "convert",
    "inspect",
    "plan_convert",
    "plan_repartition",
    "repartition",
    "verify",
]

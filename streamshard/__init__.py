"""Reshard DeepSpeed ZeRO checkpoints to another number of GPUs, in bounded memory."""

from streamshard.errors import StreamshardError
from streamshard.operations.convert import convert, plan_convert
from streamshard.operations.inspect import Inspection, inspect
from streamshard.operations.repartition import plan_repartition, repartition
from streamshard.operations.report import Report

__all__ = [
    "Inspection",
    "Report",
    "StreamshardError",
    "convert",
    "inspect",
    "plan_convert",
    "plan_repartition",
    "repartition",
]

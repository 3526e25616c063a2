"""Reshard DeepSpeed ZeRO checkpoints to another number of GPUs, in bounded memory."""

from streamshard.errors import StreamshardError
from streamshard.operations.convert import convert, plan_convert
from streamshard.operations.repartition import plan_repartition, repartition
from streamshard.operations.report import Report

__all__ = [
    "Report",
    "StreamshardError",
    "convert",
    "plan_convert",
    "plan_repartition",
    "repartition",
]

"""Writes stores that record which numbers their tensors hold, as archives of `compact` do."""

from pathlib import Path
from typing import Any

from streamshard.engine.run.resident_memory import resident_bytes
from streamshard.operations.convert.convert import store_output
from streamshard.source.source import open_source
from streamshard.transfer.plan import TransferPlan, plan_output
from streamshard.verb_options import ConvertOptions


def plan_measured(run: Path, store: Path, **options: Any) -> TransferPlan:  # noqa: ANN401
    """Plan such a store of a run."""
    given = ConvertOptions(run, store, **options)
    output = store_output(open_source(run), verb="convert", options=given, health={})
    return plan_output(given, output, store, resident_bytes())

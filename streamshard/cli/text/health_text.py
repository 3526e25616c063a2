"""Shows which numbers tensors hold: how many of them are NaN, and how large the others are."""

from collections.abc import Mapping

from streamshard.cli.text.tables import table
from streamshard.health import TensorHealth
from streamshard.sizes import counted


def healthy_text(health: Mapping[str, TensorHealth]) -> str:
    """Count the tensors without NaN and infinities."""
    good = sum(one.is_good for one in health.values())
    return f"{good:,} of {counted(len(health), 'tensor')} of floats"


def health_table(health: Mapping[str, TensorHealth]) -> str:
    """Show which numbers each tensor holds."""
    head = ("tensor", "elements", "NaN", "infinite", "zero", "largest", "RMS")
    rows = [
        (
            name,
            *(f"{count:,}" for count in (stats.numel, stats.nans, stats.infinities, stats.zeros)),
            f"{stats.largest:.4g}",
            f"{stats.rms:.4g}",
        )
        for name, stats in health.items()
    ]
    return table([head, *rows])

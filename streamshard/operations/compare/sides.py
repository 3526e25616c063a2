"""Opens two checkpoints of FSDP's ranks alike, so that all that both hold is compared."""

from dataclasses import replace

from streamshard.operations.source.source import Request, Source


def open_alike(
    first: Request, second: Request, one: Source, other: Source
) -> tuple[Source, Source]:
    """Open the one of two checkpoints again that does not tell what FSDP1 joined, if one does."""
    if one.kind == other.kind and (one.joined is None) != (other.joined is None):
        if one.joined is None:
            return replace(first, joined=other.joined).open(), other
        return one, replace(second, joined=one.joined).open()
    return one, other

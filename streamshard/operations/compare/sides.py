"""Opens two checkpoints of FSDP's ranks alike, so that all that both hold is compared."""

from dataclasses import replace

from streamshard.operations.source.source import Request, Source


def open_alike(first: Request, second: Request, one: Source, other: Source) -> list[Source]:
    """Open the one of two checkpoints again that tells less than the other of what FSDP1 joined."""
    sides = [(first, one), (second, other)]
    least, most = sorted(sides, key=lambda side: _told(side[1]))
    if _told(least[1]) < _told(most[1]) and least[1].kind == most[1].kind:
        again = replace(least[0], joined=most[1].joined).open()
        if again.joined is not None:
            return [again if side is least else side[1] for side in sides]
    return [one, other]


def _told(source: Source) -> int:
    return 0 if source.joined is None else 1 + bool(source.joined.names)

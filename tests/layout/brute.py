"""ZeRO's cuts done the slow way: one list entry per element, saying whose it is."""

Owner = tuple[int, int]
"""(parameter, element of it)."""


def deal(count: int, world_size: int) -> list[int]:
    """Deal parameters to ranks like cards, then put the hands one after the other."""
    hands: list[list[int]] = [[] for _ in range(world_size)]
    for index in range(count):
        hands[index % world_size].append(index)
    return [index for hand in hands for index in hand]


def flatten(
    numels: list[int], world_size: int, *, round_robin: bool, unit: int
) -> tuple[int, list[Owner | None]]:
    """Lay a param group out flat; returns how much of it is used, and every element's owner."""
    order = deal(len(numels), world_size) if round_robin else list(range(len(numels)))
    owners: list[Owner | None] = []
    for param in order:
        while len(owners) % unit:
            owners.append(None)
        owners += [(param, element) for element in range(numels[param])]
    used = len(owners)
    while len(owners) % (2 * world_size):
        owners.append(None)
    return used, owners


def rank_of_flat(owners: list[Owner | None], world_size: int, rank: int) -> list[Owner | None]:
    """Take a rank's equal part of a flat group."""
    share = len(owners) // world_size
    return owners[rank * share : (rank + 1) * share]


def shard(numel: int, world_size: int, rank: int) -> list[int | None]:
    """Take a rank's equal part of one parameter, padded at the end."""
    elements: list[int | None] = list(range(numel))
    while len(elements) % world_size:
        elements.append(None)
    share = len(elements) // world_size
    return elements[rank * share : (rank + 1) * share]

"""Copies trees of nodes, with other storages in the place of theirs."""

from collections.abc import Callable, Mapping

from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.torch_tensor import Storage


def copied(
    roots: tuple[Mapping[str, Node], ...], copy: Callable[[Storage], Storage]
) -> tuple[Mapping[str, Node], ...]:
    """Copy trees; what they share, the copies share. `copy` is called once for each storage."""
    storages: list[Storage] = []
    numbers: dict[int, int] = {}

    def persistent_id(node: Node) -> Node | None:
        if not isinstance(node, Storage):
            return None
        if id(node) not in numbers:
            numbers[id(node)] = len(storages)
            storages.append(node)
        return numbers[id(node)]

    made: dict[int, Storage] = {}

    def persistent_load(number: Node) -> Storage:
        if number not in made:
            made[number] = copy(storages[number])
        return made[number]

    found: tuple[Mapping[str, Node], ...] = inert_load.load(
        inert_dump.dump(roots, persistent_id), persistent_load
    )
    return found

"""Takes trees of nodes apart and puts them together, with others in the place of some nodes."""

from collections.abc import Callable, Mapping, Sequence

from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.model import Whole


def take_apart(root: Node, is_leaf: Callable[[Node], bool]) -> tuple[bytes, list[Node]]:
    """Return a pickle of a tree without some nodes, and these, each once, in its order."""
    leaves: list[Node] = []
    numbers: dict[int, int] = {}

    def persistent_id(node: Node) -> Node | None:
        if not is_leaf(node):
            return None
        if id(node) not in numbers:
            numbers[id(node)] = len(leaves)
            leaves.append(node)
        return numbers[id(node)]

    return inert_dump.dump(root, persistent_id), leaves


def put_together(pickled: bytes, leaves: Sequence[Node]) -> Node:
    """Make the tree that was taken apart, with these nodes in its places."""
    return inert_load.load(pickled, lambda number: leaves[number])


def is_storage(node: Node) -> bool:
    return isinstance(node, Storage)


def copied(
    roots: tuple[Mapping[str, Node], ...], copy: Callable[[Storage], Storage]
) -> tuple[Mapping[str, Node], ...]:
    """Copy trees; what they share, the copies share. `copy` is called once for each storage."""
    pickled, storages = take_apart(roots, is_storage)
    found: tuple[Mapping[str, Node], ...] = put_together(pickled, list(map(copy, storages)))
    return found


def renumbered(
    roots: tuple[Mapping[str, Node], ...], number_of: Callable[[int], int]
) -> tuple[Mapping[str, Node], ...]:
    """Copy trees for another checkpoint, in which the tensors of their storages have other numbers.

    `number_of`: called once for each storage that is a tensor, with the number that it had.
    """

    def copy(storage: Storage) -> Storage:
        content = storage.content
        if isinstance(content, Whole):
            content = Whole(number_of(content.tensor))
        return Storage(storage.dtype, storage.numel, content)

    return copied(roots, copy)

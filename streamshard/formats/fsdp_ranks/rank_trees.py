"""Takes tensors out of what a rank saved, and puts others into their places."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from streamshard.formats.fsdp_ranks.flat_parameters import is_flat
from streamshard.formats.fsdp_ranks.sharded_tensors import is_tensor
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.tree_copy import is_storage, put_together, take_apart

_LIMIT_DEPTH: Final = 8

Path = tuple[Node, ...]
"""Keys and indices that lead to a part of a tree."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree without its tensors."""

    skeleton: bytes
    """A pickle of all else. Ranks that differ in tensors alone have equal ones."""
    leaves: Sequence[Node]
    """The tensors, and storages outside of tensors, in the order of the pickle."""

    @classmethod
    def of(cls, root: Node) -> Self:
        """Take the tensors out of a tree."""
        return cls(
            *take_apart(root, lambda node: is_storage(node) or is_tensor(node) or is_flat(node))
        )

    def filled(self, leaves: Sequence[Node]) -> Node:
        """Return the tree with other tensors."""
        return put_together(self.skeleton, leaves)


def paths_to_tensors(root: Node) -> Iterator[tuple[Path, Node]]:
    """Yield the tensors in a tree of dicts, lists and tuples, and what leads to each.

    Those that lie deeper than an optimizer's are left out.
    """
    seen: set[int] = set()
    stack: list[tuple[Path, Node]] = [((), root)]
    while stack:
        path, node = stack.pop()
        if is_tensor(node):
            yield path, node
        is_deep = len(path) == _LIMIT_DEPTH or id(node) in seen
        if is_deep or not isinstance(node, dict | list | tuple):
            continue
        seen.add(id(node))
        below = node.items() if isinstance(node, dict) else enumerate(node)
        stack += [((*path, key), part) for key, part in below]

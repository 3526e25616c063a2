"""Fingerprints of entries of torch files: equal for equal values, tensors by size and CRC-32."""

from collections.abc import Callable, Mapping
from hashlib import sha256

from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.inert_dump import dump
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import Storage


def fingerprint(node: Node) -> bytes:
    """Return a digest that is equal for nodes of equal value, tensors by size and CRC-32."""
    return sha256(pickled(node)).digest()


def fingerprints(
    nodes: Mapping[Node, Node],
    checksum: Callable[[Storage], int] = torch_file.checksum,
) -> dict[Node, bytes]:
    """Return the fingerprint of every entry of a file.

    `checksum`: returns the CRC-32 of a storage; by default, in the file that the storage refers to.
    """
    return {key: sha256(pickled(node, checksum)).digest() for key, node in nodes.items()}


def pickled(node: Node, checksum: Callable[[Storage], int] = torch_file.checksum) -> bytes:
    """Serialize a node as a pickle that is equal for nodes of equal value, as in `fingerprint`."""

    def persistent_id(part: Node) -> Node | None:
        if not isinstance(part, Storage):
            return None
        return part.dtype, part.numel, checksum(part)

    return dump(node, persistent_id)

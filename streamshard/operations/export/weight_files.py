"""Turns weights into the files of an export."""

from collections.abc import Iterator, Sequence

from streamshard.engine.run.work import Fixed
from streamshard.formats import pretrained, safetensors_file
from streamshard.formats.pickle.inert import Node
from streamshard.formats.safetensors_file import Described
from streamshard.formats.torch import zip_layout
from streamshard.formats.torch.torch_tensor import Storage, make_tensor
from streamshard.model import Whole
from streamshard.operations.export.weights import Weight
from streamshard.operations.transfer.file_layout import Elements, FileLayout, fixed_files
from streamshard.operations.transfer.torch_layout import torch_layout


class WeightFiles:
    """Divides weights among files of a limited size."""

    def __init__(self, weights: Sequence[Weight], form: str, most_bytes: int) -> None:
        self.form = form
        """`safetensors` or `torch`."""
        ranges = shards([weight.nbytes for weight in weights], most_bytes)
        paths = pretrained.weight_files(form, len(ranges))
        self.held = {p: [weights[i] for i in r] for p, r in zip(paths, ranges, strict=True)}
        """File → the weights in it."""

    def documents(self) -> dict[str, bytes]:
        """Serialize the index, if there are several files: it is known without reading tensors."""
        if len(self.held) == 1:
            return {}
        where = {
            name: path
            for path, weights in self.held.items()
            for weight in weights
            for name in self.names(weight)
        }
        total_bytes = sum(w.nbytes for weights in self.held.values() for w in weights)
        return {pretrained.index_file(self.form): pretrained.index(where, total_bytes)}

    def names(self, weight: Weight) -> Sequence[str]:
        """Return the names under which a weight is stored: in torch files all, else the first."""
        return weight.names if self.form == pretrained.TORCH else weight.names[:1]

    def layouts(self) -> Iterator[FileLayout]:
        """Yield the layouts of all files."""
        lay_out = _torch if self.form == pretrained.TORCH else _safetensors
        for path, weights in self.held.items():
            yield lay_out(path, weights)
        yield from fixed_files(self.documents())


def _safetensors(path: str, weights: Sequence[Weight]) -> FileLayout:
    laid = safetensors_file.lay_out(Described(w.names[0], w.dtype, w.shape) for w in weights)
    named = {weight.names[0]: weight for weight in weights}
    pieces: list[Fixed | Elements] = [Fixed(laid.header)]
    for stored in laid.tensors:
        weight = named[stored.tensor.name]
        content = Whole(weight.tensor)
        pieces.append(Elements(content, weight.nbytes, weight.dtype, name=weight.names[0]))
    return FileLayout(path, pieces)


def _torch(path: str, weights: Sequence[Weight]) -> FileLayout:
    state: dict[str, Node] = {}
    for weight in weights:
        storage = Storage(weight.dtype, weight.numel, Whole(weight.tensor))
        state.update({name: make_tensor(storage, weight.shape) for name in weight.names})
    named = {weight.tensor: weight.names[0] for weight in weights}
    return torch_layout(path, zip_layout.serialize(state), names=named)


def shards(sizes: Sequence[int], most_bytes: int) -> list[range]:
    """Distribute tensors of these sizes, in order, among files of at most `most_bytes`.

    A larger tensor gets a file of its own. Without tensors there is one empty file.

    >>> shards([3, 3, 1, 9, 1], 6)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    found, first, held = [], 0, 0
    for index, nbytes in enumerate(sizes):
        if index > first and held + nbytes > most_bytes:
            found.append(range(first, index))
            first, held = index, 0
        held += nbytes
    return [*found, range(first, len(sizes))]

"""How tensor parallelism cut the parameters of a job, whatever tells it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import AS_SAVED
from streamshard.formats.pickle.inert import Node, show
from streamshard.layout.boxes import NotTiledError
from streamshard.layout.model_cut import ModelCut, Shape, split_cut, whole_cut


class StatedCuts(ABC):
    """Tells how each parameter is cut among the tensor-parallel ranks."""

    @abstractmethod
    def cut(self, name: str, shards: Mapping[int, Shape], ranks: int) -> ModelCut:
        """Return how a parameter is cut; `shards`: rank → shape of its tensor."""

    def is_default(self, name: str) -> bool:
        """Tell whether a parameter is taken for cut only because no list has it."""
        return False

    def is_averaged(self, name: str) -> bool:
        """Tell whether each rank has a parameter with values of its own, and the mean counts."""
        return False

    def is_vocabulary(self, name: str) -> bool:
        """Tell whether a parameter has a row for each word, and more for padding."""
        return False


class CutsInFiles(StatedCuts):
    """Cuts that model files tell, in what they hold for DeepSpeed's universal checkpoint."""

    @abstractmethod
    def __init__(self, info: Mapping[str, Node]) -> None: ...

    @classmethod
    @abstractmethod
    def are_in(cls, info: Node) -> bool:
        """Tell whether a model file has them."""


def cut_by_rule(
    name: str,
    shards: Mapping[int, Shape],
    ranks: int,
    rule: str,
    cut: Callable[[Sequence[Shape]], ModelCut],
) -> ModelCut:
    """Cut a tensor of these shards by a rule.

    `shards`: rank → shape of its tensor.
    `rule`: what holds the rule, for messages.
    `cut`: makes the cut of all ranks' shapes.
    """
    if len(shards) < ranks:
        message = f"'{name}' is on {len(shards)} of the {ranks} tensor-parallel ranks"
        raise UnsupportedError(f"{message}. {AS_SAVED}")
    shapes = [shards[rank] for rank in range(ranks)]
    try:
        return cut(shapes)
    except (IndexError, TypeError, ValueError, NotTiledError) as error:
        shown = " and ".join(str(list(shape)) for shape in shapes)
        message = f"'{name}' is {shown} on its ranks, which is not how {rule} has it"
        raise DisagreementError(f"{message} ({error})") from error


def replicated(shapes: Sequence[Shape]) -> ModelCut:
    """Return the cut of a tensor that each rank has whole."""
    if any(shape != shapes[0] for shape in shapes):
        raise NotTiledError("replicated, so all are alike")
    return whole_cut(shapes[0], [True] * len(shapes))


def split(shapes: Sequence[Shape], dimension: int) -> ModelCut:
    """Return the cut of a tensor of which each rank has a block along a dimension."""
    return split_cut(joined(shapes, dimension), dimension, [shape[dimension] for shape in shapes])


def even_widths(sizes: Sequence[int], ranks: int) -> Sequence[Sequence[int]]:
    """Return, for each sub-tensor of these sizes, the equal widths of the ranks' parts."""
    if not sizes or any(size % ranks for size in sizes):
        message = f"sub-parameters of {show(list(sizes))} on {ranks} ranks"
        raise NotTiledError(f"{message}, in unequal parts")
    return [[size // ranks] * ranks for size in sizes]


def joined(shapes: Sequence[Shape], dimension: int) -> Shape:
    """Return the shape of tensors one after the other, along a dimension."""
    if len(shapes[0]) <= dimension:
        raise NotTiledError(f"cut along dimension {dimension}")
    rest = {(*shape[:dimension], *shape[dimension + 1 :]) for shape in shapes}
    if len(rest) > 1:
        raise NotTiledError(f"cut along dimension {dimension}, so the others are alike")
    total = sum(shape[dimension] for shape in shapes)
    return (*shapes[0][:dimension], total, *shapes[0][dimension + 1 :])

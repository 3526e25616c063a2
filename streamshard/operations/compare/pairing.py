"""Elements of two checkpoints that should be equal, and the differences found so far."""

from dataclasses import dataclass, field

from streamshard.engine.numeric.cast import wider
from streamshard.formats.zarr.array_paths import array_path
from streamshard.model import ITEMSIZE, LogicalTensor
from streamshard.operations.checks.problems import Difference


@dataclass(frozen=True, slots=True)
class SideElements:
    """Elements of a logical tensor of one side."""

    tensor: int
    dtype: str
    start: int = 0
    """First element."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Elements of both sides that should be equal."""

    name: str
    left: SideElements
    right: SideElements
    numel: int
    """Elements on each side."""
    dtype: str
    """Dtype as which both sides are compared: the dtype of at least one side."""
    itemsize: int
    """Bytes of the unit in which differences are counted."""
    tensor: LogicalTensor | None = None
    """The tensor of the left side; None for a place in the training state."""

    @property
    def nbytes(self) -> int:
        """Bytes that are compared."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(slots=True)
class Pairing:
    """The matching tensors, and the differences that were found without reading tensors."""

    by_value: bool = False
    """Whether floats of different dtypes are compared too."""
    pairs: list[Pair] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    blobs: set[tuple[SideElements, SideElements, int]] = field(default_factory=set)
    """Parts of the training state's tensors that are paired already, and their bytes."""
    tensors: dict[str, LogicalTensor] = field(default_factory=dict)
    """Name of a difference → the tensor it is about, where it is about a tensor."""
    _paired: set[tuple[SideElements, SideElements]] = field(default_factory=set)

    def differ(self, kind: str, name: str, message: str) -> None:
        """Add a difference."""
        self.differences.append(Difference(kind, name, f"{name}: {message}"))

    def differ_in(self, kind: str, tensor: LogicalTensor, message: str) -> None:
        """Add a difference of a whole tensor."""
        path = array_path(tensor)
        self.tensors[path] = tensor
        self.differ(kind, path, message)

    def add(
        self, tensor: LogicalTensor, left: SideElements, right: SideElements, dtype: str
    ) -> None:
        """Add a pair of whole tensors; tied tensors with several names are added once."""
        if (left, right) not in self._paired:
            self._paired.add((left, right))
            path, size = array_path(tensor), ITEMSIZE[dtype]
            self.pairs.append(Pair(path, left, right, tensor.numel, dtype, size, tensor))

    def only(self, tensor: LogicalTensor, *, is_left: bool) -> None:
        """Report a tensor that one side lacks."""
        kind, place = ("extra", "here only") if is_left else ("missing", "there only")
        self.differ_in(kind, tensor, place)

    def add_same(self, tensor: LogicalTensor, left: SideElements, right: SideElements) -> None:
        """Add a pair of whole tensors, and report different dtypes."""
        if left.dtype != right.dtype:
            self.differ_in("dtype", tensor, f"{left.dtype} here, {right.dtype} there")
        dtype = wider(left.dtype, right.dtype) if self.by_value else left.dtype
        if dtype is not None and (self.by_value or left.dtype == right.dtype):
            self.add(tensor, left, right, dtype)

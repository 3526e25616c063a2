"""Counts the names in a pickle, and lists the names that the libraries themselves write."""

from collections.abc import Mapping
from typing import Final

from streamshard.formats.deepspeed.names import STAGE_ENUM, STAGES
from streamshard.formats.pickle.inert import GETATTR, Call, Global, Node
from streamshard.formats.pickle.machine import PickleMachine
from streamshard.model import ITEMSIZE

_BUILTINS: Final = (
    "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple"
)
_STORAGES: Final = (
    "BFloat16Storage BoolStorage ByteStorage CharStorage ComplexDoubleStorage ComplexFloatStorage "
    "DoubleStorage FloatStorage HalfStorage IntStorage LongStorage QInt32Storage QInt8Storage "
    "QUInt2x4Storage QUInt4x2Storage QUInt8Storage ShortStorage"
)
_WRITTEN: Final[Mapping[str, str]] = {
    "__builtin__": f"{_BUILTINS} long unicode xrange",
    "builtins": _BUILTINS,
    "_codecs": "encode",
    "collections": "Counter OrderedDict defaultdict deque",
    "copy_reg": "__newobj_ex__ _reconstructor",
    "copyreg": "__newobj_ex__ _reconstructor",
    "deepspeed.runtime.bf16_optimizer": "fragment_address",
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler",
    STAGE_ENUM.module: " ".join([STAGE_ENUM.name, *(f"{STAGE_ENUM.name}.{s}" for s in STAGES)]),
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "numpy": "dtype ndarray",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy._core.numeric": "_frombuffer",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM",
    "numpy.random._philox": "Philox",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "numpy.random._sfc64": "SFC64",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "torch": f"Size Tensor device {_STORAGES} {' '.join(ITEMSIZE)}",
    "torch._tensor": "Tensor _rebuild_from_type_v2",
    "torch._utils": (
        "_rebuild_device_tensor_from_numpy _rebuild_meta_tensor_no_storage _rebuild_parameter "
        "_rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor _rebuild_tensor "
        "_rebuild_tensor_v2 _rebuild_tensor_v3"
    ),
    "torch.nn.parameter": "Buffer Parameter",
    "torch.serialization": "_get_layout",
    "torch.storage": "TypedStorage UntypedStorage",
}
KNOWN: Final = frozenset(
    Global(module, name) for module, names in _WRITTEN.items() for name in names.split()
)
"""Names that DeepSpeed, torch, NumPy and Python's collections write themselves.

Each of them only builds a value from its arguments.
"""


class NameCounter(PickleMachine):
    """A pickle machine that also counts how often each name is used."""

    def __init__(self, data: bytes, start: int) -> None:
        super().__init__(data, start, lambda _identifier: None)
        self.names: dict[Global, int] = {}

    def name(self, module: str, name: str) -> None:
        """Push a name."""
        super().name(module, name)
        self._count()

    def get(self, index: int) -> None:
        """Push a value from the memo, which may be a name."""
        super().get(index)
        self._count()

    def call(self, *, new: bool = False, kwargs: Node = None) -> None:
        """Replace a function and its arguments by the call, or by the name of an attribute."""
        super().call(new=new, kwargs=kwargs)
        self._resolve()

    def instance(self, parts: list[Node]) -> None:
        """Push an instance, or an attribute's name: protocols 0 and 1 also call functions here."""
        super().instance(parts)
        self._resolve()

    def _resolve(self) -> None:
        """Replace a `getattr` call on a name by the attribute's dotted name."""
        made = self.stack[-1]
        if type(made) is Call and made.function in GETATTR and len(made.args) == 2:
            owner, attribute = made.args
            if type(owner) is Global and type(attribute) is str:
                self.stack.pop()
                self._uncount(made.function)  # only the attribute's name counts
                self.name(owner.module, f"{owner.name}.{attribute}")

    def _count(self) -> None:
        top = self.stack[-1]
        if type(top) is Global:
            self.names[top] = self.names.get(top, 0) + 1

    def _uncount(self, name: Global) -> None:
        left = self.names.pop(name, 0) - 1
        if left > 0:
            self.names[name] = left

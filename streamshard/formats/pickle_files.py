"""Finds the pickles in a file, counts the names in them, and lists those that libraries write."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from streamshard.errors import SourceError
from streamshard.formats.deepspeed.names import STAGE_ENUM, STAGES
from streamshard.formats.pickle import inert_load
from streamshard.formats.pickle.inert import GETATTR, LIMIT_BYTES, Call, Global, Node
from streamshard.formats.pickle.machine import PickleMachine
from streamshard.formats.torch import zip_directory
from streamshard.formats.torch.legacy_file import MAGIC_NUMBER
from streamshard.io.readable import Readable
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
        super().name(module, name)
        self._count()

    def get(self, index: int) -> None:
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


_SUFFIXES: Final = frozenset({".bin", ".ckpt", ".p", ".pickle", ".pkl", ".pt", ".pth"})
"""Files with these suffixes are unpickled by some program, whatever their first bytes are."""
_HEAD_BYTES: Final = 512
_TAR: Final = (257, b"ustar")
_LEGACY_PICKLES: Final = 4
"""Count of pickles after the magic number of torch's legacy format."""


@dataclass(frozen=True, slots=True)
class Finding:
    pickles: int
    names: Mapping[Global, int]
    """Name → how often the pickles use it."""
    problem: str | None = None
    """Why the file may hold more than was found."""


def look_into(source: Readable, name: str) -> Finding | None:
    """Count the names in a file's pickles; None if this kind of file holds no pickles."""
    head = source.read_at(0, _HEAD_BYTES)
    expected = PurePosixPath(name).suffix.lower() in _SUFFIXES
    if head.startswith(zip_directory.MAGIC):
        return _in_zip(source, expected=expected)
    if head[_TAR[0] :].startswith(_TAR[1]):
        problem = "a tar, as torch saved long ago; its content is not read"
        return Finding(0, {}, problem) if expected else None
    if not expected and head[:1] != b"\x80":
        return None
    found = _in_stream(source)
    # A file may only begin like a pickle, as one safetensors file in 256 does.
    return found if expected or found.pickles or found.names else None


def look_into_state(stored: bytes) -> Finding:
    counter = NameCounter(stored, 0)
    try:
        inert_load.run(counter)
    except SourceError as error:
        return Finding(1, counter.names, str(error))
    return Finding(1, counter.names)


def _in_zip(source: Readable, *, expected: bool) -> Finding | None:
    """Count the names in the records of a zip that are pickles by their names."""
    try:
        records = zip_directory.read(source)
    except SourceError as error:
        return Finding(0, {}, str(error)) if expected else None
    names: Counter[Global] = Counter()
    pickles, problem = 0, None
    for record in records.values():
        if "/code/" in record.name:
            problem = "holds TorchScript code, which is not read"
        if not record.name.endswith(".pkl"):
            continue
        if record.nbytes > LIMIT_BYTES:
            problem = f"holds a pickle of {record.nbytes:,} bytes, which is not read"
            continue
        counter = NameCounter(source.read_at(record.start, record.nbytes), 0)
        try:
            inert_load.run(counter)
        except SourceError as error:
            problem = str(error)
        pickles += 1
        names.update(counter.names)
    if expected and not pickles:
        problem = problem or "a zip without a pickle"
    return Finding(pickles, names, problem) if pickles or expected else None


def _in_stream(source: Readable) -> Finding:
    """Count the names in consecutive pickles, as in torch's legacy format."""
    stream = _Stream(source)
    try:
        if stream.next() == MAGIC_NUMBER:
            for _ in range(_LEGACY_PICKLES):
                stream.next()
        else:
            while stream.reader.at < source.nbytes:
                stream.next()
    except SourceError as error:
        return Finding(stream.pickles, stream.names, f"{error}, after byte {stream.reader.at}")
    return Finding(stream.pickles, stream.names)


class _Stream:
    """Counts the names in consecutive pickles."""

    def __init__(self, source: Readable) -> None:
        self.reader = inert_load.Pickles(source)
        self.pickles = 0
        self.names: Counter[Global] = Counter()

    def next(self) -> Node:
        """Count the names of the next pickle, even if it is invalid, and return its node."""
        counter = NameCounter(b"", 0)

        def count(data: bytes, at: int) -> PickleMachine:
            nonlocal counter
            counter = NameCounter(data, at)
            return counter

        try:
            node = self.reader.read(count)
        finally:
            self.names.update(counter.names)
        self.pickles += 1
        return node

"""`open`: reads single tensors of a checkpoint, and parts of them, from Python."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final, Self, TypedDict

from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.model import BLOB, FILE, MASTER, MODULE
from streamshard.operations.inspect.inspect import summarize
from streamshard.operations.inspect.inspect_report import GroupSummary, Inspection
from streamshard.operations.inspect.ownership import ranks_of
from streamshard.options import takes
from streamshard.registry import load
from streamshard.sizes import counted
from streamshard.source.degree_change import other_degrees
from streamshard.source.lazy_tensor import LazyTensor
from streamshard.source.source import Source, open_source
from streamshard.source.source_access import SourceAccess
from streamshard.verb_options import OpenOptions

if TYPE_CHECKING:
    from zarr.abc.store import Store

_VIEW: Final = "streamshard.view.zarr_view:ZarrView"
"""A Zarr store of a checkpoint, which is above this floor and loads zarr-python."""
_KINDS: Final = {"param": "trained", "weight": "weight", "buffer": "buffer"} | dict.fromkeys(
    ("frozen", "loose", "excluded"), "frozen"
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Parameter:
    """A parameter or buffer, and all that a checkpoint keeps of it.

    Each of its tensors is an attribute: `parameter.fp32`, `parameter.exp_avg`, `parameter.module`.
    The last is what the module itself held: 16-bit weights, which stage 3 does not keep and nothing
    here makes up; frozen weights; buffers.
    """

    name: str
    kind: str
    """`trained`, `frozen` or `buffer`."""
    tied_to: str | None
    """The name under which its values are kept, if that is another."""
    shape: tuple[int, ...]
    tensors: Mapping[str, LazyTensor]
    """All that is kept of it, by state, `module` among them where that is."""

    @property
    def states(self) -> Mapping[str, LazyTensor]:
        """What the optimizer holds: `fp32` (the master weights), `exp_avg`, …; empty if nothing."""
        return {state: tensor for state, tensor in self.tensors.items() if state != MODULE}

    def __getattr__(self, name: str) -> LazyTensor:
        """Return one of the tensors by its state."""
        if name.startswith("_"):  # what Python asks for, before there is anything
            raise AttributeError(name)
        if name not in self.tensors:
            message = f"{self.name} ({self.kind}) has no '{name}'; the checkpoint keeps of it: "
            raise AttributeError(message + ", ".join(self.tensors), name=name, obj=self)
        return self.tensors[name]

    def __dir__(self) -> list[str]:
        """List attributes, those of this parameter among them: notebooks complete them."""
        return sorted({*object.__dir__(self), *self.tensors})

    def __repr__(self) -> str:
        """Say what there is of it, reading nothing."""
        held = ", ".join(f"{state} {tensor.dtype}" for state, tensor in self.tensors.items())
        tied = f", tied to {self.tied_to!r}" if self.tied_to else ""
        return f"<Parameter {self.name!r} {list(self.shape)}, {self.kind}{tied}: {held}>"


@dataclass(slots=True)
class _Held:
    """Where what is kept under a name is among the checkpoint's tensors."""

    kind: str
    numbers: dict[str, int] = field(default_factory=dict)
    """State → index."""
    tied_to: str | None = None


class TableRow(TypedDict):
    """A parameter or buffer, as a row of a table."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Of the master weights; of what is not trained, of what the module held."""
    group: int | None
    """Index in `OpenCheckpoint.groups`; None for what is not trained."""
    numel: int
    states: tuple[str, ...]
    """What the optimizer holds: `fp32` (the master weights), `exp_avg`, …; empty if nothing."""
    ranks: tuple[int, ...] | None
    """Data-parallel ranks whose files hold its states; None for a store, and for the rest."""


class OpenCheckpoint(Mapping[str, Parameter]):
    """A checkpoint that is open for reading: a mapping of names to what is kept under them.

    Names are those of the module's state dict, in its order, tied ones all; of raw dumps those of
    the trained parameters. What AutoTP (DeepSpeed 0.19.8) cut is whole here, and so are pipelines;
    of copies that several ranks hold it is the first. Where tensor or pipeline parallelism makes
    several parts of a model otherwise, a part's names begin with `mp_rank_00/`, as its arrays in a
    store do. Experts are numbered throughout the model.

    Nothing but headers is in memory until a tensor is indexed. Several threads may read; they take
    turns. To read at the same time, open the checkpoint once in each.
    """

    def __init__(self, saved: Source) -> None:
        self._saved = saved
        try:
            joined = other_degrees().join(saved)
            if joined is not None and joined.averaged:
                joined = None  # their copies may differ, and none of them is the whole
        except (UnsupportedError, DisagreementError):
            joined = None  # then its parts are what can be read
        self._source = source = saved if joined is None else joined.source
        self._reading = SourceAccess(source)
        self._entries = dict(_everything(source.checkpoint))

    def __getitem__(self, name: str) -> Parameter:
        """Return what is kept under a name; reads no tensor."""
        entry = self._entries.get(name)
        if entry is None:
            near = get_close_matches(str(name), self._entries, n=3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise KeyError(f"{self._source.path}: no parameter or buffer {name!r}{hint}")
        tensors = {state: self._tensor(number) for state, number in entry.numbers.items()}
        shape = next(iter(tensors.values())).shape
        return Parameter(name, entry.kind, entry.tied_to, shape, MappingProxyType(tensors))

    def __contains__(self, name: object) -> bool:
        """Tell whether something is kept under a name."""
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Count the names."""
        return len(self._entries)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close all files; what was read stays."""
        self._reading.close()

    def __repr__(self) -> str:
        """Say what it is, reading nothing."""
        state = "" if self._reading.is_open else ", closed"
        what = f"{self.tag}, ZeRO stage {self.zero_stage}, world size {self.world_size}"
        what = self._source.checkpoint.foreign or what
        names = counted(len(self), "name")
        return f"<OpenCheckpoint {str(self._source.path)!r}: {what}, {names}{state}>"

    def table(self) -> list[TableRow]:
        """Return a row for every name, which data frames take: `pandas.DataFrame(ckpt.table())`.

        Reads nothing.
        """
        # Several parts' ranks hold what was put together from them.
        owners = ranks_of(self._source) if self._source is self._saved else {}
        rows: list[TableRow] = []
        for name, parameter in self.items():
            numbers = self._entries[name].numbers
            group, ranks = owners.get(numbers.get(MASTER, -1), (None, None))
            states = tuple(parameter.states)
            tensor = parameter.tensors[MASTER if MASTER in numbers else next(iter(numbers))]
            rows.append(
                TableRow(
                    name=name,
                    shape=parameter.shape,
                    dtype=tensor.dtype,
                    group=group,
                    numel=tensor.numel,
                    states=states,
                    ranks=ranks,
                )
            )
        return rows

    def zarr(self, *, chunk_size: int = 64 << 20) -> "Store":
        """Return it as a read-only Zarr store: `zarr.open_group(ckpt.zarr(), mode="r")`.

        Each key has the bytes that `convert` would write under it without compression, made when
        they are asked for; there is no manifest. Parts of a model are parts here, as in a store.
        The store has files of its own, and can be read after the checkpoint is closed.

        `chunk_size`: bytes of a chunk at most, which is what any read of it takes from the files.
        """
        view: Store = load(_VIEW).of(self._saved, chunk_size)
        return view

    def _ipython_key_completions_(self) -> list[str]:
        """List the names for notebooks to complete."""
        return list(self._entries)

    @cached_property
    def inspection(self) -> Inspection:
        """All that `inspect` tells of it."""
        return summarize(self._saved)

    @property
    def tag(self) -> str:
        """Name of the saved step's directory."""
        return self._source.checkpoint.tag

    @property
    def zero_stage(self) -> int:
        """Stage that saved it."""
        return self._source.checkpoint.layout.stage

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return self._source.checkpoint.ranks

    @property
    def global_steps(self) -> int | None:
        """Steps that were done; None for raw dumps, which do not tell."""
        return self.inspection.global_steps

    @property
    def groups(self) -> tuple[GroupSummary, ...]:
        """Param groups, with hyper-parameters and what their states hold in addition to tensors."""
        return self.inspection.groups

    def _tensor(self, number: int) -> LazyTensor:
        tensor = self._source.checkpoint.tensors[number]
        name = f"{tensor.model_part}/{tensor.name}" if tensor.model_part else tensor.name
        return LazyTensor(name, tensor.state, tensor.dtype, tensor.shape, number, self._reading)


@takes(OpenOptions)
def open(options: OpenOptions) -> OpenCheckpoint:
    """Open a checkpoint to read its tensors, or parts of them; reads its headers.

    Raises
    ------
    SourceError
        There is no checkpoint there, or it cannot be used; the message names the file.

    Examples
    --------
    >>> import streamshard
    >>> with streamshard.open("runs/7b") as ckpt:
    ...     print(ckpt)
    ...     part = ckpt["layers.0.weight"].fp32[1000:2000]
    <OpenCheckpoint 'runs/7b': global_step7, ZeRO stage 3, world size 2, 8 names>
    >>> part.shape, part.dtype
    ((1000, 4), dtype('float32'))

    What was read stays; what was not cannot be read any more.

    >>> ckpt["layers.0.weight"].fp32[0, 0]
    Traceback (most recent call last):
    streamshard.errors.UsageError: runs/7b: has been closed; read inside the 'with' block

    It is a mapping, and reads nothing before a tensor is indexed.

    >>> ckpt = streamshard.open("runs/7b")
    >>> [name for name in ckpt if name.startswith("layers.")]
    ['layers.0.weight', 'layers.0.bias']
    >>> ckpt["layers.0.weight"]
    <Parameter 'layers.0.weight' [2048, 4], trained: fp32 float32, exp_avg float32, \
exp_avg_sq float32>
    >>> ckpt["layers.0.weight"].exp_avg
    <LazyTensor 'layers.0.weight' exp_avg float32 [2048, 4]>
    >>> ckpt["layers.0.weight"].exp_avg[-1, ::2].shape
    (2,)
    >>> ckpt["old.weight"].module.torch().dtype
    torch.bfloat16
    >>> ckpt.global_steps, ckpt.groups[0].hyper_parameters["lr"]
    (7, 0.001)
    >>> ckpt.close()
    """
    opened = open_source(options.source, options)
    opened.require_use_of_like()
    return OpenCheckpoint(opened)


def _everything(checkpoint: Checkpoint) -> Iterator[tuple[str, _Held]]:
    """Yield all that is kept, by name: what the modules list first, in their order."""
    for model_part in checkpoint.model_parts:
        numbers: dict[str, dict[str, int]] = {}
        for number, tensor in enumerate(checkpoint.tensors):
            if tensor.model_part == model_part.name and tensor.state not in (BLOB, FILE):
                numbers.setdefault(tensor.name, {})[tensor.state] = number
        prefix = f"{model_part.name}/" if model_part.name else ""
        for name, held in _of_model_part(model_part, numbers, prefix):
            yield prefix + name, held


def _of_model_part(
    model_part: ModelPart, numbers: Mapping[str, dict[str, int]], prefix: str
) -> Iterator[tuple[str, _Held]]:
    kinds = {entry.name: entry.kind for entry in model_part.module}
    listed = set()
    for entry in model_part.module:
        stored_name = entry.held_as
        listed.add(stored_name)
        if stored_name in numbers and entry.kind != "extra":
            tied_to = prefix + stored_name if stored_name != entry.name else None
            yield entry.name, _Held(_KINDS[kinds[stored_name]], numbers[stored_name], tied_to)
    # A module may keep a parameter out of its state dict; dumps have no module; experts have
    # files of their own.
    for name, held in numbers.items():
        if name not in listed:
            yield name, _Held("trained" if MASTER in held else "frozen", held)

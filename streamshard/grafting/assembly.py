"""Puts two sources together: the job of one, START, with the training of the other, SRC, in it.

`grafted_source` does so by rules. `reference` completes what another program than DeepSpeed saved:
there are no rules, and START is the reference checkpoint.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from streamshard import registry
from streamshard.formats.checkpoint import Checkpoint, LayerFile, ModelPart, ParamGroup
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import refilled
from streamshard.formats.deepspeed.read.model_part import optimizer_tensors
from streamshard.formats.deepspeed.states import State
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.formats.torch.tree_copy import renumbered
from streamshard.grafting.origins import Origin
from streamshard.grafting.pieces import Leading, Piece, Pieces
from streamshard.grafting.schedules import Origins, Parts
from streamshard.model import MASTER, MODULE, LogicalTensor, Whole
from streamshard.source.degree_change import DerivedSource
from streamshard.source.source import Source

Dicts = tuple[Mapping[str, Node], Mapping[str, Node]]
"""Of a model file and of an optimizer file. Their storages are tensors of both sources."""
States = Mapping[str, State] | None


def with_part_files(source: Source) -> DerivedSource:
    """Add the tensors in the files of a pipeline's layers, or of experts, if there are any."""
    found: DerivedSource = registry.load(registry.WITH_PARTS)(source)
    return found


class Assembly(ABC):
    """The tensors of what is put together, with the places of their elements."""

    def __init__(self, source: Source, start: Source) -> None:
        self.source, self.start = source, start
        self.old, self.new = source.checkpoint, start.checkpoint
        self.first = len(self.old.tensors)
        """Number of START's first tensor among those of both."""
        self.union = source.append(self.new.tensors, start.cutting, start.files)
        self.index, self.start_index = self.old.tensor_index(), self.new.tensor_index()
        self._tensors: list[LogicalTensor] = []
        self._rows: list[int] = []
        """The tensor of both that each one is; of those that are computed, any."""
        self._computed: dict[str, list[tuple[int, Sequence[Piece]]]] = {}
        """Dtype → tensors that are computed, with their pieces."""

    # Who says what

    @abstractmethod
    def origins(self, parts: Sequence[Parts]) -> Sequence[Mapping[str, Origin]]:
        """Decide where each tensor of each model part of START gets its values from."""

    @abstractmethod
    def states(
        self, parts: Parts, group: ParamGroup, origins: Mapping[str, Origin]
    ) -> tuple[int | None, States]:
        """Return the param group of SRC that one of START goes on from, and its states."""

    @abstractmethod
    def training_state(self, parts: Parts, groups: Origins) -> Dicts:
        """Return the rest of a model part. `groups`: of SRC, for each of START's."""

    # The tensors

    def parts(self) -> tuple[ModelPart, ...]:
        """Put the model parts together."""
        both = list(zip(self.old.model_parts, self.new.model_parts, strict=True))
        return tuple(map(self._part, both, self.origins(both)))

    def layers(self) -> tuple[LayerFile, ...]:
        """Return START's files of layers and experts, with the tensors of the parts in them."""
        numbered = ((n, t) for n, t in enumerate(self._tensors) if t.state in (MASTER, MODULE))
        numbers = {(tensor.model_part, tensor.name): number for number, tensor in numbered}

        def fill(tensor: LogicalTensor, saved: Storage) -> Storage:
            number = numbers[tensor.model_part, tensor.name]
            return Storage(saved.dtype, saved.numel, Whole(number))

        return refilled(self.new.layers, self.new.tensors, fill, self.start.path)

    def _part(self, parts: Parts, origins: Mapping[str, Origin]) -> ModelPart:
        new = parts[1]
        numbers: list[int | None] = [None] * len(new.hyper_parameters)
        groups = []
        for group in new.groups:
            numbers[group.number], states = self.states(parts, group, origins)
            groups.append(replace(group, states=states))
        trained = self.new.master_shapes(new)
        for tensor in optimizer_tensors(groups, trained, new.name):
            of = self.weight if tensor.state == MASTER else self.state
            self.add(tensor, of(tensor, origins[tensor.name]))
        for tensor in self.new.tensors:
            is_of_module = tensor.state == MODULE and tensor.model_part == new.name
            if is_of_module and tensor.name not in trained:  # their copies are casts of the masters
                self.add(tensor, self.weight(tensor, origins.get(tensor.name)))
        files = new.model_state, new.optimizer_file
        model, optimizer = renumbered(files, lambda row: row + self.first)
        new = replace(new, groups=tuple(groups), model_state=model, optimizer_file=optimizer)
        dicts, first = self.training_state((parts[0], new), numbers), len(self._tensors)

        def number_of(row: int) -> int:
            """Add a storage that is left in the training state."""
            number = len(self._tensors)
            blob = self.union.checkpoint.tensors[row]
            self._tensors.append(replace(blob, name=str(number - first), model_part=new.name))
            self._rows.append(row)
            return number

        model, optimizer = renumbered(dicts, number_of)
        return replace(new, model_state=model, optimizer_file=optimizer)

    def kept(self, state: str, origin: Origin, tensor: LogicalTensor) -> Leading:
        """Return which elements of SRC a tensor has."""
        row = self.index[tensor.model_part, state, str(origin.source)]
        return row, origin.kept_numel(tensor.shape)

    def state(self, tensor: LogicalTensor, origin: Origin) -> Sequence[Piece]:
        """Return the pieces of an optimizer's state; none if it has none."""
        row, numel = self.kept(tensor.state, origin, tensor)
        return [Piece(numel, row)]

    def weight(self, tensor: LogicalTensor, origin: Origin | None) -> Sequence[Piece]:
        """Return the pieces of a weight: SRC's, and further rows of START's."""
        of_start = self.start_piece(tensor)
        if origin is None or origin.source is None:
            return [of_start]
        row, numel = self.kept(origin.state, origin, tensor)
        rest = replace(of_start, numel=tensor.numel - numel, first=numel)
        return [Piece(numel, row), rest] if rest.numel else [Piece(numel, row)]

    def start_piece(self, tensor: LogicalTensor) -> Piece:
        """Return START's whole tensor."""
        row = self.start_index[tensor.model_part, tensor.state, tensor.name]
        return Piece(tensor.numel, self.first + row)

    def add(self, tensor: LogicalTensor, pieces: Sequence[Piece]) -> None:
        """Add a tensor: as it lies in a file, if it is one whole tensor, or made of pieces."""
        if not pieces:
            return
        row = pieces[0].tensor if len(pieces) == 1 else None
        dtype = "" if row is None else self.union.checkpoint.tensors[row].dtype
        if row is not None and tensor.state == MODULE:
            tensor = replace(tensor, dtype=dtype)  # it is cast as it is written
        elif row is None or dtype != tensor.dtype:
            self._computed.setdefault(tensor.dtype, []).append((len(self._tensors), pieces))
            row = 0
        # A tensor with fewer rows ends early, which no cutting minds.
        self._tensors.append(tensor)
        self._rows.append(row)

    def placed(self, checkpoint: Checkpoint) -> tuple[Source, list[Pieces]]:
        """Return a source of the added tensors, and the pieces that some are computed of."""
        job = self.union.take(self._rows, replace(checkpoint, tensors=tuple(self._tensors)))
        computed = []
        for dtype, tensors in self._computed.items():
            pieces = [piece for _, pieces in tensors for piece in pieces]
            computed.append(Pieces.of(self.union, pieces, dtype))
            job = job.compute([number for number, _ in tensors], computed[-1])
        return job, computed

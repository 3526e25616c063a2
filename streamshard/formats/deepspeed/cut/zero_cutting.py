"""Computes where every element of a source lies, and checks the files against that layout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, ModelPart, Reading
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.part_cut import flat_groups
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.io.entries import open_readable
from streamshard.layout.cutting import CuttingBuilder
from streamshard.layout.zero import FlatGroup, shard_numel
from streamshard.model import ITEMSIZE, MASTER, Repeat, Slot, SourceFile, ZeroLayout


@dataclass(frozen=True, slots=True)
class RecordedCut:
    """The cut as a rank's file records it (stages 1 and 2), to be checked against the arithmetic.

    A field is None where the DeepSpeed version that saved the file did not record it yet.
    """

    path: Path
    paddings: tuple[int, ...] | None
    alignments: tuple[tuple[int, ...], ...] | None
    slices: tuple[tuple[tuple[str, int, int], ...], ...] | None
    """(parameter, start in the partition, numel) per param group."""


def recorded_cut(state: Mapping[str, Node], path: Path, *, has_paddings: bool) -> RecordedCut:
    """Read the record in an optimizer's state.

    `has_paddings`: whether the state's `group_paddings` are those of the rank.
    """
    return RecordedCut(
        path=path,
        paddings=_tuple(state[names.GROUP_PADDINGS]) if has_paddings else None,
        alignments=_nested(state.get(names.ALIGNMENT_PADDINGS)),
        slices=_slices(state.get(names.SLICE_MAPPINGS), path),
    )


def _tuple(node: Node) -> tuple[int, ...] | None:
    return tuple(node) if isinstance(node, list) else None


def _nested(node: Node) -> tuple[tuple[int, ...], ...] | None:
    return tuple(tuple(inner) for inner in node) if isinstance(node, list) else None


def _slices(node: Node, path: Path) -> tuple[tuple[tuple[str, int, int], ...], ...] | None:
    """Read `param_slice_mappings`: for each group, parameter name → `fragment_address` object."""
    if not isinstance(node, list):
        return None
    try:
        with of_file(path):
            return tuple(
                tuple(_slice(name, at.state) for name, at in of_group.items()) for of_group in node
            )
    except (AttributeError, KeyError, TypeError) as error:
        raise CorruptFileError(f"'{names.SLICE_MAPPINGS}' is unreadable", path=path) from error


def _slice(name: Node, fragment: Mapping[Node, Node]) -> tuple[str, int, int]:
    start, numel = fragment["start"], fragment["numel"]
    if len(fragment) > 2:  # only these two are written again
        found = ", ".join(map(show, fragment))
        raise UnsupportedError(f"a fragment of {show(name)} has {found}: more than start and numel")
    if not isinstance(start, int) or not isinstance(numel, int):
        raise CorruptFileError(f"a slice of {show(name)} from {show(start)} on, {show(numel)} long")
    return name_of(name), start, numel


_SAMPLE_BYTES: Final = 4096
"""Bytes at each end of two copies that are compared."""


class _WholeMomentum:
    """The places of the momentum of each parameter in one param group.

    A rank's momentum holds all parameters of which the rank owns a part, in stored order and
    without gaps. Ranks that own parts of the same parameter keep copies of its momentum, computed
    from the same gradient. The first rank's copy is read. Of the other copies only both ends are
    compared with it: with small partitions, reading them all would read most of the momentum twice.

    A momentum that is cut like any other state can have these lengths on all ranks too; then both
    layouts are the same. For rank r, let p be the sum of the padding and of the gaps in its
    partition. A momentum that is cut has as many elements as the partition. If the whole parameters
    have as many elements, then other ranks own p elements of r's parameters. Without
    `parameter_alignment` there are no gaps, and padding is on the last ranks that hold anything. If
    r shares a parameter with r + 1, r has no padding, so p = 0, so r shares no parameter. Hence no
    parameter is shared, and ranks that own parameters have no padding: in both layouts a rank has
    its parameters one after the other, and nothing else. Only with gaps can the lengths agree while
    the contents differ; then the config says which layout it is.
    """

    def __init__(
        self, flat: FlatGroup, slot: Slot, itemsize: int, files: Sequence[SourceFile]
    ) -> None:
        self._flat = flat
        self._slot = slot
        self._itemsize = itemsize
        self._files = files

    def lengths(self) -> list[int]:
        """Return the count of elements that each rank should have."""
        ranks = range(self._flat.world_size)
        numels = self._flat.numels
        return [int(numels[[*self._flat.owned(rank)]].sum()) for rank in ranks]

    def assign(self, tensors: NDArray[np.int64], builder: CuttingBuilder) -> Iterator[Repeat]:
        """Place the momentum of every parameter; yields where other ranks have it as well.

        `tensors`: logical tensor of each parameter, in the param group's own order.
        """
        found: dict[int, tuple[SourceFile, int]] = {}
        for rank in range(self._flat.world_size):
            number, offset = int(self._slot.files[rank]), int(self._slot.offsets[rank])
            file = self._files[number]
            for param in self._flat.owned(rank):
                numel = int(self._flat.numels[param])
                if param in found:
                    repeat = found[param], (file, offset), numel * self._itemsize
                    span = min(repeat[-1], _SAMPLE_BYTES)
                    for start in {0, repeat[-1] - span}:
                        require_alike(repeat, start, span)
                    yield repeat
                else:
                    found[param] = (file, offset)
                    builder.place(int(tensors[param]), number, offset, numel)
                offset += numel * self._itemsize


def require_alike(repeat: Repeat, start: int, nbytes: int) -> None:
    """Compare some bytes of two copies."""
    one, other, _ = repeat
    first, second = (_read(file, offset + start, nbytes) for file, offset in (one, other))
    if first != second:
        message = f"disagrees with {other[0].path} about the momentum of a parameter that both"
        message = f"{message} ranks hold: they are not of one step of one run"
        raise DisagreementError(message, path=one[0].path)


def _read(file: SourceFile, offset: int, nbytes: int) -> bytes:
    with open_readable(file.path) as opened:
        data = opened.read_at(offset, nbytes)
    if len(data) != nbytes:
        raise CorruptFileError(f"ends before byte {offset + nbytes}", path=file.path)
    return data


_LAYOUT_KEYS: Final = (
    "round_robin_gradients, parameter_alignment, offload_optimizer, "
    "use_data_before_expert_parallelism"
)


@dataclass(frozen=True, slots=True)
class ModelPartMap:
    """Where the shards of one model part store its cut tensors."""

    slots: Mapping[tuple[int, str], Slot] = field(default_factory=dict)
    """(param group, in stage 3 sub-group, state) → its places on the ranks."""
    recorded: tuple[RecordedCut, ...] = ()
    """One per rank (stages 1 and 2)."""
    sub_group_params: Sequence[Sequence[Sequence[str]]] = ()
    """The tensors of each parameter of each sub-group (stage 3)."""


def cut_source(
    checkpoint: Checkpoint,
    files: Sequence[SourceFile],
    whole: Mapping[int, tuple[int, int]],
    shards: Mapping[int, Slot],
    model_parts: Sequence[ModelPartMap] = (),
) -> Reading:
    """Compute the place of every element of every logical tensor.

    `whole`: tensor → (file, byte offset), for tensors that lie in one piece.
    `shards`: tensor → each rank's shard of it (stage 3, frozen weights).
    """
    tensors = checkpoint.tensors
    builder = CuttingBuilder([ITEMSIZE[tensor.dtype] for tensor in tensors])
    index = checkpoint.tensor_index()
    repeats: list[Repeat] = []
    place = _place_shards if checkpoint.layout.stage == 3 else _place_partitions
    for model_part, part_map in zip(checkpoint.model_parts, model_parts, strict=False):
        repeats += place(checkpoint, model_part, part_map, files, index, builder)
    for tensor, (file, offset) in whole.items():
        builder.place(tensor, file, offset, tensors[tensor].numel)
    for tensor, slot in shards.items():
        share = shard_numel(tensors[tensor].numel, checkpoint.layout.world_size)
        name = tensors[tensor].name
        _require_lengths(slot, [share] * len(slot.numels), files, f"the shard of {name}")
        builder.assign(tensor, builder.slot(slot), piece_numel=share)
    for tensor in builder.missing():
        if tensors[tensor].numel:
            raise CorruptFileError(f"{tensors[tensor].state} of {tensors[tensor].name} is nowhere")
    return Reading(checkpoint, builder.build(), tuple(files), tuple(repeats))


def _place_partitions(
    checkpoint: Checkpoint,
    model_part: ModelPart,
    part_map: ModelPartMap,
    files: Sequence[SourceFile],
    index: Mapping[tuple[str, str, str], int],
    builder: CuttingBuilder,
) -> list[Repeat]:
    """Place a model part's partitions of flat groups (stages 1 and 2); returns further copies."""
    layout, repeats = checkpoint.layout, list[Repeat]()
    groups = flat_groups(checkpoint, model_part, layout, checkpoint.module_dtype)
    for (group, state), slot in part_map.slots.items():
        param_group = model_part.groups[group]
        flat = groups[group].in_blocks(param_group.block(state))
        what = f"{state} of param group {group}"
        tensors = np.array([index[model_part.name, state, name] for name in param_group.params])
        if state in model_part.whole_states(param_group, layout):
            itemsize = ITEMSIZE[param_group.flat_states()[state]]
            whole = _WholeMomentum(flat, slot, itemsize, files)
            _require_lengths(slot, whole.lengths(), files, what)
            repeats += whole.assign(tensors, builder)
            continue
        lengths = [flat.partition_numel] * flat.world_size
        if state == MASTER and not layout.bf16_optimizer:
            lengths = _stripped_lengths(flat, slot)
        _require_lengths(slot, lengths, files, what)
        first = builder.slot(slot)
        for tensor, start in zip(tensors.tolist(), flat.starts.tolist(), strict=True):
            builder.assign(tensor, first, piece_numel=flat.partition_numel, origin=start)
    for rank, recorded in enumerate(part_map.recorded):
        _require_recorded(recorded, rank, model_part, groups, layout)
    return repeats


def _require_recorded(
    recorded: RecordedCut,
    rank: int,
    model_part: ModelPart,
    groups: Sequence[FlatGroup],
    layout: ZeroLayout,
) -> None:
    """Refuse a source whose files record another cut than the one computed from its config.

    The lengths alone do not show it: in another order, parameters take as much room.
    """
    places = model_part.held_by(rank, layout)
    params = [model_part.serialized(model_part.groups[group]) for group, _ in places]
    slices = tuple(
        tuple((names_[i], start, numel) for i, start, numel in groups[group].recorded(sharer))
        for names_, (group, sharer) in zip(params, places, strict=True)
    )
    alignments = tuple(groups[group].alignments for group, _ in places)
    paddings = tuple(groups[group].padding(sharer) for group, sharer in places)
    counted_last = tuple(groups[group].padding_counted_last(sharer) for group, sharer in places)
    computed = {
        "group_paddings": (recorded.paddings, (paddings, counted_last)),
        "param_alignment_paddings": (recorded.alignments, (alignments,)),
        "param_slice_mappings": (recorded.slices, (slices,)),
    }
    for key, (there, expected) in computed.items():
        if there is not None and there not in expected:
            message = f"its {key} are not those of the layout that its"
            raise DisagreementError(
                f"{message} ds_config describes ({_LAYOUT_KEYS}). Was the config changed "
                "after the save?",
                path=recorded.path,
            )


def _place_shards(
    checkpoint: Checkpoint,
    model_part: ModelPart,
    part_map: ModelPartMap,
    files: Sequence[SourceFile],
    index: Mapping[tuple[str, str, str], int],
    builder: CuttingBuilder,
) -> list[Repeat]:
    """Place a model part's shards of sub-groups (stage 3)."""
    tensors = checkpoint.tensors
    for (unit, key), slot in part_map.slots.items():
        params = [
            [index[model_part.name, key, name] for name in names_]
            for names_ in part_map.sub_group_params[unit]
        ]
        ranks = len(slot.numels)
        numels = [[tensors[tensor].numel for tensor in param] for param in params]
        shares = [shard_numel(sum(parts), ranks) for parts in numels]
        _require_lengths(slot, [sum(shares)] * ranks, files, f"{key} of sub-group {unit}")
        first, filled = builder.slot(slot), 0
        for param, parts, share in zip(params, numels, shares, strict=True):
            for tensor, origin in zip(param, accumulate(parts, initial=0), strict=False):
                lead = filled * ITEMSIZE[tensors[tensor].dtype]
                builder.assign(tensor, first, piece_numel=share, origin=origin, lead=lead)
            filled += share
    return []


def _stripped_lengths(flat: FlatGroup, found: Slot) -> list[int]:
    """Count the master weights that each rank saves: `partition[: numel - padding]`.

    DeepSpeed before 0.16.4 counted all padding on the last rank, and saved the padding of the other
    ranks. If the padding was longer than that rank's partition, the end of the slice was negative,
    which Python counts from the back.
    """
    numel, ranks = flat.partition_numel, range(flat.world_size)
    lengths = [len(range(numel)[: numel - flat.padding_counted_last(rank)]) for rank in ranks]
    if found.numels.tolist() == lengths:
        return lengths
    return [numel - flat.padding(rank) for rank in ranks]


def _require_lengths(
    slot: Slot, lengths: Sequence[int], files: Sequence[SourceFile], what: str
) -> None:
    """Refuse a source whose tensors do not have the computed lengths."""
    for rank, (found, expected) in enumerate(zip(slot.numels.tolist(), lengths, strict=True)):
        if found != expected:
            path = files[int(slot.files[rank])].path
            message = f"{what} has {found} elements on rank {rank}, {expected} belong there"
            raise CorruptFileError(
                f"{message}. Is the ds_config in the checkpoint ({_LAYOUT_KEYS}) that of the run "
                "that saved it?",
                path=path,
            )

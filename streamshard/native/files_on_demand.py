"""The files that a repartition would write, each serialized when a job asks for it."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from streamshard.engine.run.work import Region
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.part_cut import PartCut, ZeroTarget
from streamshard.formats.deepspeed.write.zero_writer import native_files, whole_files
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.torch_tensor import Storage, make_tensor
from streamshard.formats.torch.zip_layout import FileImage, Serialized, serialize
from streamshard.model import FILE, MASTER, MODULE, Literal, Whole
from streamshard.native.resharding import Resharding
from streamshard.native.target_files import targets_of
from streamshard.transfer.file_layout import Divider
from streamshard.transfer.torch_layout import elements_of


@dataclass(frozen=True, slots=True)
class StorageContent:
    """What fills a storage of a torch file."""

    dtype: str
    nbytes: int
    data: bytes | None
    """The bytes, if they are known; else they come from the regions."""
    regions: Sequence[Region] = ()

    def fragment(self) -> tuple[int, int] | None:
        """Return (file, byte offset) if all bytes are one fragment of a file, as they are there."""
        if self.data is not None or not self.nbytes or self.regions[0].cast is not None:
            return None
        fragment, at = None, 0
        for region in self.regions:
            copies = region.copies
            if len(copies) != 1 or int(copies.target[0]) or int(copies.nbytes[0]) != region.nbytes:
                return None
            extent = int(copies.file[0]), int(copies.source[0]) - at
            if fragment not in (None, extent):
                return None
            fragment, at = extent, at + region.nbytes
        return fragment


@dataclass(frozen=True, slots=True)
class FileContent:
    """A torch file: its pickle, and what fills the storages that the pickle numbers."""

    pickled: bytes
    storages: Sequence[StorageContent]

    def source_files(self) -> set[int]:
        """Return the source files that hold parts of it, by their indices."""
        regions = (region for storage in self.storages for region in storage.regions)
        return {file for region in regions for file in set(region.copies.file.tolist())}


class FilesOnDemand:
    """The files of a target; none of them is ever written."""

    def __init__(self, resharding: Resharding) -> None:
        self._resharding = resharding
        settings = resharding.settings
        targets = targets_of(resharding.source, settings)
        self._divider = Divider(resharding.source)
        images = chain.from_iterable(_images_of(resharding, target) for target in targets)
        self._images = {image.path: image for image in images}
        self.cuts: Sequence[PartCut] = [target.cut for target in targets]
        """How the target cuts each model part."""

    @property
    def paths(self) -> list[str]:
        """Paths of the torch files, relative to the run directory."""
        return list(self._images)

    def sidecars(self) -> dict[str, str]:
        """Return path in the target → path in the source of the tag directory's other files."""
        checkpoint, paths = self._resharding.source.checkpoint, self._resharding.resized.paths
        return {
            paths[file.path]: file.path
            for file in checkpoint.files
            if file.path.startswith(f"{checkpoint.tag}/") and file.path in paths
        }

    def content(self, path: str) -> FileContent:
        """Serialize a file, and find what fills it."""
        image = self._images[path]
        return self._content(image.serialized(), image.rank)

    def sidecar(self, name: str) -> FileContent:
        """Find what fills a sidecar, which is one storage without a pickle."""
        tensors = self._resharding.source.checkpoint.tensors
        number = next(i for i, t in enumerate(tensors) if (t.state, t.name) == (FILE, name))
        storage = Storage("uint8", tensors[number].numel, Whole(number))
        return FileContent(b"", [self._storage(storage, None)])

    def weights(self, mp_rank: int) -> FileContent:
        """Serialize a model part's state dict, with master weights where there are any.

        It is what `get_fp32_state_dict_from_zero_checkpoint` of `deepspeed/utils/zero_to_fp32.py`
        (0.19.8) makes of a whole checkpoint of one part, with which a job at stage 3 begins that
        loads no optimizer states.
        """
        checkpoint = self._resharding.source.checkpoint
        index, model_part = checkpoint.tensor_index(), checkpoint.model_parts[mp_rank]
        module = model_part.model_state[names.MODULE_STATE]
        storages: dict[str, Storage] = {}
        state: OrderedDict[str, Node] = OrderedDict()
        for entry in model_part.module:
            keys = ((model_part.name, kind, entry.held_as) for kind in (MASTER, MODULE))
            number = next((index[key] for key in keys if key in index), None)
            if number is not None:
                tensor = checkpoint.tensors[number]
                whole = Storage(tensor.dtype, tensor.numel, Whole(number))
                storage = storages.setdefault(entry.held_as, whole)
                state[entry.name] = make_tensor(storage, tensor.shape)
            elif entry.kind == "extra":
                state[entry.name] = module[entry.name]
        return self._content(serialize(state), None)

    def _content(self, serialized: Serialized, rank: int | None) -> FileContent:
        storages = [self._storage(storage, rank) for storage in serialized.storages]
        return FileContent(serialized.pickled, storages)

    def _storage(self, storage: Storage, rank: int | None) -> StorageContent:
        if isinstance(storage.content, Literal):
            return StorageContent(storage.dtype, storage.nbytes, storage.content.data)
        regions = self._divider.regions(elements_of(storage, rank, {}))
        return StorageContent(storage.dtype, storage.nbytes, None, regions)


def _images_of(resharding: Resharding, target: ZeroTarget) -> Iterator[FileImage]:
    return native_files(target) if target.layout.stage else whole_files(target)


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """What a rank holds of a flat group (stages 1 and 2), or of a sub-group (stage 3)."""

    params: tuple[str, ...]
    """In the order in which they are stored."""
    alignments: tuple[int, ...]
    """Alignment padding after each parameter; empty in stage 3."""
    numel: int
    """Elements of the rank's partition."""
    sharer: int
    """The rank's index among those that share the group."""


def held_groups(
    resharding: Resharding, cuts: Sequence[PartCut], mp_rank: int, dp_rank: int
) -> Iterator[HeldGroup]:
    """Yield what a rank of the target holds of each flat group or sub-group.

    `mp_rank` and `dp_rank`: number of the rank's model part, and the rank's place in the
    data-parallel group.
    """
    layout = resharding.settings.layout
    model_part, cut = resharding.source.checkpoint.model_parts[mp_rank], cuts[mp_rank]
    if layout.stage == 3:
        sharers = dict(model_part.held_by(dp_rank, layout))
        for unit in cut.sub_groups:
            if unit.group in sharers:
                group = model_part.groups[unit.group]
                params = group.params[unit.first : unit.stop]
                if model_part.fuses(group):
                    params = tuple(name for name, _ in names.parameters(params))
                yield HeldGroup(params, (), unit.numel, sharers[unit.group])
        return
    for number, sharer in model_part.held_by(dp_rank, layout):
        flat, own = cut.flat_groups[number], model_part.serialized(model_part.groups[number])
        params = tuple(own[index] for index in flat.order)
        yield HeldGroup(params, flat.alignments, flat.partition_numel, sharer)

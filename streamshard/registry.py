"""Names the rooms around the core by text, so that the core imports none of them.

This is the only module that imports by text, except the package itself. It also loads what a verb
needs when that verb is called, by the names in `cli/main.py`, `parser.py`, `transfer_command.py`.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

BUCKETS: Final = "streamshard.io.objects.buckets:BUCKETS"
"""Object stores, as a `Place`."""
PACKED: Final = "streamshard.formats.zarr.packed_place:PACKED"
"""Stores in one file each, on a disk, as a `Place` that is only read."""
PACKED_OBJECTS: Final = "streamshard.formats.zarr.packed_objects:PACKED_OBJECTS"
"""The same in buckets."""
FACTS: Final = "streamshard.formats.facts_file:read_facts"
"""Reads what a user knows of a checkpoint; see `formats/facts.py`."""
DISK_TARGET: Final = "streamshard.transfer.staging:PartialTarget"
"""A target that is a directory on a disk; see `transfer/transaction.py`."""
PACKED_TARGET: Final = "streamshard.transfer.packed_target:PackedTarget"
"""A target that is one file."""
UPLOADED_TARGET: Final = "streamshard.transfer.uploaded_target:UploadedTarget"
"""A target that comes into being by uploads."""
EXISTING_TARGET: Final = "streamshard.transfer.needed:found"
"""Compares what is there with what a run would write; see `transfer/needed.py`."""
FRAMEWORK_ADVICE: Final = "streamshard.native.framework_advice:ADVICE"
"""What jobs of frameworks are told; see `native/resizing.py`."""
RARE_KINDS: Final = "streamshard.formats.deepspeed.rare_states:KINDS"
"""Kinds of optimizer states that few optimizers have; see `formats/deepspeed/states.py`."""
UNCUTTABLE: Final = "streamshard.formats.deepspeed.rare_states:uncuttable"
"""Returns the error of states that a layout cannot cut."""
NEEDS_ORDER: Final = "streamshard.formats.deepspeed.cut.muon_order:needs_order"
IN_ORDER: Final = "streamshard.formats.deepspeed.cut.muon_order:in_order_of"
"""The order of Muon's parameters at a stage."""
RANK_STATES: Final = "streamshard.formats.rank_states:RESIZE"
"""What becomes of the files of ranks that frameworks save; see `formats/frameworks.py`."""
READ_BACK: Final = "streamshard.compare.read_back:differences"
"""Compares a written checkpoint with its source, to verify it."""
FRESH_STATES: Final = "streamshard.source.fresh_states:with_fresh_states"
"""Starts an optimizer fresh; see `operations/repartition/repartition.py`."""
COMPLETED: Final = "streamshard.grafting.reference:completed"
GRAFT_DESCRIBED: Final = "streamshard.grafting.record:described"
GRAFT_PAIRED: Final = "streamshard.grafting.record:pair_grafted"
"""Complete a checkpoint by a reference; read the record of a graft, where there is one."""
OTHER_DEGREES: Final = "streamshard.degrees.degree_changes:OTHER_DEGREES"
"""Other tensor, pipeline and expert parallel degrees; see `source/degree_change.py`."""
WITH_LAYER_PAIRS: Final = "streamshard.degrees.layered:with_layer_pairs"
WITH_PARTS: Final = "streamshard.degrees.degree_changes:with_part_files"
"""Add the tensors in the files of layers and experts; see `compare/read_back.py`."""
RANK_FILES: Final = "streamshard.operations.repartition.rank_files_target:prepare"
"""Plans files of FSDP's ranks; see `operations/repartition/repartition.py`."""
_READERS: Final = (
    "streamshard.source.native_source:CERTAIN",
    "streamshard.source.dumps_source:READER",
    "streamshard.source.store_source:READER",
    "streamshard.source.distributed_source:MEGATRON",
    "streamshard.source.distributed_source:RANK_SHARDS",
    "streamshard.source.distributed_source:READER",
    "streamshard.source.weights_source:READER",
    "streamshard.source.fsdp_ranks_source:READER",
    "streamshard.source.universal_source:READER",
    "streamshard.source.native_source:READER",
)
"""Our readers of checkpoints, in the order in which they are asked."""
_LAST_READERS: Final = "streamshard.source.plug_ins:last_readers"
"""Yields the readers that take the place of the last one."""


def load(name: str) -> Any:  # noqa: ANN401
    """Return what one of the names above stands for."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def reader_of(kind: str) -> Any:  # noqa: ANN401
    """Return the reader of a kind of checkpoint, by its name in reports."""
    return next(reader for reader in readers() if reader.name == kind)


def own_readers() -> Iterator[Any]:
    """Yield our readers; see `source.base_reader.Reader`."""
    return map(load, _READERS)


def readers() -> Iterator[Any]:
    """Yield the readers, those of other packages after ours."""
    yield from map(load, _READERS[:-1])
    yield from load(_LAST_READERS)()

"""What is fuzzed: a reader is given bytes, and may return or raise one of its own errors.

Anything else is a finding: another exception, a side effect, an extent that leaves the file,
something read that is not the same when it is written and read again, or time and memory out of
proportion to the input's length.
"""

import codecs
import json
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.checks import packed_check
from streamshard.cli.text.health_text import health_table
from streamshard.compare.tensor_content import recorded
from streamshard.engine.journals.journal import Journal
from streamshard.engine.run.resident_memory import peak_bytes, resident_bytes, restart_peak
from streamshard.errors import SourceError, StreamshardError
from streamshard.formats import safetensors_file, strict_json
from streamshard.formats.checkpoint import Reading
from streamshard.formats.dcp import metadata_reader
from streamshard.formats.deepspeed import ds_config, given_config, names, resume_settings
from streamshard.formats.deepspeed.model_parallel import stated_cuts
from streamshard.formats.deepspeed.model_parallel.cuts_in_files import AffineMaps, Categories
from streamshard.formats.deepspeed.names import is_inside, latest_of
from streamshard.formats.facts_file import read_facts
from streamshard.formats.fsdp_ranks import fsdp_ranks_reader
from streamshard.formats.pickle import inert_dump, inert_load
from streamshard.formats.pickle.node_checks import require_shape
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import Storage, tensor_of
from streamshard.formats.torch.tree_comparison import compare_nodes
from streamshard.formats.universal import universal_reader
from streamshard.formats.zarr import (
    documents,
    rewritten,
    rewritten_documents,
    store_manifest,
    store_state,
)
from streamshard.formats.zarr.packed_place import PackedPath, PackedStores
from streamshard.io.lock import Holder
from streamshard.io.place import place_of
from streamshard.layout.boxes import NotTiledError, grid_of
from streamshard.layout.cutting import Segments
from streamshard.model import ITEMSIZE, ZeroLayout
from streamshard.operations.compact.compact_status import _read_tags
from streamshard.operations.compact.receipts import ArchivedTag
from streamshard.operations.compact.tag_health import HealthRecord
from streamshard.registry import RARE_KINDS, load
from streamshard.source.suspicion import suspicions
from streamshard.transfer.run_identity import is_header

FORBIDDEN: Final = ("exec", "import", "compile", "os.", "subprocess.", "socket.", "shutil.")
"""Audit events that no input may cause."""
READS: Final = ("open", "os.listdir", "os.scandir")
"""Audit events that an input may cause only where its own files lie."""


class SideEffectError(BaseException):
    """A reader did more than to read; not an `Exception`, so that nothing catches it."""


def unpickler(data: bytes, _: Path) -> None:
    """Read a pickle; what was read is written and read again, and must be the same."""
    node = inert_load.load(data, lambda identifier: identifier)
    again = inert_load.load(inert_dump.dump(node, lambda part: None), lambda identifier: identifier)
    # What was just not nested too deeply to be written may be so some frames further down.
    told = [str(found) for found in compare_nodes(node, again, "")]
    assert [found for found in told if "too deeply" not in found] == []


def torch_files(data: bytes, path: Path) -> None:
    """Read a torch file; its storages and tensors lie inside it."""
    found = torch_file.read(path, 0)
    for storage in found.storages.values():
        assert 0 <= storage.offset <= storage.offset + storage.nbytes <= len(data)
        torch_file.checksum(storage)
    if isinstance(found.root, dict):
        for node in found.root.values():
            tensor = tensor_of(node)
            if tensor is not None and tensor.numel:
                reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
                assert 0 <= tensor.start <= tensor.start + reach < tensor.storage.numel
    inert_dump.dump(found.root, lambda part: "storage" if isinstance(part, Storage) else None)


def manifests(data: bytes, path: Path) -> None:
    """Read a store's manifest, or its training state: either may be what the bytes are."""
    try:
        manifest = store_manifest.read(data)
    except StreamshardError:
        checkpoint, chunk_shapes = store_state.load(data)
        again, same_shapes = store_state.load(store_state.dump(checkpoint, chunk_shapes))
        assert again.tensors == checkpoint.tensors
        assert list(same_shapes) == list(chunk_shapes)
    else:
        serialized = store_manifest.serialize(
            manifest.records, manifest.codec, manifest.digests or {}, manifest.health
        )
        reread = store_manifest.read(serialized)
        assert reread.records.keys() == manifest.records.keys()
        assert reread.health == manifest.health
        recorded(path, manifest.health or {})
        health_table(manifest.health or {})


def safetensors(_: bytes, path: Path) -> None:
    """Read the header of a safetensors file; its tensors fill the file."""
    for one in safetensors_file.read(path):
        assert 0 <= one.offset <= one.offset + one.tensor.nbytes <= path.stat().st_size


def dcp_metadata(_: bytes, path: Path) -> None:
    """Read the index of a distributed checkpoint, and the grids of its tensors."""
    for tensor in metadata_reader.read_index(path.parent).tensors.values():
        if 0 not in tensor.shape:
            with suppress(NotTiledError):
                grid_of(tensor.shape, tensor.offsets, tensor.sizes)


def zarr_documents(data: bytes, _: Path) -> None:
    """Compare a document with ours, and open it as an array that another tool rewrote."""
    for ours in (documents.group_document({"a": 1}), documents.small_array_document(40)):
        rewritten_documents.is_serialized_again(data, ours)
    try:
        document = strict_json.parse(data)
        shape = require_shape(document["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError("no document of an array") from error
    rewritten._bounded(document.get("codecs"), [])
    assert require_shape(list(shape)) == shape


def journals(data: bytes, path: Path) -> None:
    """Read a journal whose lines all have a correct checksum."""
    lines = (b"\n%08x %s\n" % (zlib.crc32(line), line) for line in data.split(b"\n"))
    path.write_bytes(b"".join(lines))
    journal = Journal(path)
    assert journal.is_empty or journal.header != {}
    journal.find("a")
    list(journal.finished())
    if not is_header(journal.header):
        raise SourceError("of another version")


def receipts(_: bytes, path: Path) -> None:
    ArchivedTag(path.parent, "x").read_receipt()


def healths(_: bytes, path: Path) -> None:
    """Read a record of tags' health, and tell of it; a manifest takes all the health in it."""
    record = HealthRecord.of(path.parent)
    again = {"format": HealthRecord.FORMAT, **asdict(record)}
    assert HealthRecord._parsed(json.dumps(again).encode()) == record
    _read_tags(path.parent, path.parent)
    for one in record.tags:
        serialized = store_manifest.serialize({}, "zstd", {}, one.tensors)
        assert store_manifest.read(serialized).health == one.tensors
        health_table(one.tensors)


def packed_stores(data: bytes, path: Path) -> None:
    """Read a packed store's directory; its files lie in it, apart, where its listings lead."""
    place, root = PackedStores(place_of(path)), PackedPath(path)
    directory = place.directory_of(root)
    names = [*directory.names()]
    assert [directory.find(name) for name in names] == [*range(len(names))]
    assert all(map(is_inside, names))
    for row in range(len(names)):
        entry, stop = directory.entry_of(row)
        assert 0 <= entry.header <= entry.header + entry.nbytes <= stop <= len(data)
    pending, found = list[Path]([root]), list[str]()
    while pending:
        entries = [*place.entries(pending.pop())]
        assert len({one.name for one in entries}) == len(entries)
        for one in entries:
            if one.is_directory:
                pending.append(one.path)
            else:
                found.append(one.path.relative_to(root).as_posix())
    assert sorted(found) == sorted(names)
    assert [entry.name.decode() for entry, *_ in packed_check.audit(directory)] == names
    for name in names:
        with suppress(StreamshardError), place.open(root / name) as file:
            assert len(file.read_at(0, file.nbytes)) == file.nbytes


def locks(data: bytes, _: Path) -> None:
    holder = Holder.in_content(data)
    if holder is None:
        raise SourceError("it names no holder")
    str(holder)


def cuts(data: bytes, _: Path) -> None:
    """Read affine maps, or lists of patterns, and cut a parameter by them."""
    info = inert_load.load(data, lambda identifier: identifier)
    if not isinstance(info, dict):
        return
    if AffineMaps.are_in(info):
        AffineMaps(info).cut("w", {0: (4, 6), 1: (4, 6)}, 2)
    else:
        Categories(info).cut("w", {0: (4, 6), 1: (4, 6)}, 2)


def fsdp_ranks(_: bytes, path: Path) -> None:
    """Open the weights in files of four ranks, or one; what is read of them lies in the files."""
    _require_inside(fsdp_ranks_reader.read(path.parent))


def universal(_: bytes, path: Path) -> None:
    """Open a universal checkpoint; what is read of it lies in its files."""
    reading = universal_reader.read(path.parent, [], tag=path.parent.name)
    _require_inside(reading)
    suspicions(reading.checkpoint, {})


def _require_inside(reading: Reading) -> None:
    """Require that the pieces of all tensors lie in the files, and are as large as the tensors."""
    sizes = np.array([file.nbytes for file in reading.files])
    for number, tensor in enumerate(reading.checkpoint.tensors):
        numbers = (np.array([one]) for one in (number, 0, tensor.numel, 0))
        copies = reading.cutting.locate(Segments(*numbers), target_itemsize=ITEMSIZE[tensor.dtype])
        assert (copies.source >= 0).all()
        assert (copies.source + copies.nbytes <= sizes[copies.file]).all()
        assert copies.nbytes.sum() == tensor.nbytes


def rules(_: bytes, path: Path) -> None:
    found = stated_cuts.read_rules(read_facts({"source": {"cut_rules": path}}).cut_rules)
    assert found is not None
    found.cut("layers.1.w", {0: (4, 6), 1: (4, 6)}, 2)


def latest(_: bytes, path: Path) -> None:
    tag = latest_of(path.parent)
    assert tag is not None
    if not names.is_tag(tag):
        raise SourceError(tag)
    assert (path.parent / tag).resolve().is_relative_to(path.parent.resolve())


def configs(_: bytes, path: Path) -> None:
    config = given_config.read_file(path)
    for read in (
        partial(ds_config.sequence_mesh, version=None),
        ds_config.module_dtype,
        ds_config.gradient_clipping,
        ds_config.batch_sizes,
        ds_config.features,
        ds_config.zero_stage,
        lambda config: list(resume_settings.notes(config, ZeroLayout(2, 1), "bfloat16")),
    ):
        with suppress(StreamshardError):
            read(config)


TARGETS: Final[Mapping[str, Callable[[bytes, Path], None]]] = {
    "configs": configs,
    "cuts": cuts,
    "dcp-metadata": dcp_metadata,
    "fsdp-ranks": fsdp_ranks,
    "healths": healths,
    "journals": journals,
    "latest": latest,
    "locks": locks,
    "manifests": manifests,
    "packed-stores": packed_stores,
    "receipts": receipts,
    "rules": rules,
    "safetensors": safetensors,
    "zarr-documents": zarr_documents,
    "torch-files": torch_files,
    "universal": universal,
    "unpickler": unpickler,
}


FILES: Final[Mapping[str, Sequence[str]]] = {
    "dcp-metadata": [".metadata"],
    "fsdp-ranks": [
        *(f"model_world_size_4_rank_{rank}.pt" for rank in range(4)),
        "model_world_size_1_rank_0.pt",
    ],
    "healths": [".streamshard.health.json"],
    "latest": ["latest"],
    "packed-stores": ["x.zarr.zip"],
    "receipts": ["x.receipt.json"],
    "universal": [
        "mp_rank_00_model_states.pt",
        *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)),
        "zero/optimizer_state.pt",
        *(f"zero/w/{state}.pt" for state in ("fp32", "exp_avg", "exp_avg_sq", "step")),
    ],
}
"""Names of the files that an input is, where a reader looks for certain ones."""
BETWEEN: Final = b"\n-- next --\n"
"""What is between the files that an input is; of an empty one there is no file."""
FREE_SECONDS: Final = 1.0
FREE_BYTES: Final = 50 << 20
SECONDS_PER_BYTE: Final = 1e-6
BYTES_PER_BYTE: Final = 80


class Harness:
    """Tries inputs, and watches what the process does meanwhile."""

    def __init__(self, name: str, directory: Path) -> None:
        self._target = TARGETS[name]
        own = directory / "own"
        self._paths = [own / one for one in FILES.get(name, ["input.pt"])]
        self._readable = {str(one) for path in self._paths for one in (path, path.parent)}
        """The files that may be opened, and the directories that may be listed."""
        self._is_watching = False
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        for encoding in ("raw_unicode_escape", "utf-8-sig"):
            codecs.lookup(encoding)  # imported on first use
        load(RARE_KINDS)  # the same
        # Such a hook can never be taken away again.
        sys.addaudithook(self._watch)

    def _watch(self, event: str, args: tuple[object, ...]) -> None:
        if not self._is_watching:
            return
        # What has a number was opened before, and looked at then.
        if event in READS and (type(args[0]) is int or str(args[0]) in self._readable):
            return
        if event.startswith((*READS, *FORBIDDEN)):
            self._is_watching = False
            raise SideEffectError(f"{event} {args}")

    def _write(self, data: bytes) -> None:
        """Write the files that an input is."""
        parts = data.split(BETWEEN, len(self._paths) - 1) if len(self._paths) > 1 else [data]
        for path, part in zip_longest(self._paths, parts):
            path.unlink(missing_ok=True)
            if part or len(self._paths) == 1:
                path.write_bytes(part)

    def try_one(self, data: bytes) -> bool:
        """Give bytes to the reader; tell whether it took them.

        Raises
        ------
        BaseException
            Whatever is a finding.
        """
        self._write(data)
        restart_peak()
        before, start = resident_bytes(), time.process_time()
        self._is_watching = is_taken = True
        try:
            self._target(data, self._paths[0])
        except StreamshardError:
            is_taken = False
        finally:
            self._is_watching = False
        seconds, taken = time.process_time() - start, peak_bytes() - before
        assert seconds <= FREE_SECONDS + SECONDS_PER_BYTE * len(data), f"{seconds:.1f} s"
        assert taken <= FREE_BYTES + BYTES_PER_BYTE * len(data), f"{taken:,} bytes"
        return is_taken

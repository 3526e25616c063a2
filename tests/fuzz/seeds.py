"""Where fuzzing begins: small files as torch and streamshard write them."""

import io
import json
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.serialization import config

import streamshard
from streamshard.formats.torch.zip_layout import directory_of
from streamshard.formats.zarr.packed_directory import PackedEntry
from streamshard.formats.zarr.store_manifest import read as read_manifest
from streamshard.io.lock import Holder
from streamshard.operations.compact.tag_health import HealthRecord, TagHealth
from tests.checkpoints.test_fsdp_ranks import RANKS, fsdp1, in_rank
from tests.documents import ROOT
from tests.fabricated import client_state, load, write
from tests.fabricated_dcp import adamw
from tests.fuzz.targets import BETWEEN, FILES, TARGETS
from tests.job import TAG, Job, ds_config, stand_ins
from tests.measured import plan_measured

SMALL = Job(
    world_size=2,
    groups=((("w", (2, 2)),),),
    frozen=(("f", (1,)),),
    tied={},
    client_state=client_state(),
)


def seeds(directory: Path) -> dict[str, list[bytes]]:
    """Make what every target begins with, in an empty directory."""
    run = write(SMALL, directory / "run")
    streamshard.convert(run, directory / "run.zarr")
    plan_measured(run, directory / "measured.zarr").run()
    # Behind the content are four bytes of checksum.
    held = [
        (directory / store / "meta" / name / "c/0").read_bytes()[:-4]
        for store, name in (
            ("run.zarr", "manifest"),
            ("run.zarr", "state"),
            ("measured.zarr", "manifest"),
        )
    ]
    saved = [path.read_bytes() for path in sorted((run / TAG).iterdir())]
    objects = _objects()
    with stand_ins():
        zips = [*map(_saved, objects), *map(_without_checksums, objects)]
        pickles = [pickle.dumps(one, protocol) for one in objects for protocol in range(6)]
    adamw({"w": (4, 3)}).write(directory / "dcp")
    streamshard.export(run, directory / "exported")
    ranks = {rank: {"shard_shape": [4, 6], "pieces": [_piece(24 * rank)]} for rank in (0, 1)}
    maps = {"version": 1, "params": {"^w$": {"logical_shape": [8, 6], "ranks": ranks}}}
    subs = [{"patterns": ["^w$"], "shape": [[4, 4], 6], "partition_dim": 0}]
    listed = {"tp_replicated_parameter_patterns": ["a.*b+c", "^w$"]}
    plan = streamshard.plan_repartition(run, directory / "out", world_size=3)
    lines = [json.dumps(line).encode() for line in (plan.identity.header, ["a", 0, 1, 2], "whole")]
    (receipt,) = (ROOT / "tests" / "compact" / "golden").glob("*.receipt.json")
    found = {
        "configs": [
            json.dumps(one).encode()
            for one in (ds_config(SMALL), {}, {"bf16": {"enabled": "auto"}})
        ],
        "cuts": [
            pickle.dumps(one, 2)
            for one in ({"affine_map": maps}, listed, {"parameter_with_sub_params": subs})
        ],
        "dcp-metadata": [(directory / "dcp/.metadata").read_bytes()],
        "fsdp-ranks": _fsdp_ranks(directory / "ranks"),
        "healths": _healths(held[2]),
        "journals": [b"\n".join(lines), *lines],
        "latest": [b"global_step7", b"epoch/1\n", b"../x"],
        "locks": [json.dumps(asdict(Holder.this_process())).encode()],
        "receipts": [receipt.read_bytes()],
        "packed-stores": _packed_stores(),
        "rules": [b"# ours\n.*w: split 1\n", b".*w: replicated", b"layers.\\d+.w: sub 0 [4, 4]"],
        "safetensors": [path.read_bytes() for path in (directory / "exported").glob("*.safet*")],
        "zarr-documents": [
            path.read_bytes() for path in (directory / "run.zarr").rglob("zarr.json")
        ],
        "manifests": held,
        "torch-files": [*saved, *zips],
        "universal": [one for stage in (2, 3) for one in _universal(stage, directory)],
        "unpickler": [*pickles, held[1], *_pickles_in(saved)],
    }
    assert found.keys() == TARGETS.keys()
    return found


def _piece(at: int) -> dict[str, Any]:
    return {"shape": [4, 6], "source": [at, [6, 1]], "dest": [0, [6, 1]]}


def _fsdp_ranks(directory: Path) -> list[bytes]:
    """Save small models as ranks do, in the old form of torch's files: nothing has a checksum."""
    directory.mkdir()
    for rank in range(RANKS):
        in_rank(rank, partial(_save_ranks, directory, rank))
    found = []
    for form in ("fsdp1", "rows", "boxes", "strided", "replicas"):
        parts = [(directory / f"{form}-{rank}").read_bytes() for rank in range(RANKS)]
        found.append(BETWEEN.join(parts))
    return [*found, BETWEEN * RANKS + (directory / "alone-0").read_bytes()]


def _save_ranks(directory: Path, rank: int) -> None:
    model = torch.nn.ParameterDict({"w": torch.arange(15.0).reshape(5, 3), "b": torch.ones(2)})
    rows, boxes = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, RANKS // 2))
    cuts: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "rows": (rows, [Shard(0)]),
        "boxes": (boxes, [Shard(1), Shard(0)]),
        "strided": (boxes, [_StridedShard(0, split_factor=2), Shard(0)]),
        "replicas": (boxes, [Replicate(), Shard(0)]),
    }
    if rank == 0:  # no other rank disagrees with what is changed in it
        cuts["alone"] = DeviceMesh("cpu", [[0]]), [_StridedShard(0, split_factor=1), Shard(1)]
    saved = {
        form: {"w": distribute_tensor(model["w"], *cut, src_data_rank=None), "b": model["b"]}
        for form, cut in cuts.items()
    }
    for form, state in {"fsdp1": fsdp1(model), **saved}.items():
        (directory / f"{form}-{rank}").write_bytes(_without_checksums(state))


def _universal(stage: int, directory: Path) -> Iterator[bytes]:
    """Export a small run; yield its files, and the same without checksums."""
    run = write(replace(SMALL, stage=stage), directory / f"run-{stage}")
    out = directory / f"universal-{stage}"
    streamshard.export(run, out, format="universal")
    (made,) = (path.parent for path in out.rglob("zero"))
    paths = [made / name for name in FILES["universal"]]
    assert {path for path in made.rglob("*") if path.is_file()} <= {*paths}
    yield BETWEEN.join(path.read_bytes() if path.exists() else b"" for path in paths)
    again = [load(path) if path.exists() else None for path in paths]
    with stand_ins():
        yield BETWEEN.join(b"" if one is None else _without_checksums(one) for one in again)


def _healths(manifest: bytes) -> list[bytes]:
    measured = read_manifest(manifest).health
    assert measured
    saved = "2026-11-20T22:00:00+00:00"
    good = TagHealth("global_step7", "a" * 64, saved, "", measured)
    others = TagHealth("global_step8", "b" * 64, saved, "3 NaN"), TagHealth("x/y", "c", "", "")
    return [
        json.dumps({"format": 1, **asdict(HealthRecord(tags))}).encode()
        for tags in ((), (good,), (good, *others))
    ]


def _packed_stores() -> list[bytes]:
    """Pack a few files as streamshard does, and as another tool does, with directories."""
    files = {"a/c/0": b"chunk", "a/zarr.json": b"{}", "empty": b"", "zarr.json": b"{}"}
    ours, central = b"", list[bytes]()
    for path, data in files.items():
        entry, crc32 = PackedEntry(path, len(ours), len(data)), zlib.crc32(data)
        ours += entry.header() + data + entry.descriptor(crc32)
        central.append(entry.central(crc32))
    ours += directory_of(central, len(ours))
    found = [ours]
    for names in (["a/", "a/c/", *files], files, []):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as made:
            for name in names:
                made.writestr(name, files.get(name, b""))
        found.append(stream.getvalue())
    return found


def _objects() -> list[Any]:
    shared = [1.5, "text"]
    ring: list[Any] = [shared, shared]
    ring.append(ring)
    numbers = [0, -1, 1 << 40, 1 << 3000, float("nan"), -0.0, True, None]
    view = torch.arange(6.0).reshape(2, 3).t()
    return [
        ring,
        numbers,
        OrderedDict(a=(1, 2, 3), b={"x": b"bytes", 3: frozenset({1, 2})}),
        {"w": view, "same": view[:1], "half": torch.ones(3, dtype=torch.bfloat16)},
        torch.Size([2, 3]),
        client_state(),
    ]


def _saved(one: object) -> bytes:
    stream = io.BytesIO()
    torch.save(one, stream)
    return stream.getvalue()


def _without_checksums(one: object) -> bytes:
    """Save so that a changed pickle is read, not refused for its checksum."""
    with config.patch({"save.compute_crc32": False}):  # type: ignore[attr-defined]
        return _saved(one)


def _pickles_in(saved: list[bytes]) -> list[bytes]:
    """Take the pickles out of torch's files; they begin each record of that name."""
    found = []
    for data in saved:
        reader = torch._C.PyTorchFileReader(io.BytesIO(data))
        found.append(bytes(reader.get_record("data.pkl")))
    return found

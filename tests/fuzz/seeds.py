"""Where fuzzing begins: small files as torch and streamshard write them."""

import io
import json
import pickle
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import streamshard
from streamshard.cli.main import main
from streamshard.io.lock import Holder
from tests.documents import ROOT
from tests.fabricated import client_state, write
from tests.fabricated_dcp import adamw
from tests.fuzz.targets import TARGETS
from tests.job import TAG, Job, ds_config, stand_ins

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
    meta = directory / "run.zarr" / "meta"
    # Behind the content are four bytes of checksum.
    held = [(meta / name / "c/0").read_bytes()[:-4] for name in ("manifest", "state")]
    saved = [path.read_bytes() for path in sorted((run / TAG).iterdir())]
    objects = _objects()
    with stand_ins():
        zips, legacy = ([_saved(one, new) for one in objects] for new in (True, False))
        pickles = [pickle.dumps(one, protocol) for one in objects for protocol in range(6)]
    adamw({"w": (4, 3)}).write(directory / "dcp")
    streamshard.export(run, directory / "exported")
    plan = directory / "plan.json"
    arguments = ["repartition", str(run), str(directory / "out"), "--world-size", "3"]
    assert main([*arguments, "--dry-run", "--quiet", "--plan-out", str(plan)]) == 0
    ranks = {rank: {"shard_shape": [4, 6], "pieces": [_piece(24 * rank)]} for rank in (0, 1)}
    maps = {"version": 1, "params": {"^w$": {"logical_shape": [8, 6], "ranks": ranks}}}
    subs = [{"patterns": ["^w$"], "shape": [[4, 4], 6], "partition_dim": 0}]
    listed = {"tp_replicated_parameter_patterns": ["a.*b+c", "^w$"]}
    header = json.loads(plan.read_bytes())["purpose"]
    lines = [json.dumps(line).encode() for line in (header, ["a", 0, 1, 2], "whole")]
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
        "journals": [b"\n".join(lines), *lines],
        "latest": [b"global_step7", b"epoch/1\n", b"../x"],
        "locks": [json.dumps(asdict(Holder.this_process())).encode()],
        "receipts": [receipt.read_bytes()],
        "plans": [plan.read_bytes()],
        "rules": [b"# ours\n.*w: split 1\n", b".*w: replicated", b"layers.\\d+.w: sub 0 [4, 4]"],
        "safetensors": [path.read_bytes() for path in (directory / "exported").glob("*.safet*")],
        "zarr-documents": [
            path.read_bytes() for path in (directory / "run.zarr").rglob("zarr.json")
        ],
        "manifests": held,
        "torch-files": [*saved, *zips, *legacy],
        "unpickler": [*pickles, held[1], *_pickles_in(saved)],
    }
    assert found.keys() == TARGETS.keys()
    return found


def _piece(at: int) -> dict[str, Any]:
    return {"shape": [4, 6], "source": [at, [6, 1]], "dest": [0, [6, 1]]}


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


def _saved(one: object, new: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(one, stream, _use_new_zipfile_serialization=new)
    return stream.getvalue()


def _pickles_in(saved: list[bytes]) -> list[bytes]:
    """Take the pickles out of torch's files; they begin each record of that name."""
    found = []
    for data in saved:
        reader = torch._C.PyTorchFileReader(io.BytesIO(data))
        found.append(bytes(reader.get_record("data.pkl")))
    return found

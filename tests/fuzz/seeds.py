"""Where fuzzing begins: small files as torch and streamshard write them."""

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

import streamshard
from tests.fabricated import client_state, write
from tests.fuzz.targets import TARGETS
from tests.job import TAG, Job, stand_ins

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
    found = {
        "manifests": held,
        "torch-files": [*saved, *zips, *legacy],
        "unpickler": [*pickles, held[1], *_pickles_in(saved)],
    }
    assert found.keys() == TARGETS.keys()
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

"""safetensors files, byte for byte against the library's own, and the JSON in them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.safetensors_file import Described, lay_out, read
from streamshard.formats.strict_json import parse

DTYPES = [
    "bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "int16", "uint16", "float16",
    "bfloat16", "int32", "uint32", "float32", "float64", "int64", "uint64", "complex64",
]  # fmt: skip


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    described = [
        Described(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    layout = lay_out(described)
    data = bytearray(layout.nbytes)
    data[: len(layout.header)] = layout.header
    for one in layout.tensors:
        raw = tensors[one.tensor.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        data[one.offset : one.offset + len(raw)] = raw
    return bytes(data)


CASES: dict[str, dict[str, torch.Tensor]] = {
    "every dtype": {dtype: torch.arange(3).to(getattr(torch, dtype)) for dtype in reversed(DTYPES)},
    "odd names": {
        name: torch.full((2,), float(number))
        for number, name in enumerate(("b", 'q"\\', "\x01\x7f\n", "é", "日", "\U0001f600", "B"))
    },
    "odd shapes": {"none": torch.ones(()), "empty": torch.ones(0, 4), "two": torch.ones(3, 2)},
    "nothing": {},
}


@pytest.mark.parametrize("name", CASES)
def test_files_are_the_library_s_both_ways(name: str, tmp_path: Path) -> None:
    tensors, path = CASES[name], tmp_path / "model.safetensors"
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    assert written(tensors) == data
    path.write_bytes(data)
    found = {one.tensor.name: one for one in read(path)}
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        one = found[key]
        assert (f"torch.{one.tensor.dtype}", one.tensor.shape) == (str(tensor.dtype), tensor.shape)
        raw = data[one.offset : one.offset + one.tensor.nbytes]
        assert raw == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_what_the_format_cannot_say_is_refused() -> None:
    for name, dtype in (("w", "complex128"), ("__metadata__", "float32"), ("\ud800", "float32")):
        with pytest.raises(UnsupportedError, match="exclude="):
            lay_out([Described(name, dtype, (1,))])


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:  # noqa: ANN401
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: dict[str, Any] = {
    "an unknown dtype": {"a": entry("F31")},
    "no shape": {"a": entry(shape=None)},
    "a negative size": {"a": entry(shape=(-1,), offsets=(0, -4))},
    "too few bytes": {"a": entry(offsets=(0, 3))},
    "a gap": {"a": entry(offsets=(4, 8))},
    "an overlap": {"a": entry(), "b": entry()},
    "bytes that nothing tells of": {},
    "a list": [],
    "no offsets": {"a": {"dtype": "F32", "shape": [1]}},
    "a number that is none": {"a": entry(shape=(True,))},
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_is_not_sound_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    serialized = json.dumps(HEADERS[what]).encode()
    path.write_bytes(struct.pack("<Q", len(serialized)) + serialized + bytes(4))
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        read(path)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2), "b": torch.zeros(1)}, path)
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(CorruptFileError):
            read(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CorruptFileError):
        read(path)


# JSON that readers may understand in several ways ------------------------------------------------


DOCUMENT = {"a": [1, 2.5, None, True, "\u00e9"], "b": {"a": {}}}


def test_what_is_json_is_read() -> None:
    assert parse(json.dumps(DOCUMENT).encode()) == DOCUMENT
    assert parse(json.dumps(DOCUMENT, ensure_ascii=False).encode()) == DOCUMENT


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "a key twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[" * 100_000, "nested too deeply"),
        (json.dumps(DOCUMENT).encode("utf-32"), "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": 1', "delimiter"),
        (b"", "Expecting value"),
    ],
)
def test_the_rest_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(data)

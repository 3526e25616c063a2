"""Reading tensors from Python: the values, the bytes that are read for them, and what is refused.

Values are held against the whole tensors of the job, and indices against NumPy's own on these.
"""

import copy
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import streamshard
from streamshard import LazyTensor, OpenCheckpoint
from streamshard.errors import CorruptFileError, IntegrityError, UsageError
from streamshard.layout.selection import select
from tests.documents import TEXTS, blocks
from tests.fabricated import write
from tests.held import open_files
from tests.job import EXPERTS, STATES, TAG, Job, expected, values
from tests.reading.conftest import JOB, KINDS, Made, flip


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_that_of_the_job(made: Made, kind: str) -> None:
    stage = int(kind[-1]) if kind.startswith("native") else 2
    wanted = expected(replace(JOB, stage=stage))
    is_dumps = kind.startswith("dumps")
    with streamshard.open(made(kind)) as ckpt:
        found: dict[tuple[str, str], LazyTensor] = {}
        for name, parameter in ckpt.items():
            assert name in ckpt
            assert parameter.name == name
            if not parameter.tied_to:
                found |= {(state, name): tensor for state, tensor in parameter.tensors.items()}
        if is_dumps:
            wanted = {key: tensor for key, tensor in wanted.items() if key[0] != "module"}
        assert found.keys() == wanted.keys()
        for (state, name), tensor in found.items():
            whole = wanted[state, name]
            shape = (whole.numel(),) if is_dumps else tuple(whole.shape)
            assert (tensor.shape, tensor.nbytes) == (shape, whole.nbytes)
            assert str(whole.dtype) == f"torch.{tensor.dtype}"
            read = tensor.torch()
            assert read.dtype == whole.dtype
            assert torch.equal(read, whole.reshape(shape)), (state, name)
            # Exact also where NumPy has no such dtype.
            upcast = whole.float() if whole.dtype == torch.bfloat16 else whole
            assert np.array_equal(np.asarray(tensor), upcast.reshape(shape).numpy())
            assert (
                tensor.bits().tobytes()
                == whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )


def test_what_there_is_and_in_which_order(made: Made) -> None:
    with streamshard.open(made("native-3")) as ckpt:
        assert list(ckpt) == [
            "w", "cube", "v", "one", "f", "rotary.inv_freq", "norm.count", "mask", "empty", "t"
        ]  # fmt: skip
        assert len(ckpt) == 10
        assert (ckpt.tag, ckpt.zero_stage, ckpt.world_size, ckpt.global_steps) == (TAG, 3, 3, 7)
        assert ckpt.groups[1].states["step"] == 7.0
        assert [p.kind for p in ckpt.values()] == ["trained"] * 4 + ["frozen"] + ["buffer"] * 4 + [
            "trained"
        ]
        assert list(ckpt["w"].states) == ["fp32", *STATES]
        assert (ckpt["t"].tied_to, ckpt["w"].tied_to, ckpt["t"].fp32.name) == ("w", None, "w")
        assert np.array_equal(ckpt["t"].fp32[...], ckpt["w"].fp32[...])
        assert repr(ckpt["f"]) == "<Parameter 'f' [3], frozen: module bfloat16>"
        with pytest.raises(AttributeError, match=r"w \(trained\) has no 'module'.*: fp32, exp_avg"):
            _ = ckpt["w"].module
        with pytest.raises(KeyError, match="no parameter or buffer 'cub'; near it: cube"):
            _ = ckpt["cub"]
        assert "cub" not in ckpt
        assert {"fp32", "exp_avg", "states", "name"} <= set(dir(ckpt["w"]))
        assert ckpt._ipython_key_completions_() == list(ckpt)
        assert copy.copy(ckpt["f"]).module.shape == (3,)
    assert repr(ckpt).endswith("10 names, closed>")


def test_parts_of_a_model_and_experts_are_named_as_in_a_store(tmp_path: Path) -> None:
    job = Job(world_size=4, parts=2, experts=EXPERTS, expert_parallel=2)
    run, store = write(job, tmp_path / "run"), tmp_path / "run.zarr"
    streamshard.convert(run, store)
    name, shape = EXPERTS[0]
    with streamshard.open(run) as ckpt:
        for part in range(2):
            prefix, seed = f"mp_rank_{part:02d}/", f"{part}/exp_avg" if part else "exp_avg"
            assert ckpt[f"{prefix}head.weight"].tied_to == f"{prefix}embed.weight"
            for expert in (0, 2):
                known = name.replace("experts.0.", f"experts.{expert}.")
                read = ckpt[prefix + known].exp_avg.torch()
                assert torch.equal(read, values(seed, known, shape))
                array = zarr.open_array(store, path=f"{prefix}state/exp_avg/{known}", mode="r")
                assert np.array_equal(np.asarray(array[:]), read)


# Indices ------------------------------------------------------------------------------------------


def indices(numel: int) -> st.SearchStrategy[int | slice]:
    """Make what may stand for one dimension; most of it is in range."""
    bounds = st.none() | st.integers(-numel - 2, numel + 2)
    steps = st.none() | st.integers(-numel - 1, numel + 1).filter(bool)
    return st.integers(-numel - 1, numel) | st.builds(slice, bounds, bounds, steps)


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Make an index of some of the dimensions, perhaps with an ellipsis, perhaps no tuple."""
    count = draw(st.integers(0, len(shape)))
    at = draw(st.none() | st.integers(0, count))
    if at is None:
        parts: list[Any] = [draw(indices(n)) for n in shape[:count]]
    else:
        before = [draw(indices(n)) for n in shape[:at]]
        after = [draw(indices(n)) for n in shape[len(shape) - (count - at) :]]
        parts = [*before, ..., *after]
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)


@pytest.fixture(scope="module")
def opened(made: Made) -> Iterator[dict[str, OpenCheckpoint]]:
    with ExitStack() as stack:
        kinds = ("native-2", "native-3", "chunks-none", "chunks-zstd")
        yield {kind: stack.enter_context(streamshard.open(made(kind))) for kind in kinds}


@settings(max_examples=100)
@given(data=st.data())
def test_an_index_is_numpys(opened: dict[str, OpenCheckpoint], data: st.DataObject) -> None:
    ckpt = opened[data.draw(st.sampled_from(sorted(opened)))]
    name = data.draw(st.sampled_from(["w", "cube", "v", "norm.count", "empty"]))
    tensor = ckpt[name].module if name in ("norm.count", "empty") else ckpt[name].exp_avg
    whole = tensor[...]
    key = data.draw(keys(tensor.shape))
    try:
        wanted = whole[key]
    except IndexError:
        with pytest.raises(IndexError):
            _ = tensor[key]
        return
    found = tensor[key]
    assert type(found) is type(wanted)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()
    assert torch.equal(tensor.torch(key), torch.from_numpy(np.array(wanted)))


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        (np.s_[50], IndexError, "index 50 is out of range for dimension 0 of 50"),
        (np.s_[0, 0, 0], IndexError, r"3 indices for 2 dimensions, shape \(50, 8\)"),
        (np.s_[..., ...], IndexError, "one ellipsis"),
        (np.s_[None], TypeError, "not NoneType"),
        ([1, 2], TypeError, "not list"),
        (True, TypeError, "not bool"),
        (np.zeros(50, dtype=bool), TypeError, "not ndarray"),
        (1.0, TypeError, "not float"),
        (np.s_[::0], ValueError, "step"),
    ],
)
def test_what_is_no_index_is_refused(key: Any, error: type[Exception], text: str) -> None:  # noqa: ANN401
    with pytest.raises(error, match=text):
        select(key, (50, 8))


# What is read -------------------------------------------------------------------------------------


COUNTS = Path("/proc/self/io")


def bytes_read(work: Callable[[], object]) -> int:
    """Count what the kernel hands to this process while something is done."""

    def count() -> int:
        return int(re.findall(r"rchar: (\d+)", COUNTS.read_text())[0])

    work()  # opens the files, and imports what is imported late
    before = count()
    nothing = count() - before
    before = count()
    work()
    return count() - before - nothing


@pytest.mark.skipif(not COUNTS.exists(), reason="the kernel counts no reads")
def test_only_the_bytes_that_are_asked_for_are_read(tmp_path: Path) -> None:
    job = Job(world_size=3, groups=((("w", (3000, 256)),),), frozen=(), tied={})
    for stage in (2, 3):
        with streamshard.open(write(replace(job, stage=stage), tmp_path / f"{stage}")) as ckpt:
            tensor = ckpt["w"].fp32
            for key, count in (
                (np.s_[1000:2000], 1000 * 256),
                (np.s_[7, 9:20], 11),
                (np.s_[:2000:100, 3:5], 20 * 2),  # rows that are 100 KiB apart
                (np.s_[:100:2, 3], 99 * 256),  # and 2 KiB
            ):
                assert bytes_read(partial(tensor.numpy, key)) == 4 * count
            assert bytes_read(partial(find_remains, ckpt)) == 0
    for codec in ("none", "zstd"):
        store = tmp_path / f"{codec}.zarr"
        streamshard.convert(tmp_path / "2", store, codec=codec, chunk_size=1 << 18)
        with streamshard.open(store) as ckpt:
            tensor = ckpt["w"].fp32
            # One chunk of twelve; of those that are not compressed, one block that has a checksum.
            assert 0 < bytes_read(partial(two_places, tensor)) <= 2 * (1 << 18) + 8


def two_places(tensor: LazyTensor) -> None:
    """Read from two chunks."""
    assert tensor[2999].shape == tensor[300:310][0].shape


def find_remains(ckpt: OpenCheckpoint) -> None:
    """Ask for all that needs no tensor data."""
    for parameter in ckpt.values():
        assert repr(parameter)
    assert repr(ckpt)
    assert ckpt["w"].fp32.nbytes == 3000 * 256 * 4


def test_a_notebook_of_many_ranks_keeps_few_files_open(tmp_path: Path) -> None:
    run = write(replace(JOB, world_size=80, stage=3), tmp_path / "run")
    with streamshard.open(run) as ckpt:
        before = open_files()
        ckpt["w"].fp32[...]
        assert len(open_files()) - len(before) <= 64
        ckpt.close()
        assert open_files() == before
    forgotten = streamshard.open(run)
    forgotten["w"].fp32[...]
    assert len(open_files()) > len(before)
    del forgotten
    gc.collect()
    assert open_files() == before


def test_threads_read_the_same(made: Made) -> None:
    with streamshard.open(made("chunks-zstd")) as ckpt:
        whole = ckpt["w"].fp32[...]
        right: list[bool] = []

        def work(seed: int) -> None:
            starts = np.random.default_rng(seed).integers(0, 50, 200)
            right.extend(np.array_equal(ckpt["w"].fp32[s:], whole[s:]) for s in starts)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        assert right == [True] * 800


# What goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["native-2", "chunks-zstd"])
def test_a_closed_checkpoint_says_so(made: Made, kind: str) -> None:
    with streamshard.open(made(kind)) as ckpt:
        tensor = ckpt["w"].fp32
        _ = tensor[0]
    for read in (lambda: tensor[0], tensor.torch, lambda: np.asarray(ckpt["v"].exp_avg)):
        with pytest.raises(UsageError, match=r"has been closed; read inside the 'with' block"):
            read()
    ckpt.close()


def test_a_source_that_changes_is_refused(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    with streamshard.open(run) as ckpt:
        for path in (run / TAG).iterdir():
            os.utime(path, ns=(0, 0))
        with pytest.raises(CorruptFileError, match="changed while it was being read"):
            _ = ckpt["w"].fp32[0]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_damaged_store_is_noticed(tmp_path: Path, codec: str) -> None:
    write(JOB, tmp_path / "run")
    store = tmp_path / "run.zarr"
    streamshard.convert(tmp_path / "run", store, codec=codec, chunk_size=320)
    with streamshard.open(store) as ckpt:
        wanted = ckpt["w"].fp32[10:20]
        flip(store / "state/fp32/w/c/0/0")
    with streamshard.open(store) as ckpt:
        with pytest.raises(IntegrityError, match="damaged"):
            _ = ckpt["w"].fp32[0, 0]
        assert np.array_equal(ckpt["w"].fp32[10:20], wanted)


def test_what_numpy_asks_for(made: Made) -> None:
    with streamshard.open(made("native-2")) as ckpt:
        tensor = ckpt["w"].module
        assert (tensor.dtype, str(tensor[0].dtype), str(tensor.bits().dtype)) == (
            "bfloat16", "float32", "uint16"
        )  # fmt: skip
        assert np.array(tensor, dtype=np.float64).dtype == np.float64
        assert len(tensor) == 50
        with pytest.raises(ValueError, match="leave copy=False out"):
            np.asarray(tensor, copy=False)
        with pytest.raises(TypeError, match="without dimensions"):
            len(ckpt["norm.count"].module)
        assert [row.tobytes() for row in tensor] == [row.tobytes() for row in tensor[...]]


def test_without_torch_the_message_says_what_works(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with (
        streamshard.open(made("native-2")) as ckpt,
        pytest.raises(ImportError, match=r"pip install torch, or read with \.numpy\(\)"),
    ):
        ckpt["w"].fp32.torch()


def test_python_in_the_readme_and_the_pages_works_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(stage=2, groups=((("layers.0.weight", (3000, 2)),),), tied={})
    write(job, tmp_path / "runs" / "7b")
    for store in ("7b.zarr", "7b.zarr.zip"):
        streamshard.convert(tmp_path / "runs" / "7b", tmp_path / store)
    monkeypatch.chdir(tmp_path)
    shown = [block for text in TEXTS.values() for block in blocks(text, "python")]
    assert any("streamshard.open(" in block for block in shown)
    for block in shown:
        # `tests/oracle` has those that need an engine, `tests/cloud` those that need a bucket, and
        # `tests/cluster` those that need a cluster.
        if not any(what in block for what in ("streamshard.deepspeed", "bucket", "tcp://")):
            exec(block, {})


# NumPy, data frames, notebooks --------------------------------------------------------------------

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "plus": lambda x, y: x + y,
    "array first": lambda x, y: np.asarray(y) - x,
    "array behind": lambda x, y: x - np.asarray(y),
    "scalars": lambda x, y: 2 * x**2 - 1,
    "negative, absolute": lambda x, y: abs(-x),
    "compared": lambda x, y: (x > y) & (x != 0) | (x == y),
    "product": lambda x, y: np.asarray(x).T @ y,
    "matrices": lambda x, y: x[:3] @ np.transpose(y),
    "ufunc": lambda x, y: np.hypot(x, y),
    "reduced": lambda x, y: np.add.reduce(x, axis=1),
    "sum, mean": lambda x, y: np.sum(x) + np.mean(y),
    "norm": lambda x, y: np.linalg.norm(x) - np.linalg.norm(y),
    "close": lambda x, y: np.allclose(x, y),
    "together": lambda x, y: np.concatenate([x, y]),
    "stacked": lambda x, y: np.array([x, y], dtype=np.float64),
    "sorted": lambda x, y: np.sort(x, axis=None),
    "cast": lambda x, y: np.asarray(x, dtype=np.float16),
    "shape": lambda x, y: np.array([*np.shape(x), np.size(x), np.ndim(x), len(x), x.size]),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_numpy_takes_a_tensor_for_the_array(made: Made, name: str) -> None:
    with streamshard.open(made("native-3")) as ckpt:
        x, y = ckpt["w"].fp32, ckpt["w"].exp_avg
        found = ARITHMETIC[name](x, y)
        wanted = ARITHMETIC[name](x[...], y[...])
        assert type(found) is type(wanted)
        assert getattr(found, "dtype", None) == getattr(wanted, "dtype", None)
        assert np.array_equal(found, wanted)


def test_arithmetic_of_bfloat16_is_exact_and_nothing_is_written(
    made: Made,
) -> None:
    with streamshard.open(made("native-2")) as ckpt:
        weight = ckpt["w"].module
        doubled = weight * 2
        assert np.array_equal(doubled, (ckpt["w"].module.torch() * 2).float().numpy())
        assert np.array(weight, copy=True).flags.writeable
        with pytest.raises(TypeError, match="w: a checkpoint is only read"):
            weight += 1
        with pytest.raises(TypeError, match="only read"):
            np.add(weight, 1, out=ckpt["w"].module)  # type: ignore[call-overload]
        assert weight in {weight}
        assert {ckpt["w"].fp32: 1} != {ckpt["w"].fp32: 1}

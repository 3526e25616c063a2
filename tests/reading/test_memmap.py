"""Mapping tensors from Python: what is mapped, that nothing is copied, and what is refused."""

import gc
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.serialization import config

import streamshard
from streamshard import LazyTensor
from streamshard.errors import CorruptFileError, IntegrityError, UsageError
from tests.cli.conftest import in_process
from tests.fabricated import write
from tests.held import descriptor_limit, open_files
from tests.job import TAG, Job, expected, values
from tests.reading.conftest import JOB, Made, flip, job_of, make

WHOLE = ("native-1 on 1", "native-2 on 1", "native-3 on 1", "dumps-2 on 1", "store-none")
CUT = ("native-1", "native-2", "native-3", "dumps-2", "chunks-none")
COMPRESSED = ("store-zstd", "chunks-zstd")


@pytest.mark.parametrize("kind", WHOLE + CUT)
def test_what_lies_in_one_piece_is_mapped_and_the_rest_is_refused(made: Made, kind: str) -> None:
    wanted, pieces = expected(job_of(kind)), pieces_of(made(kind))
    counts = {True: 0, False: 0}
    with streamshard.open(made(kind)) as ckpt:
        for name, parameter in ckpt.items():
            for state, tensor in parameter.tensors.items():
                key = state, parameter.tied_to or name
                files = pieces.get(key, [])
                if len(files) <= 1:
                    require_mapped(tensor, wanted[key])
                else:
                    with pytest.raises(UsageError) as refused:
                        tensor.memmap(bits=True)
                    require_named(str(refused.value), key, files)
                counts[len(files) <= 1] += 1
    assert counts[True]
    assert bool(counts[False]) == (kind in CUT)


def pieces_of(path: Path) -> dict[tuple[str, str], list[str]]:
    """List the file of every piece of every tensor, by `inspect`."""
    found: dict[tuple[str, str], list[str]] = {}
    for detail in streamshard.inspect(path, params=("*",)).details:
        for piece in detail.pieces:
            found.setdefault((piece.state, detail.name), []).append(piece.file)
    return found


def require_mapped(tensor: LazyTensor, wanted: torch.Tensor) -> None:
    bits = tensor.memmap(bits=True)
    assert (bits.shape, bits.dtype) == (tensor.shape, tensor.bits().dtype)
    assert bits.tobytes() == wanted.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    for found in (bits, bits[:] if bits.ndim else bits):
        assert not found.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            found.flags.writeable = True
    if tensor.dtype == "bfloat16":
        message = r"NumPy has no bfloat16.*memmap\(bits=True\), .memmap_torch\(\) or .numpy\(\)"
        with pytest.raises(TypeError, match=message):
            tensor.memmap()
    else:
        own = tensor.memmap()
        assert (own.dtype, own.tobytes()) == (tensor.numpy().dtype, bits.tobytes())
    made = tensor.memmap_torch()
    assert made.dtype == wanted.dtype
    assert torch.equal(made, wanted.reshape(tensor.shape))


def require_named(message: str, key: tuple[str, str], files: list[str]) -> None:
    state, name = key
    different = list(dict.fromkeys(files))
    listed = f"{len(different)} files: {', '.join(different[:3])}"
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    wanted = f"{name}: {state} is cut into {len(files)} pieces, in {listed}{more}, so it cannot"
    assert message.startswith(wanted)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_what_is_compressed_is_refused(made: Made, kind: str) -> None:
    cut = "is cut into 17 pieces and " if kind.startswith("chunks") else ""
    with (
        streamshard.open(made(kind)) as ckpt,
        pytest.raises(UsageError, match=rf"w: fp32 {cut}is compressed, in .*state/fp32/w/c/0/0"),
    ):
        ckpt["w"].fp32.memmap()


@pytest.mark.parametrize("kind", ["native-3", "dumps-2", "chunks-none", "chunks-zstd"])
def test_the_advice_works(made: Made, tmp_path: Path, kind: str) -> None:
    with streamshard.open(made(kind)) as ckpt:
        with pytest.raises(UsageError) as refused:
            ckpt["w"].exp_avg.memmap()
        read = ckpt["w"].exp_avg[...]
    command = shlex.split(str(refused.value).rpartition(": streamshard ")[2])
    paths = {"SRC": made(kind), "NEW.zarr": tmp_path / "new.zarr"}
    in_process(*(paths.get(word, word) for word in command), "-q")
    with streamshard.open(tmp_path / "new.zarr") as ckpt:
        assert np.array_equal(ckpt["w"].exp_avg.memmap(), read)


# Nothing is copied --------------------------------------------------------------------------------

MIB = 1 << 20
LARGE = (1024, 4096)
"""16 MiB of float32."""
STATUS = Path("/proc/self/status")
needs_proc = pytest.mark.skipif(not STATUS.exists(), reason="the kernel does not tell")


def memory() -> dict[str, int]:
    """Tell what this process has in memory of its own, and of files (those in memory too)."""
    found = re.findall(r"Rss(Anon|File|Shmem):\s+(\d+) kB", STATUS.read_text())
    counts = {kind: int(count) * 1024 for kind, count in found}
    return {"Anon": counts["Anon"], "File": counts["File"] + counts["Shmem"]}


def grown(work: Callable[[], object]) -> tuple[object, dict[str, int]]:
    """Do something; returns its result, and by how much memory has grown."""
    gc.collect()
    before = memory()
    result = work()
    return result, {kind: count - before[kind] for kind, count in memory().items()}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = Job(stage=3, world_size=1, groups=((("w", LARGE),),), frozen=(), tied={})
    return write(job, tmp_path_factory.mktemp("large") / "run")


@needs_proc
def test_memory_does_not_grow_with_the_tensor(large: Path) -> None:
    with streamshard.open(large) as ckpt:
        tensor = ckpt["w"].fp32
        tensor.memmap()  # opens the file, and imports what is imported late
        found, more = grown(tensor.memmap)
        assert isinstance(found, np.ndarray)
        assert sum(more.values()) < MIB
        _, more = grown(lambda: found[1000, 5:7].sum())
        assert sum(more.values()) < 4 * MIB
        _, more = grown(lambda: np.add.reduce(found, axis=None))
        assert more["File"] > 8 * MIB
        assert more["Anon"] < 4 * MIB
        assert np.array_equal(found, values("fp32", "w", LARGE).numpy())
        assert np.shares_memory(found[10:20], found)


@needs_proc
def test_what_is_written_into_a_torch_tensor_stays_in_this_process(large: Path) -> None:
    whole = values("fp32", "w", LARGE)
    with streamshard.open(large) as ckpt:
        made = ckpt["w"].fp32.memmap_torch()
        _, more = grown(lambda: made[7].fill_(1))
        assert 0 < more["Anon"] < 4 * MIB
        assert (made[7] == 1).all()
        assert torch.equal(made[8:], whole[8:])
        assert torch.equal(ckpt["w"].fp32.torch(), whole)
        assert torch.equal(ckpt["w"].fp32.memmap_torch(), whole)
        assert torch.equal(ckpt["w"].fp32.memmap_torch()[7], whole[7])


@needs_proc
def test_a_map_outlives_the_checkpoint_and_holds_no_file_open(tmp_path: Path) -> None:
    run = write(replace(JOB, stage=3, world_size=1), tmp_path / "run")
    before = open_files()
    with streamshard.open(run) as ckpt:
        found = [ckpt[name].exp_avg.memmap() for name in ("w", "cube") * 600]
        tensor = ckpt["w"].fp32
        made = tensor.memmap_torch()
        read = ckpt["cube"].exp_avg[...]
        whole = tensor.torch()
    assert open_files() == before
    with pytest.raises(UsageError, match="has been closed"):
        tensor.memmap()
    for path in (run / TAG).iterdir():
        path.unlink()
    row = found[-1][1]
    assert maps_of(run) == 1201
    del found
    gc.collect()
    assert maps_of(run) == 2
    assert np.array_equal(row, read[1])
    assert torch.equal(made, whole)
    del row, made
    gc.collect()
    assert maps_of(run) == 0


def test_more_tensors_than_files_may_be_open_are_mapped(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(80)]
    job = Job(groups=(tuple((name, (3,)) for name in names),), frozen=(), tied={})
    write(job, tmp_path / "run")
    streamshard.convert(tmp_path / "run", tmp_path / "run.zarr")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with streamshard.open(tmp_path / "run.zarr") as ckpt:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit(70), hard))
            found = {name: ckpt[name].exp_avg.memmap() for name in names}
            found |= {f"{name}/": ckpt[name].fp32.memmap() for name in names}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for name in names:
            assert np.array_equal(found[name], values("exp_avg", name, (3,)).numpy())


def maps_of(run: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{run}/")


# What goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shorter", [True, False], ids=["shorter", "touched"])
def test_a_file_that_was_changed_is_not_mapped(tmp_path: Path, is_shorter: bool) -> None:
    run = write(replace(JOB, stage=3, world_size=1), tmp_path / "run")
    with streamshard.open(run) as ckpt:
        _ = ckpt["w"].fp32[0]  # keeps the file open, which no read would look at again
        for path in (run / TAG).glob("*.pt"):
            os.truncate(path, 4096) if is_shorter else os.utime(path, ns=(0, 0))
        with pytest.raises(CorruptFileError, match="changed while it was being read"):
            ckpt["w"].fp32.memmap()


_SHORTER = """
import os, streamshard, sys
found = streamshard.open(sys.argv[1])["w"].fp32.memmap()
print(found[0, 0], flush=True)
os.truncate(sys.argv[2], 0)
found.sum()
print("not reached")
"""


def test_a_file_that_gets_shorter_ends_the_process_as_documented(tmp_path: Path) -> None:
    run = write(replace(JOB, stage=3, world_size=1), tmp_path / "run")
    (path,) = (run / TAG).glob("*_optim_states.pt")
    done = subprocess.run(
        [sys.executable, "-c", _SHORTER, run, path], capture_output=True, text=True, check=False
    )
    first = values("fp32", "w", (50, 8))[0, 0].item()
    assert done.returncode == -signal.SIGBUS
    assert float(done.stdout) == pytest.approx(first)
    assert "SIGBUS" in str(LazyTensor.memmap.__doc__)


def test_a_damaged_store_is_noticed_unless_nobody_looks(tmp_path: Path) -> None:
    store = make("store-none", tmp_path)
    path = store / "state/fp32/w/c/0/0"
    flip(path)
    with streamshard.open(store) as ckpt:
        for mapped in (ckpt["w"].fp32.memmap, ckpt["w"].fp32.memmap_torch):
            with pytest.raises(IntegrityError, match="w/c/0/0: bytes 0 to 1600 are damaged"):
                mapped()
            assert bytes(np.asarray(mapped(check=False))) == path.read_bytes()[:1600]


def test_torch_may_be_configured_to_leave_elements_unaligned(tmp_path: Path) -> None:
    with config.patch({"save.storage_alignment": 1}):  # type: ignore[attr-defined]
        run = write(replace(JOB, stage=3, world_size=1), tmp_path / "run")
    aligned = set()
    with streamshard.open(run) as ckpt:
        for name in ("w", "cube", "v", "one"):
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                tensor = ckpt[name].states[state]
                wanted = values(state, name, tensor.shape)
                found = tensor.memmap()
                assert np.array_equal(found, wanted.numpy())
                assert (found + 1).sum() == pytest.approx((wanted + 1).sum().item())
                aligned.add(found.flags.aligned)
                if found.flags.aligned:
                    assert torch.equal(tensor.memmap_torch(), wanted)
                else:
                    with pytest.raises(UsageError, match=r"unaligned.*use .torch\(\)"):
                        tensor.memmap_torch()
    assert False in aligned


def test_without_torch_numpy_maps(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with streamshard.open(made("store-none")) as ckpt:
        assert ckpt["w"].fp32.memmap().shape == (50, 8)
        with pytest.raises(ImportError, match="torch is not installed"):
            ckpt["w"].fp32.memmap_torch()

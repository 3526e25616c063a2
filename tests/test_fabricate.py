"""The generator of large checkpoints and its checker: benchmarks and memory tests rest on them."""

import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from benchmarks._check import native_differences, store_differences
from benchmarks._fabricate import fabricate
from benchmarks._layout import TAG
from benchmarks._measure import STREAMSHARD, succeed
from benchmarks._model import MASTER, Model, Run, transformer, values
from benchmarks._stand_ins import deepspeed_stand_ins

WORLD_SIZE = 4
MODEL = transformer(1_000_000, stage=2, layers=2, vocabulary=24)


@pytest.fixture(params=[1, 2, 3])
def stage(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def run_dir(tmp_path: Path, stage: int) -> Path:
    fabricate(tmp_path / "run", MODEL, stage=stage, world_size=WORLD_SIZE)
    return tmp_path / "run"


def expected(state: str, name: str) -> torch.Tensor:
    shape = MODEL.trained[name]
    return values(Run(state, name, 0, math.prod(shape)), torch.float32).reshape(shape)


def test_elements_do_not_depend_on_the_piece_that_they_are_made_in() -> None:
    whole = values(Run("exp_avg", "a", 0, 100), torch.float32)
    parts = [values(Run("exp_avg", "a", start, 10), torch.float32) for start in range(0, 100, 10)]
    assert torch.equal(whole, torch.cat(parts))


def test_elements_are_finite_and_hardly_two_alike() -> None:
    made = values(Run(MASTER, "a", (1 << 32) - 50_000, 100_000), torch.float32)
    assert made.isfinite().all()
    assert (made < 0).any()
    assert (made > 0).any()
    assert len(set(made.tolist())) > 0.999 * len(made)
    other = values(Run(MASTER, "b", (1 << 32) - 50_000, 100_000), torch.float32)
    assert (made == other).sum() < 10
    assert (values(Run("exp_avg_sq", "a", 0, 1000), torch.float32) > 0).all()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", [5_000_000, 300_000_000, 40_000_000_000])
def test_sizes_come_out_as_asked(size: int, stage: int) -> None:
    bytes_per_element = 14 if stage == 2 else 12
    made = transformer(size, stage=stage).numel * bytes_per_element
    assert made == pytest.approx(size, rel=0.1)


def test_files_are_whole_zips_that_torch_loads(run_dir: Path) -> None:
    for path in run_dir.rglob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        with deepspeed_stand_ins():
            torch.load(path, weights_only=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [2, 3])  # the only ones that zero_to_fp32 reads
def test_deepspeed_finds_the_weights(run_dir: Path, stage: int) -> None:
    """DeepSpeed's own reader is the oracle for names, files, keys and cuts."""
    zero_to_fp32 = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(run_dir))
    for name in MODEL.trained:
        assert torch.equal(found[name], expected(MASTER, name)), name
    assert torch.equal(found["head.weight"], found["embed.weight"])
    assert found.keys() == {*MODEL.trained, *MODEL.tied, *MODEL.frozen, *MODEL.buffers}


@pytest.mark.parametrize("stage", [1, 2])
def test_module_weights_are_casts_of_the_masters(run_dir: Path, stage: int) -> None:
    path = run_dir / TAG / "mp_rank_00_model_states.pt"
    with deepspeed_stand_ins():
        module = torch.load(path, weights_only=False)["module"]
    for name in MODEL.trained:
        assert torch.equal(module[name], expected(MASTER, name).to(torch.bfloat16)), name
    assert module["head.weight"].data_ptr() == module["embed.weight"].data_ptr()


def test_checker_accepts_what_was_made(tmp_path: Path, stage: int) -> None:
    """On one rank no parameter of stage 3 is padded; elsewhere the padding holds garbage."""
    fabricate(tmp_path / "run", MODEL, stage=stage, world_size=1)
    assert list(native_differences(tmp_path / "run", MODEL, stage=stage, world_size=1)) == []


def test_checker_wants_zeros_in_padding(tmp_path: Path) -> None:
    model = Model(groups=({"a": (5,)},))
    fabricate(tmp_path / "run", model, stage=3, world_size=2)
    (first, *_) = native_differences(tmp_path / "run", model, stage=3, world_size=2)
    assert "element 2 is nan for 0.0" in first


@pytest.mark.parametrize("where", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", ["bf16_zero_pp_rank_2_mp_rank_00_optim", "mp_rank_00_model"])
@pytest.mark.parametrize("stage", [2])
def test_a_flipped_bit_is_found(run_dir: Path, name: str, where: float) -> None:
    path = run_dir / TAG / f"{name}_states.pt"
    flip(path, *largest_record(path), where)
    found = list(native_differences(run_dir, MODEL, stage=2, world_size=WORLD_SIZE))
    assert found
    assert all(name in difference and "; 1 of" in difference for difference in found)


@pytest.mark.parametrize("stage", [2])
def test_a_missing_and_a_surplus_file_are_found(run_dir: Path) -> None:
    (run_dir / "latest").rename(run_dir / "last")
    (difference,) = native_differences(run_dir, MODEL, stage=2, world_size=WORLD_SIZE)
    assert "missing ['latest'], surplus ['last']" in difference


@pytest.mark.parametrize("stage", [2])
@pytest.mark.parametrize("other", [(3, WORLD_SIZE), (2, WORLD_SIZE - 1)])
def test_another_layout_is_found(run_dir: Path, other: tuple[int, int]) -> None:
    stage, world_size = other
    assert list(native_differences(run_dir, MODEL, stage=stage, world_size=world_size))


@pytest.mark.parametrize("array", ["state/fp32/embed.weight", "state/exp_avg/layers.1.gate",
                                   "module/frozen.weight", "module/layers.0.bias"])  # fmt: skip
@pytest.mark.parametrize("stage", [2])
def test_a_changed_element_of_a_store_is_found(run_dir: Path, array: str) -> None:
    store = run_dir.with_name("run.zarr")
    succeed(*STREAMSHARD, "convert", run_dir, store, "--chunk-size", "20KB", "--codec", "zstd")
    assert list(store_differences(store, MODEL, stage=2)) == []
    opened = zarr.open_array(store, path=array, mode="r+")
    last = tuple(length - 1 for length in opened.shape)
    opened[last] = np.zeros((), dtype=opened.dtype)
    (difference,) = store_differences(store, MODEL, stage=2)
    assert array in difference


def largest_record(path: Path) -> tuple[int, int]:
    """Return where the largest record's bytes are: its first one, and how many they are."""
    with zipfile.ZipFile(path) as archive:
        info = max(archive.infolist(), key=lambda info: info.file_size)
        with archive.open(info):
            archive.fp.seek(info.header_offset + 26)  # type: ignore[union-attr]
            header = archive.fp.read(4)  # type: ignore[union-attr]
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (0, 2))
    return info.header_offset + 30 + name + extra, info.file_size


def flip(path: Path, start: int, nbytes: int, where: float) -> None:
    """Flip one bit of a record, but none of its padding."""
    at = start + round(where * (nbytes - 64))
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))

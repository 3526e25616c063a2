"""A path without a ZeRO checkpoint: the message says what it is, and what can be done with it."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import streamshard
from streamshard.errors import IncompleteError, SourceError, SourceNotFoundError, UnsupportedError
from tests.fabricated import write, write_dumps
from tests.job import TAG, Job

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3)}


def test_an_empty_tag_directory(tmp_path: Path) -> None:
    (tmp_path / TAG).mkdir()
    (tmp_path / "latest").write_text(TAG)
    with pytest.raises(IncompleteError, match="no DeepSpeed checkpoint files"):
        streamshard.inspect(tmp_path)


def universal(place: Path) -> Path:
    """Make a directory that looks like one of DeepSpeed's own converter."""
    write(Job(), place)
    for path in (place / TAG).glob("*_optim_states.pt"):
        path.unlink()
    (place / TAG / "zero").mkdir()
    torch.save({}, place / TAG / "zero" / "optimizer_state.pt")
    return place / TAG


def fsdp(place: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*uninitialized")
        save_distributed({"model": WEIGHTS}, checkpoint_id=place, no_dist=True)
    return place


def megatron(place: Path) -> Path:
    shard = place / "iter_0000100" / "mp_rank_00"
    shard.mkdir(parents=True)
    torch.save({"model": WEIGHTS}, shard / "model_optim_rng.pt")
    (place / "latest_checkpointed_iteration.txt").write_text("100")
    return place


def megatron_distributed(place: Path) -> Path:
    """Save as Megatron's `dist_checkpointing` does."""
    fsdp(place)
    torch.save({}, place / "common.pt")
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return place


def safetensors(place: Path) -> Path:
    place.mkdir()
    save_file(WEIGHTS, place / "model-00001-of-00001.safetensors")
    (place / "config.json").write_text("{}")
    return place


def adapter(place: Path) -> Path:
    """Save a PEFT adapter as it once was."""
    place.mkdir()
    torch.save(WEIGHTS, place / "adapter_model.bin")
    return place


def trainer_without_deepspeed(place: Path) -> Path:
    """Save as HF Trainer does on its own."""
    safetensors(place)
    torch.save({"state": {}, "param_groups": []}, place / "optimizer.pt")
    (place / "trainer_state.json").write_text("{}")
    return place


def dumps(place: Path) -> Path:
    return write_dumps(write(Job(), place.with_name("of")), place).parent


def save_fsdp2(place: Path, name: str = "{}_world_size_2_rank_0.pt") -> Path:
    """Save the first of two ranks' files as verl does, from an FSDP2 model."""
    place.mkdir(parents=True)
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        model: Any = fully_shard(torch.nn.Linear(4, 6), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():  # after a backward pass, no fork could do one
            param.grad = torch.ones_like(param)
        optimizer.step()
        torch.save(model.state_dict(), place / name.format("model"))
        torch.save(optimizer.state_dict(), place / name.format("optim"))
    finally:
        distributed.destroy_process_group()
    return place


def verl(place: Path) -> Path:
    save_fsdp2(place / "global_step_5" / "actor")
    (place / "global_step_5" / "actor" / "model_world_size_2_rank_0.pt").unlink()
    (place / "latest_checkpointed_iteration.txt").write_text("5")
    return place


def local_of_accelerate(place: Path) -> Path:
    """Save as Accelerate does with LOCAL_STATE_DICT."""
    place.mkdir()
    torch.save(WEIGHTS, place / "pytorch_model_fsdp_rank0.bin")
    return place


def distributed_safetensors(place: Path) -> Path:
    """Save as torch does with safetensors files of each rank."""
    writer = HuggingFaceStorageWriter(str(place), save_distributed=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*uninitialized")
        save_distributed(WEIGHTS, storage_writer=writer, no_dist=True)
    return place


DISTRIBUTED = r"one file of a distributed checkpoint of PyTorch"
NOTHING_CUT = r"nothing in it depends on the count of ranks"
DIRECTORIES: list[tuple[Callable[[Path], Path], str]] = [
    (megatron, r"a checkpoint in Megatron's own format"),
    (megatron_distributed, r"a distributed checkpoint of Megatron, which does not tell what else"),
    (adapter, rf"a model's weights without an optimizer's state; {NOTHING_CUT}"),
    (trainer_without_deepspeed, rf"saved without ZeRO; {NOTHING_CUT}"),
    (verl, r"files of FSDP's ranks as verl saves them.*files, \S*/global_step_5/actor, to read"),
    (local_of_accelerate, r"files of FSDP's ranks as Accelerate saves.*SHARDED_STATE_DICT"),
    (distributed_safetensors, r"in safetensors files of ranks, which does not tell what else"),
    (dumps, r"raw dumps of the optimizer; .*'\S*/optimizer\.\{rank:02d\}\.pt'"),
]


@pytest.mark.parametrize(
    ("make", "message"), DIRECTORIES, ids=lambda value: getattr(value, "__name__", "")
)
def test_directories_of_other_kinds(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    place = make(tmp_path / "given")
    with pytest.raises(UnsupportedError, match=message) as refusal:
        streamshard.repartition(place, tmp_path / "out", world_size=2)
    assert str(refusal.value).startswith(str(place))
    assert not (tmp_path / "out").exists()


def test_what_lies_beside_a_checkpoint_does_not_matter(tmp_path: Path) -> None:
    run = write(Job(), tmp_path / "run")
    universal(tmp_path / "other").rename(run / "universal")
    (run / "latest_universal").write_text("universal")
    save_file(WEIGHTS, run / "model.safetensors")
    assert streamshard.inspect(run).tag == TAG
    # Not even where it is all that is left in view: the tag is to be named then.
    (run / "latest").unlink()
    with pytest.raises(SourceNotFoundError, match=f"of the 2 .* {run / TAG}: {TAG}, universal\n"):
        streamshard.inspect(run, params=["*"])
    assert streamshard.inspect(run / TAG).tag == TAG
    save_file(WEIGHTS, run / TAG / "model.safetensors")
    for path in (run / TAG).glob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(IncompleteError, match=r"no \*_optim_states.pt file.*copy them"):
        streamshard.inspect(run / TAG)


def shard(place: Path) -> Path:
    return next((write(Job(), place) / TAG).glob("*_optim_states.pt"))


def renamed_shard(place: Path) -> Path:
    return shard(place).rename(place / "rank0.pt")


def lightning(place: Path) -> Path:
    place.mkdir()
    torch.save({"state_dict": WEIGHTS, "pytorch-lightning_version": "2.6"}, place / "last.ckpt")
    return place / "last.ckpt"


GIVE_DIRECTORY = r"one file of a DeepSpeed checkpoint; give its directory, \S*"
FILES: list[tuple[Callable[[Path], Path], str]] = [
    (shard, rf"{GIVE_DIRECTORY}{TAG}"),
    (renamed_shard, GIVE_DIRECTORY),
    (lambda place: write(Job(), place) / "latest", GIVE_DIRECTORY),
    (
        lambda place: dumps(place) / "optimizer.01.pt",
        r"one rank's optimizer.*optimizer\.\{rank:02d",
    ),
    (lambda place: safetensors(place) / "model-00001-of-00001.safetensors", r"a model's weights"),
    (lambda place: adapter(place) / "adapter_model.bin", r"a model's weights"),
    (lambda place: next(fsdp(place).glob("*.distcp")), DISTRIBUTED),
    (
        lambda place: save_fsdp2(place) / "optim_world_size_2_rank_0.pt",
        r"one of the files of FSDP's ranks",
    ),
    (lambda place: next(distributed_safetensors(place).iterdir()), r"one of the files of ranks"),
    (lightning, r"a Lightning checkpoint in one file"),
]


@pytest.mark.parametrize(
    ("make", "message"), FILES, ids=lambda value: getattr(value, "__name__", "")
)
def test_single_files(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path / "given")
    with pytest.raises(UnsupportedError, match=message) as refusal:
        streamshard.inspect(path)
    assert str(refusal.value).startswith(str(path))


def test_a_file_that_is_nothing_known(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(SourceNotFoundError, match=r"notes\.txt: a file; give the run directory"):
        streamshard.inspect(tmp_path / "notes.txt")
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"broken\.pt: "):
        streamshard.inspect(tmp_path / "broken.pt")


@pytest.mark.parametrize("name", ["model", "optim"])
def test_a_template_of_fsdp_s_files(name: str, tmp_path: Path) -> None:
    place = save_fsdp2(tmp_path / "given")
    with pytest.raises(UnsupportedError, match="files of FSDP's ranks as verl"):
        streamshard.inspect(place / f"{name}_world_size_2_rank_{{rank}}.pt")


def test_a_template_of_files_that_are_no_dumps(tmp_path: Path) -> None:
    torch.save({"cpu": torch.get_rng_state()}, tmp_path / "rng_state_0.pth")
    with pytest.raises(UnsupportedError, match="not a dump of an optimizer's state that ZeRO"):
        streamshard.inspect(tmp_path / "rng_state_{rank}.pth")

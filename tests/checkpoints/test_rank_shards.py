"""Safetensors files of ranks, made by transformers' own saver and by PyTorch's, on real ranks."""

import json
import multiprocessing
import os
import shutil
import socket
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # ranks are forks: what FSDP loads late is loaded once
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import streamshard
from streamshard.errors import CorruptFileError, DisagreementError, IncompleteError, SourceError

RANKS = 3
SHARD = "shard-{:05d}-model-00001-of-00001.safetensors"


SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
"""A model whose sizes no count of ranks divides."""


def on_ranks(do: Callable[[], object], ranks: int = RANKS) -> None:
    """Do something on real ranks, each in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_do, args=(n, do, ranks, port)) for n in range(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * ranks


def _do(rank: int, do: Callable[[], object], ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    distributed.init_process_group("gloo")
    do()
    distributed.barrier()
    distributed.destroy_process_group()


def whole(value: Any) -> Any:  # noqa: ANN401
    return value.full_tensor() if isinstance(value, DTensor) else value


def train_and_save(root: Path) -> None:
    """Train a model of transformers, save it as it does, and besides what the saver was given."""
    from transformers import LlamaForCausalLM
    from transformers.distributed.checkpoint import save_optimizer_distributed
    from transformers.distributed.configuration_utils import DistributedConfig

    model = LlamaForCausalLM.from_pretrained(
        root / "base", distributed_config=DistributedConfig(fsdp_size=RANKS)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(2):
        torch.manual_seed(seed)
        model(input_ids=torch.randint(37, (2, 5))).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(root / "saved", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, str(root / "saved"))
    given = {name: whole(held) for name, held in get_model_state_dict(model).items()}
    states: Any = get_optimizer_state_dict(model, optimizer)["state"]
    moments = {
        name: {state: whole(held) for state, held in own.items()} for name, own in states.items()
    }
    if distributed.get_rank() == 0:
        torch.save((given, moments), root / "given.pt")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Slow to import, and every process collects all tests. Ranks are forks, and find it loaded.
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(root / "base")
    on_ranks(partial(train_and_save, root))
    return root


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "saved", tmp_path / "saved")


def test_what_is_opened_is_what_transformers_was_given(made: Path) -> None:
    weights, states = torch.load(made / "given.pt")
    with streamshard.open(made / "saved") as found:
        assert found.keys() == weights.keys() == states.keys()
        for name, weight in weights.items():
            assert torch.equal(found[name].tensors["fp32"].torch(), weight), name
            for state in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[name].tensors[state].torch(), states[name][state]), name
        (group,) = found.groups
        assert group.hyper_parameters["lr"] == 0.01
    report = streamshard.inspect(made / "saved")
    assert (report.kind, report.world_size, report.groups[0].states["step"]) == ("dcp", RANKS, 2)
    assert report.notes == ()
    assert streamshard.verify(made / "saved").is_good


def test_the_optimizer_goes_to_another_form(made: Path, tmp_path: Path) -> None:
    streamshard.export(made / "saved", tmp_path / "out", format="dcp")
    assert streamshard.diff(made / "saved", tmp_path / "out").is_equal


def test_files_of_ranks_that_are_missing(made: Path, saved: Path) -> None:
    """Without an optimizer nothing tells that the last rank's files are missing, and it is said."""
    (saved / SHARD.format(3)).unlink()
    with pytest.raises(IncompleteError, match=r"exp_avg' is \[37, 8\], .* end at \[26, 8\]"):
        streamshard.inspect(saved)
    assert not streamshard.verify(saved).is_good
    for path in (saved / ".metadata", *saved.glob("*.distcp")):
        path.unlink()
    (note,) = streamshard.inspect(saved).notes
    assert "how many ranks" in note
    with pytest.raises(SourceError, match=r"\[26, 8\], in the base model .* \[37, 8\]"):
        streamshard.export(saved, saved.parent / "out", like=made / "base")
    (saved / SHARD.format(1)).unlink()
    with pytest.raises(IncompleteError, match="no file shard-00001 of 2"):
        streamshard.inspect(saved)


def test_damage_is_found(saved: Path) -> None:
    item = saved / "__1_0.distcp"
    held = bytearray(item.read_bytes())
    with streamshard.open(saved) as found:
        wanted = found["lm_head.weight"].tensors["exp_avg"].torch().numpy()[13].tobytes()
    held[held.index(wanted)] ^= 1
    item.write_bytes(held)
    assert [problem.file for problem in streamshard.verify(saved).problems] == [str(item)]
    shard = saved / SHARD.format(2)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match=r"shard-00002.*: \d+ bytes, its header describes"):
        streamshard.inspect(saved)
    assert not streamshard.verify(saved).is_good


GIVEN = {
    "whole.weight": torch.randn(5, 3).bfloat16(),
    "cut.weight": torch.randn(7, 5),
    "boxes.weight": torch.randn(5, 6).half(),
    "count": torch.tensor(3),
    "none": torch.empty(0, 4),
    "one": torch.randn(1),
}


def save_with_torch(place: Path, files: dict[str, int] | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    cuts = {"cut.weight": [Shard(0), Shard(0)], "boxes.weight": [Shard(1), Shard(0)]}
    cuts["one"] = cuts["cut.weight"]
    state = {
        name: distribute_tensor(held, mesh, cuts[name], src_data_rank=None)
        if name in cuts
        else held
        for name, held in GIVEN.items()
    }
    writer = HuggingFaceStorageWriter(str(place), files, save_distributed=True)
    save_distributed(state, storage_writer=writer)


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("torch") / "saved"
    files = dict.fromkeys(GIVEN, 1) | {"one": 2, "cut.weight": 2}
    on_ranks(partial(save_with_torch, place, files), 4)
    return place


def test_boxes_of_a_mesh_of_devices(torchs: Path) -> None:
    """In two files for each rank; the saver's own loader reads the same."""
    theirs = {name: torch.zeros_like(held) for name, held in GIVEN.items() if name != "one"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_distributed(theirs, storage_reader=HuggingFaceStorageReader(str(torchs)), no_dist=True)
    with streamshard.open(torchs) as found:
        assert found.keys() == GIVEN.keys()
        for name, held in GIVEN.items():
            assert torch.equal(found[name].tensors["module"].torch(), held), name
            assert torch.equal(theirs.get(name, held), held), name


def write_shards(place: Path, *told: tuple[dict[str, Tensor], dict[str, Any] | None]) -> Path:
    """Save what each rank holds, and what it tells of where that begins."""
    place.mkdir()
    for rank, (held, begins) in enumerate(told, start=1):
        entries = {name: {"saved_offsets": begin} for name, begin in (begins or {}).items()}
        more = {"DCP_SHARDING_INFO": json.dumps(entries)} if begins is not None else {}
        save_file(held, place / SHARD.format(rank), {"format": "pt", **more})
    return place


TWO = {"a": torch.ones(2, 3)}


@pytest.mark.parametrize(
    ("other", "begin", "error", "message"),
    [
        ({"a": torch.ones(2, 3)}, [1, 0], CorruptFileError, r"'a' of .*\[0, 0\].* overlap"),
        ({"a": torch.ones(2, 3)}, [0, 0], CorruptFileError, r"'a' of .* overlap"),
        ({"a": torch.ones(2, 3)}, [3, 0], CorruptFileError, r"no box holds its element \[2, 0\]"),
        ({"a": torch.ones(2, 2)}, [2, 0], CorruptFileError, r"no box holds its element \[2, 2\]"),
        ({"a": torch.ones(2, 3).half()}, [2, 0], DisagreementError, "00002.*'a' is float16 of 2"),
        ({"a": torch.ones(3)}, [2], DisagreementError, "00002.*'a' is float32 of 1 .* in shard-0"),
        ({"a": torch.ones(2, 3)}, [2], CorruptFileError, r"00002.*'a', \[2, 3\], begins at \(2,\)"),
        ({"a": torch.ones(2, 3)}, [-2, 0], CorruptFileError, "00002.*not a safetensors header"),
        ({"a": torch.ones(2, 3)}, [1 << 44, 0], CorruptFileError, "of 'a' reach to .* no tensor"),
        ({"a": torch.ones(2, 3)}, None, CorruptFileError, "00002.*where its part of 'a' begins"),
    ],
)
def test_parts_that_do_not_fit(
    other: dict[str, Tensor],
    begin: list[int] | None,
    error: type[SourceError],
    message: str,
    tmp_path: Path,
) -> None:
    begins = None if begin is None else {"a": begin}
    place = write_shards(tmp_path / "saved", (TWO, {"a": [0, 0]}), (other, begins))
    with pytest.raises(error, match=message):
        streamshard.inspect(place)
    assert not streamshard.verify(place).is_good


def test_files_that_are_not_of_one_save(tmp_path: Path) -> None:
    place = write_shards(tmp_path / "saved", (TWO, {"a": [0, 0]}), (TWO, {"a": [2, 0]}))
    one = place / SHARD.format(1)
    one.rename(place / one.name.replace("of-00001", "of-00002"))
    with pytest.raises(DisagreementError, match="two saves, -of-00001 and -of-00002"):
        streamshard.inspect(place)
    two = place / SHARD.format(2)
    two.rename(place / two.name.replace("of-00001", "of-00002"))
    with pytest.raises(IncompleteError, match="no file model-00002 of 2"):
        streamshard.inspect(place)

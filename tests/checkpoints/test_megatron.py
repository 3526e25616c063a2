"""Megatron's distributed checkpoints, made by its own savers and judged by its own loader.

`megatron_saves/make.py` tells how the archives were made: by megatron-core 0.13.1 and 0.16.1, with
two tensor-parallel ranks. `loaded.json` in each has the digests of what `load_plain_tensors`
returns.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import streamshard
from streamshard.errors import CorruptFileError, DisagreementError, IncompleteError, SourceError
from streamshard.testing.reader import SavedCheckpoint
from tests import fabricated
from tests.checkpoints.test_laws_of_readers import ReadingTests
from tests.fabricated import write
from tests.fabricated_dcp import Box, Saved, adamw, save_index
from tests.job import Job
from tests.unpacking import unpack

SAVES = Path(__file__).parent / "megatron_saves"
FLATTENED, BUFFERS = "0.13.1-fully_sharded_model_space", "0.16.1-dp_reshardable"
WHOLE = "0.16.1-fully_reshardable"
MASTERS = ("param", "fp32_param")


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("megatron")
    for path in SAVES.glob("*.tar.xz"):
        unpack(path, place)
    return place


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


@pytest.mark.parametrize("name", [WHOLE, BUFFERS, FLATTENED])
def test_what_is_opened_is_what_megatron_loads(name: str, saves: Path) -> None:
    """Tensor-parallel boxes are joined, and flattened ranges have their own shape again."""
    loaded = json.loads((saves / name / "loaded.json").read_text())
    seen = 0
    with streamshard.open(saves / name) as found:
        for key, (dtype, wanted) in loaded.items():
            if key.startswith("optimizer.distributed."):
                continue
            state = ""
            if key.startswith("optimizer.state."):
                _, _, state, key = key.split(".", 3)
            tensors = found[key].tensors
            state = "fp32" if state in MASTERS or (not state and "fp32" in tensors) else state
            held = tensors[state or "module"].torch()
            # The model's own weights are its master weights in 16 bits.
            assert digest(held.to(getattr(torch, dtype))) == wanted, key
            seen += 1
        assert seen >= len(found)
    assert streamshard.verify(saves / name).is_good


def test_it_is_recognized(saves: Path) -> None:
    found = streamshard.inspect(saves / WHOLE)
    (group,) = found.groups
    assert (found.kind, group.states["step"], len(found.parameters)) == ("megatron", 2, 20)
    assert group.hyper_parameters["lr"] == 0.001
    notes = " ".join(found.notes)
    assert "wd_mult" in notes
    assert "_extra_state, rng_state" in notes
    buffers = streamshard.inspect(saves / BUFFERS)
    assert not buffers.groups
    assert "6 flat buffers (saved as dp_reshardable)" in " ".join(buffers.notes)


def test_the_newest_of_a_run_is_read(saves: Path, tmp_path: Path) -> None:
    (tmp_path / "iter_0000007").symlink_to(saves / WHOLE)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert streamshard.inspect(tmp_path).tag == "iter_0000007"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(IncompleteError, match=r"names iter_0000008, which is not there"):
        streamshard.inspect(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("-8")
    with pytest.raises(CorruptFileError, match="names no iteration"):
        streamshard.inspect(tmp_path)


def write_flattened(
    place: Path, shape: tuple[int, ...], counts: tuple[int, ...], told: tuple[int, ...]
) -> torch.Tensor:
    """Save a tensor in ranges of flattened boxes, and tell a shape of it; returns the tensor."""
    draw, whole = np.random.default_rng(0), torch.arange(float(np.prod(shape))).reshape(shape)
    box = tuple(length // count for length, count in zip(shape, counts, strict=True))
    numel, cuts = int(np.prod(box)), list[Box]()
    flat = torch.empty(*counts, numel)
    for where in np.ndindex(*counts):
        inside = tuple(slice(w * n, w * n + n) for w, n in zip(where, box, strict=True))
        flat[where] = whole[inside].reshape(-1)
        ends = sorted({0, numel, *draw.integers(0, numel, 3).tolist()})
        ones = (1,) * len(box)
        cuts += [((*where, start), (*ones, stop - start)) for start, stop in pairwise(ends)]
    metadata = Saved({"x": (flat, cuts)}).write(place)
    vars(metadata)["mcore_data"] = {"x": {"nd_reformulated_orig_global_shape": told}}
    save_index(metadata, place)
    torch.save({}, place / "common.pt")
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return whole


@pytest.mark.parametrize(
    ("shape", "counts"), [((6, 4), (2, 1)), ((2, 6, 4), (2, 3, 2)), ((7,), (1,)), ((3, 1), (1, 1))]
)
def test_ranges_are_boxes_in_any_number_of_dimensions(
    shape: tuple[int, ...], counts: tuple[int, ...], tmp_path: Path
) -> None:
    whole = write_flattened(tmp_path, shape, counts, shape)
    with streamshard.open(tmp_path) as found:
        assert torch.equal(found["x"].module.torch(), whole)
    for told in ((5, 5), ()):
        write_flattened(tmp_path, shape, counts, told)
        with pytest.raises(CorruptFileError, match="is said to be flattened"):
            streamshard.inspect(tmp_path)


def test_options_by_parameter_of_megatrons_fsdp(tmp_path: Path) -> None:
    """Keys are by `sharded_param_state_fsdp_dtensor` of megatron-core 0.16.1."""
    saved = adamw({"module.up": (4, 3), "module.down": (3,)})
    saved.values = {
        saved.key("optimizer", "param_to_group_meta", name, option): value
        for name in ("module.up", "module.down")
        for option, value in {"lr": 0.5, "betas": (0.9, 0.99), "wd_mult": 1.0}.items()
    }
    saved.write(tmp_path / "iter_0000002")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    found = streamshard.inspect(tmp_path)
    (group,) = found.groups
    assert group.hyper_parameters["lr"] == 0.5
    assert [parameter.name for parameter in found.parameters] == ["up", "down"]


def test_steps_that_differ_are_refused(saves: Path, tmp_path: Path) -> None:
    path = shutil.copytree(saves / WHOLE, tmp_path / WHOLE) / "common.pt"
    common = torch.load(path, weights_only=False)
    common["optimizer"]["optimizer"]["param_groups"][1]["step"] = 3.0
    torch.save(common, path)
    with pytest.raises(DisagreementError, match="at different steps, 2 and 3"):
        streamshard.inspect(tmp_path / WHOLE)


ENDLESS: dict[int, object] = {}
ENDLESS[0] = ENDLESS


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"param_groups": [{"step": float("inf")}]}, "inf is not a count of steps"),
        ({"param_groups": [{"step": torch.tensor(float("nan"))}]}, "is not a count of steps"),
        ({"param_groups": None}, "lists no param groups"),
        (ENDLESS, "nested more than 100 deep"),
    ],
)
def test_an_optimizer_of_nonsense_is_refused(
    optimizer: object, said: str, saves: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(saves / WHOLE, tmp_path / "save")
    torch.save({"optimizer": optimizer}, place / "common.pt")
    with pytest.raises(SourceError, match=said):
        streamshard.inspect(place)


@pytest.fixture(scope="module")
def reference(saves: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ZeRO checkpoint of a job with the model in the archives, which has no buffers."""
    with streamshard.open(saves / WHOLE) as checkpoint:
        shapes = tuple((name, held.fp32.shape) for name, held in checkpoint.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fabricated, "buffers", dict)
        job = Job(groups=(shapes,), frozen=(), tied={})
        made = write(job, tmp_path_factory.mktemp("like") / "run")
    fabricated.make_adam(made)
    return made


@pytest.fixture(scope="module")
def tensors(saves: Path) -> Mapping[str, Mapping[str, NDArray[Any]]]:
    with streamshard.open(saves / WHOLE) as checkpoint:
        return {
            name: {state: tensor.bits() for state, tensor in parameter.tensors.items()}
            for name, parameter in checkpoint.items()
        }


class TestMegatron(ReadingTests):
    kind = "megatron"
    has_sums = True
    # Its items are those of PyTorch's distributed checkpoint, which is asked it.
    test_a_source_that_changes_is_never_written_as_it_is_then = None  # type: ignore[assignment]

    @pytest.fixture
    def saved(
        self,
        saves: Path,
        tensors: Mapping[str, Mapping[str, NDArray[Any]]],
        reference: Path,
        tmp_path: Path,
    ) -> SavedCheckpoint:
        place = shutil.copytree(saves / WHOLE, tmp_path / WHOLE)
        (place / "loaded.json").unlink()  # its values are compared with these in another test
        return SavedCheckpoint(place, tensors, reference)

"""Distributed checkpoints of PyTorch, read without torch: what is there, and what is refused.

Damaged and hostile ones are an error that names the file, and nothing of them is run.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

import streamshard
from streamshard.cli.main import main
from streamshard.errors import CorruptFileError, IncompleteError, SourceError, UnsupportedError
from streamshard.formats.dcp.optimizer_state import number_in
from streamshard.formats.deepspeed.states import Scalar
from tests.fabricated_dcp import Saved, adamw, mesh, rows, save_index

SHAPES = {"up.weight": (8, 5), "up.bias": (7,), "down.weight": (3, 7)}
BUFFERS = {
    "norm.running": torch.arange(4.0),
    "norm.count": torch.tensor(3),
    "norm.angles": torch.polar(torch.ones(3), torch.arange(3.0)),
}


def require_equal(saved: Saved, path: Path) -> None:
    """Compare what is opened with what was saved, under its name and its state."""
    seen = 0
    with streamshard.open(path) as found:
        for key, (tensor, _) in saved.tensors.items():
            parts = saved.paths[key]
            if ".step" in key:
                continue
            if "state" in key:
                name, state = ".".join(map(str, parts)).split("state.")[1].rsplit(".", 1)
                held = found[name].tensors[state]
            else:
                held = found[parts[-1]].tensors["fp32" if parts[-1] in SHAPES else "module"]
            assert np.array_equal(np.asarray(held[...]), tensor.numpy()), key
            seen += 1
    assert seen >= len(SHAPES)


@pytest.mark.parametrize("style", ["torch", "titan", "tutorial", "both"])
def test_every_way_of_nesting_is_read(style: str, tmp_path: Path) -> None:
    saved = adamw(SHAPES, buffers=BUFFERS, style=style)
    saved.write(tmp_path / "c")
    require_equal(saved, tmp_path / "c")
    shown = streamshard.inspect(tmp_path / "c")
    (group,) = shown.groups
    assert group.states["step"] == 3.0
    assert group.hyper_parameters["betas"] == [0.9, 0.999]
    assert (shown.kind, shown.weights) == ("dcp", len(BUFFERS))


@pytest.mark.parametrize("parts", [(1, 3), (8, 5)])
def test_boxes_of_a_mesh_are_put_together(parts: tuple[int, int], tmp_path: Path) -> None:
    cut = {name: rows(shape, 2) for name, shape in SHAPES.items()}
    cut["up.weight"] = mesh(SHAPES["up.weight"], parts)
    saved = adamw(SHAPES, cut=cut, files=3)
    saved.write(tmp_path)
    require_equal(saved, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_fabricated_here_torch_loads(tmp_path: Path) -> None:
    saved = adamw(
        SHAPES, buffers=BUFFERS, cut={n: mesh(s, [2] * len(s)) for n, s in SHAPES.items()}
    )
    saved.write(tmp_path)
    state = {key: torch.zeros_like(tensor) for key, (tensor, _) in saved.tensors.items()}
    load_distributed(state, checkpoint_id=tmp_path, no_dist=True)
    for key, (tensor, _) in saved.tensors.items():
        assert torch.equal(state[key], tensor)


def test_weights_of_data_parallel_wrappers_lose_the_prefix(tmp_path: Path) -> None:
    shapes = {f"module.{name}": shape for name, shape in SHAPES.items()}
    adamw(shapes).write(tmp_path)
    with streamshard.open(tmp_path) as found:
        assert set(found) == set(SHAPES)
        assert "exp_avg" in found["up.bias"].tensors


def test_tied_names_share_an_item(tmp_path: Path) -> None:
    saved = adamw(SHAPES)
    metadata = saved.write(tmp_path)
    listed, stored = metadata.state_dict_metadata, metadata.storage_data
    listed["model.head.weight"] = listed["model.up.weight"]
    for index, info in list(stored.items()):
        if index.fqn == "model.up.weight":
            stored[type(index)("model.head.weight", index.offset, index.index)] = info
    save_index(metadata, tmp_path)
    with streamshard.open(tmp_path) as found:
        assert found["head.weight"].tied_to == "up.weight"


# What is refused ----------------------------------------------------------------------------------

Damage = Callable[[Path], object]
"""Saves a checkpoint with something wrong in it."""


def write(place: Path) -> Metadata:
    return adamw(SHAPES).write(place)


def lost(name: str) -> Damage:
    def damage(place: Path) -> None:
        write(place)
        (place / name).unlink()

    return damage


def cut_short(name: str, keep: int) -> Damage:
    def damage(place: Path) -> None:
        write(place)
        (place / name).write_bytes((place / name).read_bytes()[:keep])

    return damage


def index(data: bytes) -> Damage:
    """Have other bytes in place of the index."""
    return lambda place: (write(place), (place / ".metadata").write_bytes(data))


def changed(edit: Callable[[Metadata], object]) -> Damage:
    def damage(place: Path) -> None:
        metadata = write(place)
        edit(metadata)
        save_index(metadata, place)

    return damage


def first(metadata: Metadata, key: str) -> MetadataIndex:
    found: MetadataIndex = next(i for i in metadata.storage_data if i.fqn == key)
    return found


def item(**values: Any) -> Damage:  # noqa: ANN401
    """Have an item lie elsewhere, by the index."""

    def edit(metadata: Metadata) -> None:
        index = first(metadata, "model.up.weight")
        old = metadata.storage_data[index]
        known = {"relative_path": old.relative_path, "offset": old.offset, "length": old.length}
        metadata.storage_data[index] = _StorageInfo(**{**known, **values})

    return changed(edit)


def boxes(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Damage:
    """Have a tensor of 8 x 5 cut into other boxes, by the index."""

    def edit(metadata: Metadata) -> None:
        held = metadata.state_dict_metadata["model.up.weight"]
        held.chunks = [  # type: ignore[union-attr]
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
        ]

    return changed(edit)


def larger(metadata: Metadata) -> None:
    for key in ("model.up.weight", "optimizer.state.up.weight.exp_avg",
                "optimizer.state.up.weight.exp_avg_sq"):  # fmt: skip
        metadata.state_dict_metadata[key].size = torch.Size((9, 5))  # type: ignore[union-attr]


def swapped(metadata: Metadata) -> None:
    stored = metadata.storage_data
    one, other = first(metadata, "model.up.weight"), first(metadata, "model.up.bias")
    stored[one], stored[other] = stored[other], stored[one]


def other_step(place: Path) -> None:
    saved = adamw(SHAPES)
    saved.tensors["optimizer.state.up.bias.step"] = torch.tensor(4.0), [((), ())]
    saved.write(place)


def other_rate(place: Path) -> None:
    saved = adamw(SHAPES, style="both")
    saved.values["optimizer.param_groups.up.bias.lr"] = 0.5
    saved.write(place)


def coded(place: Path) -> None:
    """Quantise moments, as an 8-bit optimizer does."""
    saved = adamw(SHAPES)
    for key, (tensor, cut) in saved.tensors.items():
        if key.endswith("exp_avg"):
            saved.tensors[key] = (tensor * 255).to(torch.uint8), cut
    saved.write(place)


def two_models(place: Path) -> None:
    saved = adamw(SHAPES)
    copies = {k.replace("model.", "module.", 1): v for k, v in saved.tensors.items()}
    saved.tensors |= {k: v for k, v in copies.items() if k.startswith("module.")}
    saved.paths |= {k: ("module", k.removeprefix("module.")) for k in copies if k[:2] == "mo"}
    saved.write(place)


class Bomb:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('it ran')",)


TOP, BOTTOM = ((0, 0), (4, 5)), ((4, 0), (4, 5))
BEYOND = r"__0_0\.distcp: [\d,]+ bytes, \.metadata lists an item to"
OTHER = r"is float32 of \[.*\], listed is float32 of"
REFUSED: list[tuple[Damage, type[SourceError], str]] = [
    (lost("__1_0.distcp"), IncompleteError, r"__1_0\.distcp: missing"),
    (lost(".metadata"), IncompleteError, r"\.metadata: missing; torch writes it last"),
    (cut_short("__0_0.distcp", -1), CorruptFileError, BEYOND),
    *((cut_short(".metadata", n), CorruptFileError, r"\.metadata") for n in (0, -1)),
    (index(pickle.dumps(Bomb())), CorruptFileError, "where torch writes Metadata"),
    (item(offset=-1), CorruptFileError, "is said to be"),
    (item(offset=1 << 70), CorruptFileError, "is said to be"),
    (item(offset=1 << 61), CorruptFileError, "lists an item to byte"),
    (item(length=1 << 61), CorruptFileError, "lists an item to byte"),
    (item(length=0), CorruptFileError, "no end record of a zip"),
    (item(length=100), CorruptFileError, r"item of 'model\.up\.weight'"),
    (item(length=2500), CorruptFileError, "which overlap"),
    (item(offset=1), CorruptFileError, "overlap"),
    (item(length="9"), CorruptFileError, "is said to be"),
    (item(length=True), CorruptFileError, "is said to be"),
    (item(relative_path="../secret"), CorruptFileError, "is said to lie in"),
    (item(relative_path="/etc/passwd"), CorruptFileError, "is said to lie in"),
    (item(relative_path="a\nb"), CorruptFileError, "is said to lie in"),
    (item(relative_path=".."), CorruptFileError, "is said to lie in"),
    (item(relative_path="x.distcp"), IncompleteError, r"x\.distcp: missing"),
    (item(transform_descriptors=["zstd"]), UnsupportedError, "transformed while it was saved"),
    (boxes(TOP), CorruptFileError, "belongs to nothing that is listed"),
    (boxes(TOP, ((4, 0), (3, 5))), CorruptFileError, OTHER),
    (boxes(TOP, ((3, 0), (4, 5))), CorruptFileError, "but not where it lies"),
    (boxes(TOP, BOTTOM, ((0, 0), (4, 5))), CorruptFileError, "but not where it lies"),
    (boxes(TOP, ((4,), (4,))), CorruptFileError, "has a box at"),
    (boxes(TOP, ((4, 0), (4, 1 << 50))), CorruptFileError, "not a shape|is float32 of"),
    (changed(larger), CorruptFileError, r"no box holds its element \[8, 0\]"),
    (changed(swapped), CorruptFileError, OTHER),
    (other_step, SourceError, r"'up\.bias' of the same param group"),
    (other_rate, SourceError, r"up\.bias\.lr' is 0\.5, in param group 0 it is 0\.001"),
    (coded, UnsupportedError, r"\.exp_avg' holds codes of uint8: 8-bit"),
    (two_models, UnsupportedError, "2 state dicts that may be the model's"),
]


@pytest.mark.parametrize(("damage", "kind", "message"), REFUSED)
def test_what_is_wrong_is_named_by_every_verb(
    damage: Damage, kind: type[SourceError], message: str, tmp_path: Path
) -> None:
    place = tmp_path / "dcp"
    damage(place)
    with pytest.raises(kind, match=message):
        streamshard.inspect(place)
    assert main(["verify", str(place)]) == 6


def test_what_is_not_needed_of_the_index_is_not_run(tmp_path: Path) -> None:
    changed(lambda metadata: vars(metadata).update(planner_data=Bomb()))(tmp_path)
    assert streamshard.inspect(tmp_path).kind == "dcp"


def test_a_number_in_a_dtype_that_optimizers_do_not_use_is_named() -> None:
    assert number_in("lr", Scalar("float64", (), np.float64(0.1).tobytes())) == 0.1
    with pytest.raises(UnsupportedError, match="lr is bfloat16"):
        number_in("lr", Scalar("bfloat16", (), b"\0\0"))

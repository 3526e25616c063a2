"""Meshes of devices as each version of torch saves them, for another count of ranks."""

from typing import Any

import pytest

from streamshard.errors import UnsupportedError
from streamshard.formats.fsdp_ranks.device_meshes import MeshChange, MeshShape
from streamshard.formats.fsdp_ranks.sharded_tensors import entries_of
from streamshard.formats.pickle.inert import Call, Global
from streamshard.formats.torch.torch_tensor import Storage, make_tensor, tensor_of
from streamshard.model import Literal

MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
LAYOUT = Global("torch.distributed._mesh_layout", "_MeshLayout")
FLAT = Global("torch.distributed._mesh_layout", "_FlatLayout")
SPEC = Global("torch.distributed.tensor._dtensor_spec", "DTensorSpec")


def numbers(*shape: int) -> Call:
    """Return a node of an int tensor that counts up."""
    count = MeshShape(shape).ranks
    data = b"".join(n.to_bytes(4, "little") for n in range(count))
    return make_tensor(Storage("int32", count, Literal(data)), shape)


def built(cls: Global, **state: object) -> Call:
    return Call(cls, (), new=True, state=state)


COMMON = {"_thread_id": None, "_hash": 12345}
OLD = {"device_type": "cuda", **COMMON}
NEW = {"_device_type": "cuda", "_root_mesh": None, "_flatten_mapping": {"x": 1}, **COMMON}
BY_VERSION: dict[str, dict[str, Any]] = {
    "2.6": {
        **OLD, "mesh": numbers(4), "mesh_dim_names": ("fsdp",), "_coordinate_on_dim": [0],
        "_flatten_mesh_list": (0, 1, 2, 3), "_dim_group_infos": [("", [0, 1, 2, 3], "0")],
    },
    "2.8": {
        **OLD, "mesh": numbers(4), "mesh_dim_names": None, "_coordinate_on_dim": [0],
        "_flatten_mesh_list": (0, 1, 2, 3), "_dim_group_names": ["0"],
    },
    "2.10": {
        **NEW, "_layout": built(LAYOUT, shape=(4,), stride=(1,)), "_rank_map": numbers(4),
        "_mesh_dim_names": ("fsdp",), "_flatten_rank_map": (0, 1, 2, 3), "_rank": 0,
        "_coordinate_on_dim": [0], "_dim_group_names": ["0"],
    },
    "2.13": {
        **NEW, "_layout": built(LAYOUT, axes=(built(FLAT, shape=(4,), stride=(1,)),)),
        "_rank_map": numbers(4), "_mesh_dim_names": ("fsdp",), "_flatten_rank_map": (0, 1, 2, 3),
        "_rank": 0, "_coordinate_on_dim": (0,), "_dim_group_names": ["0"],
    },
}  # fmt: skip
HYBRID: dict[str, dict[str, Any]] = {
    "2.8": {
        **BY_VERSION["2.8"], "mesh": numbers(2, 2), "mesh_dim_names": ("ddp", "fsdp"),
        "_coordinate_on_dim": [0, 0], "_dim_group_names": ["1", "3"],
    },
    "2.10": {
        **BY_VERSION["2.10"], "_layout": built(LAYOUT, shape=(2, 2), stride=(2, 1)),
        "_mesh_dim_names": ("ddp", "fsdp"), "_coordinate_on_dim": [0, 0],
        "_dim_group_names": ["1", "3"],
    },
}  # fmt: skip


def dtensor(mesh: dict[str, Any], dims: int = 1) -> Call:
    """Return a node of a DTensor on a mesh."""
    args = (None, None, None, None, 0, None, Call(Global("torch", "device"), ("cuda:0",)), False)
    spec = built(SPEC, mesh=built(MESH, **mesh), placements=("r", "s")[-dims:], _hash=1)
    state = {"_local_tensor": numbers(2), "_spec": spec}
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), (None, None, args, state))


def shown(value: Any) -> Any:  # noqa: ANN401
    """Return an attribute as plain values: tensors as their bytes and shape."""
    if isinstance(value, Call):
        tensor = tensor_of(value)
        if tensor is None:
            return shown(dict(entries_of(value)))
        content = tensor.storage.content
        return tensor.shape, content.data if isinstance(content, Literal) else None
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items()}
    return tuple(map(shown, value)) if isinstance(value, tuple) else value


def changed(mesh: dict[str, Any], ranks: int, rank: int, dims: int = 1) -> dict[str, Any]:
    """Return the attributes of a mesh for another count of ranks."""
    node = dtensor(mesh, dims)
    shape = MeshShape.of(node).for_ranks(ranks)
    made = MeshChange(shape, rank).dtensor(node, numbers(1))
    spec = entries_of(entries_of(made.args[3])["_spec"])
    assert spec["_hash"] is None
    assert made.args[2][6].args == ("cpu",)
    found: dict[str, Any] = shown(dict(entries_of(spec["mesh"])))
    assert found.pop("_hash") is None
    return found


@pytest.mark.parametrize("version", BY_VERSION)
def test_every_attribute_is_that_of_the_new_rank(version: str) -> None:
    saved = BY_VERSION[version]
    found = changed(saved, 3, 2)
    ranks = (0, 1, 2)
    wanted: dict[str, Any] = {
        "mesh": shown(numbers(3)), "_rank_map": shown(numbers(3)), "_rank": 2,
        "_flatten_mesh_list": ranks, "_flatten_rank_map": ranks, "_flatten_mapping": {},
        "_coordinate_on_dim": type(saved["_coordinate_on_dim"])([2]),
        "_dim_group_infos": [("", [0, 1, 2], "0")], "_dim_group_names": ["0"],
    }  # fmt: skip
    wanted = {key: wanted.get(key, value) for key, value in saved.items() if key != "_hash"}
    flat = {"shape": (3,), "stride": (1,)}
    if "_layout" in wanted:
        wanted["_layout"] = flat if version == "2.10" else {"axes": (flat,)}
    assert found == wanted


@pytest.mark.parametrize("version", HYBRID)
def test_replicas_lose_the_names_of_their_groups_alone(version: str) -> None:
    found = changed(HYBRID[version], 6, 3, 2)
    assert "_dim_group_names" not in found
    assert found["_coordinate_on_dim"] == [1, 1]
    if "mesh" in found:
        assert found["mesh"] == shown(numbers(3, 2))
    else:
        assert found["_layout"] == {"shape": (3, 2), "stride": (2, 1)}
    alone = changed(HYBRID[version], 2, 1, 2)
    assert alone["_coordinate_on_dim"] == [1]
    assert alone.get("mesh_dim_names", alone.get("_mesh_dim_names")) == ("fsdp",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_new": 1}, "a mesh with the attribute '_new': of a version of torch that is not"),
        ({"_root_mesh": 1}, "a part of another one"),
        ({"_flatten_rank_map": (1, 0, 2, 3)}, "in another order than their own"),
        ({"_layout": built(LAYOUT, axes=())}, "a mesh"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        changed({**BY_VERSION["2.13"], **change}, 3, 0)

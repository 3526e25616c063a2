"""Tensors as pickles describe them: what no storage can hold is refused."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.pickle.inert import Call, Global
from streamshard.formats.torch.torch_tensor import Storage, storage_from_id, tensor_of

V2 = Global("torch._utils", "_rebuild_tensor_v2")
V3 = Global("torch._utils", "_rebuild_tensor_v3")
FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
PARAMETER = Global("torch._utils", "_rebuild_parameter")
TENSOR = Global("torch", "Tensor")


def rebuilt(
    start: object, shape: object, stride: object, *, numel: int = 10, dtype: str = "float32"
) -> Call:
    return Call(V2, (Storage(dtype, numel), start, shape, stride, False, OrderedDict()))


@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=4),
    st.integers(0, 14),
)
def test_exactly_what_torch_can_see_is_accepted(
    numel: int, dimensions: list[tuple[int, int]], start: int
) -> None:
    shape, stride = [n for n, _ in dimensions], [step for _, step in dimensions]
    try:
        torch.as_strided(torch.zeros(numel), shape, stride, start)
        torch_accepts = True
    except RuntimeError:
        torch_accepts = False
    try:
        found = tensor_of(rebuilt(start, tuple(shape), tuple(stride), numel=numel))
    except CorruptFileError:
        assert not torch_accepts
    else:
        # torch minds where a tensor of nothing begins, and there is nothing to mind.
        assert torch_accepts or 0 in shape
        assert found is not None
        assert found.shape == tuple(shape)


LIES: dict[str, tuple[Any, Any, Any]] = {
    "a negative length": (0, (-1,), (1,)),
    "a negative stride": (9, (3,), (-1,)),
    "a negative start": (-1, (3,), (1,)),
    "more strides than lengths": (0, (3,), (1, 1)),
    "more dimensions than torch has": (0, (1,) * 65, (1,) * 65),
    "a length beyond any file": (0, (1 << 45,), (0,)),
    "a length beyond any integer": (0, (1 << 4000,), (1,)),
    "a product beyond any integer": (0, ((1 << 44) - 1,) * 3, (1,) * 3),
    "a shape that is not a tuple": (0, "abc", (1,)),
    "a shape of shapes": (0, ((1,),), (1,)),
    "a start that is none": (None, (3,), (1,)),
    "a float": (0, (3.0,), (1,)),
}


@pytest.mark.parametrize("name", LIES)
def test_refused(name: str) -> None:
    with pytest.raises(CorruptFileError, match=r"tensor with shape") as caught:
        tensor_of(rebuilt(*LIES[name]))
    assert len(str(caught.value)) < 1400


@pytest.mark.parametrize("outer", [PARAMETER, FROM_TYPE], ids=str)
def test_tensors_in_tensors_without_end(outer: Global) -> None:
    node: Any = rebuilt(0, (3,), (1,))
    for _ in range(100_000):
        node = Call(outer, (node,) if outer is PARAMETER else (outer, TENSOR, node.args, {}))
    assert tensor_of(node) is None


def test_a_dtype_that_is_not_known() -> None:
    args = rebuilt(0, (3,), (1,), dtype="uint8").args
    for dtype in (Global("torch", "float3"), 7, None):
        with pytest.raises(UnsupportedError, match=r"tensors of dtype"):
            tensor_of(Call(V3, (*args, dtype)))
    with pytest.raises(UnsupportedError, match=r"tensors of dtype None"):
        tensor_of(Call(V3, args))


@pytest.mark.parametrize(
    ("numel", "error"),
    [
        (-1, UnsupportedError),
        ("7", UnsupportedError),
        (1 << 45, CorruptFileError),
        (1 << 4000, CorruptFileError),
    ],
)
def test_storages_of_no_size_or_an_absurd_one(numel: object, error: type[Exception]) -> None:
    kind = Global("torch", "FloatStorage")
    with pytest.raises(error):
        storage_from_id(("storage", kind, "0", "cpu", numel))

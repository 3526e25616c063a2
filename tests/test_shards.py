"""Tensors shared out among files of limited size."""

from hypothesis import given
from hypothesis import strategies as st

from streamshard.operations.export.weight_files import shards


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 40))
def test_files_hold_as_much_as_they_may_and_no_more(sizes: list[int], most: int) -> None:
    found = shards(sizes, most)
    assert [index for one in found for index in one] == list(range(len(sizes)))
    held = [sum(sizes[index] for index in one) for one in found]
    for one, nbytes in zip(found, held, strict=True):
        assert nbytes <= most or len(one) == 1
    for nbytes, following in zip(held, found[1:], strict=False):
        assert nbytes + sizes[following.start] > most


def test_without_tensors_there_is_one_file() -> None:
    assert shards([], 5) == [range(0)]

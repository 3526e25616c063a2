"""Memory that is used again."""

from streamshard.engine.run.buffers import ReusableBuffer


def test_it_is_as_large_as_was_asked_for_and_the_same_where_it_suffices() -> None:
    kept = ReusableBuffer()
    large = kept(100)
    large[:] = bytes(range(100))
    small = kept(10)
    assert (len(large), len(small)) == (100, 10)
    assert bytes(small) == bytes(range(10))
    assert len(kept(101)) == 101

"""What holds of every resharding in a module's `RESHARDINGS`: `carry` does them, these look at it.

A module of tests imports those that it asks.
"""

from dataclasses import replace

import torch

from tests.oracle.compare import close, differences
from tests.oracle.files import digests, file_differences
from tests.oracle.reshardings import Places, Resharding
from tests.oracle.truth import Truth

__all__ = [
    "test_an_engine_that_loads_directly_holds_the_same",
    "test_both_roads_write_the_same_bytes",
    "test_deepspeed_would_have_written_the_same_files",
    "test_the_resumed_engine_holds_what_was_saved",
    "test_training_goes_on_as_if_uninterrupted",
]


def test_both_roads_write_the_same_bytes(one: Resharding, places: Places) -> None:
    assert digests(places.out(one)) == digests(places.out_of_store(one))


def test_the_resumed_engine_holds_what_was_saved(one: Resharding, places: Places) -> None:
    assert differences(*one.alike(places.saved(one), places.resumed(one))) == []


def test_deepspeed_would_have_written_the_same_files(one: Resharding, places: Places) -> None:
    tag = (places.out(one) / "latest").read_text()
    assert tag == (places.source(one) / "latest").read_text()
    found = file_differences(places.out(one) / tag, places.resaved(one) / tag)
    assert [line for line in found if not one.is_known(line)] == []


def test_an_engine_that_loads_directly_holds_the_same(one: Resharding, places: Places) -> None:
    """As after a conversion and a plain load; saved again, too."""
    if one.like is not None:
        return  # another checkpoint tells what is to be known
    converted, loaded = places.resaved(one), places.loaded(one)
    assert differences(places.resumed(one), Truth.load(places.truth_path(loaded))) == []
    tag = (places.out(one) / "latest").read_text()
    assert file_differences(converted / tag, loaded / tag) == []


def test_training_goes_on_as_if_uninterrupted(one: Resharding, places: Places) -> None:
    saved, expected, found = places.saved(one), places.uninterrupted(one), places.trained_on(one)
    assert found.counters["global_steps"] == saved.counters["global_steps"] + one.further_steps
    both = one.trained_alike(expected, found)
    if one.trains_alike:
        start, _ = one.trained_alike(_begun(saved, expected), found)
        assert close(*both, start=start, tolerance=one.noise) == []
    else:
        steps = [[group["scalars"] for group in truth.groups] for truth in both]
        assert steps[0] == steps[1]


def _begun(truth: Truth, later: Truth) -> Truth:
    """`truth` with the states that the first step makes out of nothing."""
    made = {
        state: {name: torch.zeros_like(value) for name, value in by_name.items()}
        for state, by_name in later.states.items()
    }
    return replace(truth, states={**made, **truth.states})

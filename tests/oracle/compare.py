"""Compare what two engines hold: bit for bit, or up to the noise of the reductions."""

from collections.abc import Iterator

import torch

from tests.oracle.truth import Truth
from tests.oracle.values import value_differences


def differences(a: Truth, b: Truth) -> list[str]:
    """Every difference between two truths; none means equal in every bit."""
    return list(value_differences(vars(a), vars(b), "truth"))


def close(a: Truth, b: Truth, *, start: Truth, tolerance: float) -> list[str]:
    """Where two continuations of `start` differ by more than the noise of the reductions.

    A tensor's distance is measured against how far it moved since `start`, so that a lost moment or
    a wrong bias correction shows however small the learning rate is. All that is not the result of
    floating-point reductions (steps, schedules, counters, frozen weights, buffers) must be equal.
    """
    found: list[str] = []
    for field in ("frozen", "buffers", "groups", "scaler", "scheduler", "counters"):
        found += value_differences(getattr(a, field), getattr(b, field), field)
    if a.states.keys() != b.states.keys():
        return [*found, f"states: {sorted(a.states)} != {sorted(b.states)}"]
    for (what, left), (_, right), (_, before) in zip(
        _tensors(a), _tensors(b), _tensors(start), strict=True
    ):
        off = relative_distance(left, right, before)
        if not off <= tolerance:  # so that NaN counts as different
            found.append(f"{what}: off by {off:.3g} of its movement, over {tolerance:.3g}")
    return found


def _tensors(truth: Truth) -> Iterator[tuple[str, torch.Tensor]]:
    """The masters and states; the weights are casts of masters, so their noise is one of steps."""
    for state, by_name in sorted(truth.states.items()):
        for name, tensor in sorted(by_name.items()):
            yield f"{state} of {name}", tensor


def relative_distance(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> float:
    """``|a - b| / |a - start|`` in the Euclidean norm; 0 when `a` equals `b`."""
    if torch.equal(a, b):
        return 0.0
    moved = torch.linalg.vector_norm((a - start).double())
    return float(torch.linalg.vector_norm((a - b).double()) / moved)

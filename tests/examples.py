"""Gives the examples in docstrings a checkpoint to read; a plugin, as they lie beside the tests."""

from dataclasses import replace
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _checkpoints_of_examples(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Let an example that reads `runs/7b`, or what else is there, find it."""
    node = request.node
    if not isinstance(node, pytest.DoctestItem) or "runs/7b" not in (node.dtest.docstring or ""):
        return
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.chdir(_made(tmp_path_factory.mktemp("examples")))


def _made(place: Path) -> Path:
    """Make a small checkpoint, and one of a later step."""
    # Not needed by those who run no examples, and slow to import.
    from tests.fabricated import write
    from tests.job import Job

    job = Job(
        stage=3,
        groups=((("layers.0.weight", (2048, 4)), ("layers.0.bias", (4,))),),
        frozen=(("old.weight", (2, 3)),),
        tied={"head.weight": "layers.0.weight"},
    )
    write(job, place / "runs" / "7b")
    later = replace(job, changed=("fp32", "layers.0.weight", 5))
    write(later, place / "runs" / "7b-again")
    return place

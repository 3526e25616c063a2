"""Our own readers pass the public tests that readers of other packages pass.

Those of Megatron and of FSDP's ranks pass them in test_megatron and test_fsdp_ranks_to_others.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from streamshard.testing.reader import MODULE, ReaderTests, SavedCheckpoint
from tests.fabricated import write
from tests.fabricated_dcp import Saved, adamw, mesh
from tests.fabricated_universal import write_universal
from tests.job import Job, buffers, expected

Tensors = Mapping[str, Mapping[str, NDArray[Any]]]
PLAIN = Job(
    groups=((("embed.weight", (5, 4)), ("mlp", (3, 2, 4))), (("bias", (3,)),)), frozen=(), tied={}
)
"""A model of which a reference tells nothing that a distributed checkpoint does not."""
WHOLE_JOB = replace(PLAIN, frozen=(("old", (3,)),), tied={"head.weight": "embed.weight"})


def made_of(job: Job, **options: Any) -> Saved:  # noqa: ANN401
    cut = {name: mesh(shape, [2] * len(shape)) for name, shape in job.shapes.items()}
    groups = [[name for name, _ in group] for group in job.groups]
    return adamw(job.shapes, cut=cut, buffers=buffers(), groups=groups, **options)


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    is_bfloat16 = tensor.dtype == torch.bfloat16
    found: NDArray[Any] = (tensor.view(torch.int16) if is_bfloat16 else tensor).numpy()
    return found


def of_job(job: Job) -> Tensors:
    """Say what is kept of each parameter and buffer of a job."""
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for (state, name), tensor in expected(job).items():
        found.setdefault(name, {})[state] = bits(tensor)
    return found


def of_distributed(made: Saved) -> Tensors:
    """Say what is kept of each parameter and buffer of a distributed checkpoint."""
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for key, (tensor, _) in made.tensors.items():
        path = [str(part) for part in made.paths[key]]
        if "state" not in path:
            state = "fp32" if path[-1] in PLAIN.shapes else MODULE
            found.setdefault(path[-1], {})[state] = bits(tensor)
        elif path[-1] != "step":
            found.setdefault(path[-2], {})[path[-1]] = bits(tensor)
    return found


class ReadingTests(ReaderTests):
    """What is asked of each reader. What follows when all is read is asked of one."""

    test_a_view_has_the_bytes_of_a_store = None  # type: ignore[assignment]
    test_the_mean_of_two_copies_is_each_of_them = None  # type: ignore[assignment]
    test_a_command_that_is_killed_goes_on = None  # type: ignore[assignment]


class TestUniversal(ReadingTests):
    kind = "universal"
    is_whole = has_sums = True

    @pytest.fixture
    def saved(self, tmp_path: Path) -> SavedCheckpoint:
        made = write_universal(WHOLE_JOB, tmp_path / "run")
        return SavedCheckpoint(made, of_job(WHOLE_JOB))


class TestDistributed(ReaderTests):
    kind = "dcp"
    has_sums = True

    @pytest.fixture
    def saved(self, tmp_path: Path) -> SavedCheckpoint:
        made = made_of(PLAIN)
        made.write(tmp_path / "dcp")
        like = write(PLAIN, tmp_path / "run")
        return SavedCheckpoint(tmp_path / "dcp", of_distributed(made), like)


class TestWeights(ReadingTests):
    kind = "weights"

    @pytest.fixture
    def saved(self, tmp_path: Path) -> SavedCheckpoint:
        weights = {
            "up": torch.randn(5, 3),
            "count": torch.arange(4),
            "one": torch.ones(()),
        }
        place = tmp_path / "model"
        place.mkdir()
        parts = {"model-00001-of-00002.safetensors": ["up"]}
        parts["model-00002-of-00002.safetensors"] = ["count", "one"]
        for file, names in parts.items():
            save_file({name: weights[name] for name in names}, place / file)
        where = {name: file for file, names in parts.items() for name in names}
        index = {"metadata": {}, "weight_map": where}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
        return SavedCheckpoint(place, {name: {MODULE: bits(t)} for name, t in weights.items()})

"""Finds out among how many ranks tensor and pipeline parallelism cut a checkpoint's model."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from streamshard.errors import DisagreementError, Option
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Node, show

TENSOR_PARALLEL: Final = "tensor_parallel"
"""Section of the DeepSpeed config that holds the tensor parallel degree."""
AS_SAVED: Final = "Resume at the tensor and pipeline parallel degrees that saved it"
"""What to do about a checkpoint whose degrees cannot change."""
LAYER_FILE: Final = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
"""A layer of a pipeline; its tensor rank, if the grid of ranks has a `model` axis
(`PipelineModule.ckpt_layer_path`, 0.19.8)."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many ranks share a replica of the model, and as what."""

    tensor: int
    pipeline: int

    @property
    def parts(self) -> int:
        """Count of model-parallel ranks. Rank m is of stage m // tensor."""
        return self.tensor * self.pipeline

    @property
    def options(self) -> dict[str, str]:
        return {"tensor_parallel": f"{self.tensor}", "pipeline_parallel": f"{self.pipeline}"}

    def position(self, part: int) -> str:
        """Name the place of a part of the model; empty if it is the only one.

        >>> Degrees(2, 3).position(5), Degrees(2, 1).position(1)
        ('stage 2 of 3, tensor rank 1 of 2', 'tensor rank 1 of 2')
        """
        stage, rank = divmod(part, self.tensor)
        axes = (("stage", stage, self.pipeline), ("tensor rank", rank, self.tensor))
        return ", ".join(f"{what} {at} of {count}" for what, at, count in axes if count > 1)

    def __str__(self) -> str:
        """Return both degrees as options."""
        asked = Option("tensor_parallel", self.tensor), Option("pipeline_parallel", self.pipeline)
        return " ".join(map(str, asked))


def is_pipeline(checkpoint: Checkpoint) -> bool:
    """Tell whether the weights of each layer are in a separate file."""
    return is_stage(checkpoint.model_parts[0].model_state)


def is_stage(model_state: Mapping[str, Node]) -> bool:
    return names.MODULE_STATE in model_state and model_state[names.MODULE_STATE] is None


def _layer_files(checkpoint: Checkpoint) -> set[str]:
    found = {PurePosixPath(file.path).name for file in checkpoint.files}
    found |= {layer.name for layer in checkpoint.layers}
    return {name for name in found if name.startswith("layer_") and names.parse(name)}


def layer_numbers(checkpoint: Checkpoint) -> set[int]:
    return {int(match[1]) for match in map(LAYER_FILE.fullmatch, _layer_files(checkpoint)) if match}


def known_degrees(checkpoint: Checkpoint) -> Degrees | None:
    """Return the degrees with which a checkpoint was saved; None if its files disagree."""
    with suppress(DisagreementError):
        return degrees_of(checkpoint)
    return None


def degrees_of(checkpoint: Checkpoint) -> Degrees:
    """Return the degrees with which a checkpoint was saved.

    DeepSpeed saves them since 0.19.5; before, only the files show them.
    """
    parts, tensor = len(checkpoint.model_parts), len(checkpoint.model_parts)
    if is_pipeline(checkpoint):
        matches = filter(None, map(LAYER_FILE.fullmatch, _layer_files(checkpoint)))
        tensor = max((int(match[2] or 0) + 1 for match in matches), default=1)
    degrees = Degrees(tensor, parts // tensor)
    said = checkpoint.model_parts[0].model_state.get(names.PARALLEL_DEGREES)
    if isinstance(said, dict):
        saved = said.get("tp_degree"), said.get("pp_degree")
        if saved != (degrees.tensor, degrees.pipeline) or degrees.parts != parts:
            message = f"its '{names.PARALLEL_DEGREES}' are {show(list(saved))}"
            raise DisagreementError(f"{message}, and its files are those of {degrees}")
    elif degrees.parts != parts:
        raise DisagreementError(f"{parts} parts of the model, and layers in {tensor} parts")
    return degrees

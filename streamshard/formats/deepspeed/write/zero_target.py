"""Describes the target for the writers of a native checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.formats.deepspeed.cut.part_cut import PartCut
from streamshard.model import ZeroLayout


@dataclass(frozen=True, slots=True)
class ZeroTarget:
    """A model part of a checkpoint, and its partitioning in the target."""

    checkpoint: Checkpoint
    model_part: ModelPart
    mp_rank: int
    """Number of the model part."""
    layout: ZeroLayout
    config: Mapping[str, Any]
    """DeepSpeed config that the files will hold."""
    module_dtype: str
    is_bf16: bool
    """Whether the resuming engine has bf16 on: it then looks for other file names."""
    cut: PartCut
    """How the layout cuts the model part."""
    index: Mapping[tuple[str, str, str], int]
    """The checkpoint's `tensor_index`."""

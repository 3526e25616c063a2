"""Describes the target for the writers of a native checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamshard.formats.checkpoint import Checkpoint, Family
from streamshard.formats.deepspeed.cut.family_cut import FamilyCut
from streamshard.model import ZeroLayout


@dataclass(frozen=True, slots=True)
class ZeroTarget:
    """A family of a checkpoint, and its partitioning in the target."""

    checkpoint: Checkpoint
    family: Family
    mp_rank: int
    """Number of the family."""
    layout: ZeroLayout
    config: Mapping[str, Any]
    """DeepSpeed config that the files will hold."""
    module_dtype: str
    is_bf16: bool
    """Whether the resuming engine has bf16 on: it then looks for other file names."""
    cut: FamilyCut
    """How the layout cuts the family."""
    index: Mapping[tuple[str, str, str], int]
    """The checkpoint's `tensor_index`."""

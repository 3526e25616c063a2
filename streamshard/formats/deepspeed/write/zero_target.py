"""Describes the target for the writers of a native checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamshard.formats.checkpoint import Checkpoint, Family
from streamshard.model import FlatCut, SubGroup, ZeroLayout


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
    flat_cuts: Sequence[FlatCut]
    """One per param group of the family (stages 1 and 2)."""
    sub_groups: Sequence[SubGroup]
    """Across all param groups of the family (stage 3)."""

"""What the writers of a native checkpoint need to know of their target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamshard.formats.checkpoint import Checkpoint
from streamshard.model import FlatCut, SubGroup, ZeroLayout


@dataclass(frozen=True, slots=True)
class ZeroTarget:
    """A checkpoint, and how it is to be cut."""

    checkpoint: Checkpoint
    layout: ZeroLayout
    config: Mapping[str, Any]
    """DeepSpeed config that the files will hold."""
    module_dtype: str
    is_bf16: bool
    """Whether the engine that resumes has bf16 switched on: it looks for other file names."""
    flat_cuts: Sequence[FlatCut]
    """One per param group (stages 1 and 2)."""
    sub_groups: Sequence[SubGroup]
    """Across all param groups (stage 3)."""

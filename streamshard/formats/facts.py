"""What a user knows of a checkpoint or of a job, and the checkpoint's files do not say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from streamshard.formats.deepspeed.ds_config import Config
from streamshard.formats.deepspeed.ds_versions import Version


@dataclass(frozen=True, slots=True)
class RuleLines:
    """Lines of rules, which their readers understand."""

    text: str
    name: str
    """Where they are, for messages."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a user says of a checkpoint and of the job that will resume."""

    ds_config: Config | None = None
    """Of the job that saved raw dumps, which hold none."""
    rename: RuleLines | None = None
    """Rules that give the tensors of a distributed checkpoint other names."""
    wrapped: Sequence[str] = ()
    """Patterns of the modules that FSDP1 wrapped."""
    cut_rules: RuleLines | None = None
    """Rules for how tensor parallelism cut the parameters."""
    ds_version: Version | None = None
    """Version of DeepSpeed in the job that will resume."""


NO_FACTS: Final = Facts()

"""Sums up what `inspect` found in a few lines: what the checkpoint is, and who saved it."""

from collections.abc import Sequence
from typing import Final

from streamshard.cli.text.escaping import printable
from streamshard.cli.text.tables import facts_text
from streamshard.operations.inspect.inspect_report import KINDS, IncompleteCheckpoint, Inspection
from streamshard.sizes import show_bytes

FOREIGN: Final = ("dcp", "weights")
"""Kinds of sources that are not of DeepSpeed."""


def incomplete_summary(found: IncompleteCheckpoint) -> str:
    """Sum up a checkpoint of which something is missing."""
    stage = (
        "ZeRO stage not recorded" if found.zero_stage is None else f"ZeRO stage {found.zero_stage}"
    )
    return _shown(
        [
            ("checkpoint", f"{found.path} ({KINDS[found.kind]}), NOT WHOLE"),
            ("tag", found.tag or "not known"),
            ("saved by", f"{stage}, world size {found.world_size or 'not recorded'}"),
            ("DeepSpeed", found.deepspeed_version or "version not recorded"),
            ("steps", "not recorded" if found.global_steps is None else f"{found.global_steps:,}"),
            ("on disk", f"{found.files:,} files, {show_bytes(found.file_bytes)}"),
        ]
    )


def summary(found: Inspection, *, brief: bool) -> str:
    """Sum up a whole checkpoint; if brief, only which one it is."""
    facts: list[tuple[str, object]] = [
        ("checkpoint", f"{found.path} ({_format(found)})"),
        ("tag", found.tag),
        ("saved by", f"{_stage(found)}, world size {found.ranks_text}"),
    ]
    if found.kind in FOREIGN:
        return _foreign_summary(found, facts[:2], brief=brief)
    if not brief:
        numel = sum(group.numel for group in found.groups)
        states = dict.fromkeys(key for group in found.groups for key in group.states)
        counts = {"buffer": found.buffers, "tied name": len(found.tied)}
        also = [f"{count:,} {what}{'s' * (count != 1)}" for what, count in counts.items()]
        facts += [
            ("DeepSpeed", found.deepspeed_version or "version not recorded"),
            ("dtypes", _dtypes(found)),
            ("steps", _steps(found)),
            ("optimizer", found.optimizer or "type not recorded"),
            ("states", ", ".join(states) or ("dropped" if found.weights_only else "none yet")),
            ("parameters", f"{len(found.parameters):,} trained, {numel:,} elements"),
            ("also", ", ".join([f"{found.frozen:,} frozen", *also])),
        ]
        if not found.zero_stage:
            facts[-3:] = _uncut_facts(found, also)
        facts += [
            ("on disk", f"{found.files:,} files, {show_bytes(found.file_bytes)}"),
        ]
    return _shown(facts)


def _foreign_summary(found: Inspection, facts: list[tuple[str, object]], *, brief: bool) -> str:
    """Return facts of a checkpoint that is not of DeepSpeed."""
    numel = sum(group.numel for group in found.groups)
    states = dict.fromkeys(key for group in found.groups for key in group.states)
    on_disk = ("on disk", f"{found.files:,} files, {show_bytes(found.file_bytes)}")
    if not brief and not found.groups:
        facts += [
            ("dtypes", found.module_dtype or "not recorded"),
            ("weights", _uncertain(found)),
            on_disk,
        ]
    elif not brief:
        facts += [
            ("dtypes", found.module_dtype or "not recorded"),
            ("states", ", ".join(states) or "none"),
            ("parameters", f"{len(found.parameters):,} trained, {numel:,} elements"),
            ("also", f"{found.weights:,} that are not trained: frozen weights or buffers"),
            on_disk,
        ]
    return _shown(facts)


def _uncertain(found: Inspection) -> str:
    return f"{found.weights:,}, the files do not say which of them are trained"


def _stage(found: Inspection) -> str:
    return f"ZeRO stage {found.zero_stage}" if found.zero_stage else "DeepSpeed without ZeRO"


def _uncut_facts(found: Inspection, also: Sequence[str]) -> list[tuple[str, object]]:
    """Return facts of a checkpoint without ZeRO (stage 0), whose files do not record everything."""
    return [
        ("states", "whole, in the model file, by number of the parameter"),
        ("parameters", _uncertain(found)),
        ("also", ", ".join(also)),
    ]


def _format(found: Inspection) -> str:
    return KINDS[found.kind] + (f", {found.codec}" if found.codec else "")


def _dtypes(found: Inspection) -> str:
    if not found.zero_stage:
        return found.module_dtype or "not recorded"
    masters = ", ".join(sorted({group.master_dtype for group in found.groups})) or "none"
    return f"{found.module_dtype or 'not recorded'}, master weights {masters}"


def _steps(found: Inspection) -> str:
    steps = "not recorded" if found.global_steps is None else f"{found.global_steps:,}"
    if found.skipped_steps:
        steps += f" ({found.skipped_steps:,} skipped)"
    return steps + (f", {found.global_samples:,} samples" if found.global_samples else "")


def _shown(facts: Sequence[tuple[str, object]]) -> str:
    return printable(facts_text(facts))

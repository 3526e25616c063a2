"""Runs DeepSpeed's own converter to universal checkpoints."""

import importlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.oracle.ranks import older_deepspeed, require_success, run_jobs


@dataclass(frozen=True)
class ToUniversal:
    """Convert a tag."""

    tag_dir: Path
    out: Path


def convert(job: ToUniversal) -> None:
    """Do it in a rank, which has imported DeepSpeed already."""
    converter: Any = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    sys.argv = [
        *("ds_to_universal", "--inject_missing_state", "--no_strict"),
        *("--input_folder", str(job.tag_dir), "--output_folder", str(job.out)),
        *("--num_extract_workers", "1", "--num_merge_workers", "1"),
    ]
    converter.main(converter.parse_arguments())


def universal_of(run_dir: Path, out: Path, version: str = "") -> Path:
    """Convert a checkpoint; returns the directory of the result.

    `version`: DeepSpeed's; by default the installed one.
    """
    job = ToUniversal(run_dir / (run_dir / "latest").read_text(), out)
    at = older_deepspeed(version) if version else None
    with tempfile.TemporaryDirectory() as place:
        require_success(run_jobs(1, [job], Path(place), convert, at))
    return out

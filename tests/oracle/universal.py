"""Runs DeepSpeed's own converter to universal checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

from tests.oracle.ranks import WITH_OLDER, older_deepspeed


def universal_of(run_dir: Path, out: Path, version: str = "") -> Path:
    """Convert a checkpoint; returns the directory of the result.

    `version`: DeepSpeed's; by default the installed one.
    """
    tag = (run_dir / "latest").read_text()
    command = [
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
        *("--input_folder", str(run_dir / tag), "--output_folder", str(out)),
        *("--num_extract_workers", "1", "--num_merge_workers", "1", "--no_strict"),
    ]
    older = {"PYTHONPATH": str(older_deepspeed(version)), **WITH_OLDER} if version else {}
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", **older}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out

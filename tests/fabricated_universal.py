"""Universal checkpoints, which DeepSpeed's own converter makes of fabricated ones."""

from argparse import Namespace
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal

from tests.fabricated import write
from tests.job import TAG, Job

UNIVERSAL = f"{TAG}_universal"


def convert(run_dir: Path) -> Path:
    """Convert a run's tag; returns the directory next to it."""
    out = run_dir / UNIVERSAL
    ds_to_universal.main(
        Namespace(
            input_folder=str(run_dir / TAG),
            output_folder=str(out),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    return out


def write_universal(job: Job, run_dir: Path) -> Path:
    """Save a run and convert it; returns the converted directory, next to what it was made from."""
    return convert(write(job, run_dir))

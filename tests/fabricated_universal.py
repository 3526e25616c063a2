"""Universal checkpoints, which DeepSpeed's own converter makes of fabricated ones."""

from argparse import Namespace
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal

from tests.fabricated import key_of, write
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


_MADE: dict[bytes, dict[Path, bytes]] = {}
"""A job, saved → path and content of what its run is converted to: many tests convert the same."""


def write_universal(job: Job, run_dir: Path) -> Path:
    """Save a run and convert it; returns the converted directory, next to what it was made from."""
    out, key = write(job, run_dir) / UNIVERSAL, key_of(job)
    if key not in _MADE:
        found = (run_dir / "latest_universal", *convert(run_dir).rglob("*"))
        files = (path for path in found if path.is_file())
        _MADE[key] = {path.relative_to(run_dir): path.read_bytes() for path in files}
        return out
    for path, content in _MADE[key].items():
        (run_dir / path).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / path).write_bytes(content)
    return out

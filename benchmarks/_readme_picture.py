"""Draws the picture in the README: `python -m benchmarks._readme_picture`."""

import argparse
import tempfile
from pathlib import Path
from typing import Final

import streamshard
from benchmarks._fabricate import fabricate
from benchmarks._model import Model

PICTURE: Final = Path("docs/cut.svg")
_MODEL: Final = Model(
    groups=(
        {
            "embed.weight": (10, 6),
            "layers.0.attention": (6, 6),
            "layers.0.mlp": (5, 10),
            "layers.0.norm": (12,),
        },
    )
)


def draw(file: Path) -> None:
    """Save a small model on 4 ranks, and draw how it is cut there and on 3."""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        fabricate(run, _MODEL, stage=2, world_size=4)
        file.parent.mkdir(parents=True, exist_ok=True)
        streamshard.inspect(run, svg=file, world_size=3, overwrite=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=PICTURE)
    draw(parser.parse_args().file)

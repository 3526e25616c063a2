"""Ways to make a checkpoint a stranger's: what tests put into its files."""

import os
import zipfile
from pathlib import Path
from typing import Any

from tests.job import TAG

MIB = 1 << 20
MODEL = f"{TAG}/mp_rank_00_model_states.pt"
OPTIMIZER = f"{TAG}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"

Content = dict[str, Any]


def optimizer_files(run: Path) -> list[Path]:
    """List the optimizer files of both ranks."""
    return [run / OPTIMIZER.replace("rank_1", f"rank_{rank}") for rank in (0, 1)]


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def laughs(times: int = 40) -> list[Any]:
    """Make a list that holds 2^times others, in a few bytes each."""
    node: list[Any] = ["ha"]
    for _ in range(times):
        node = [node, node]
    return node


def levels(count: int) -> list[Any]:
    """Make lists in each other."""
    node: list[Any] = []
    for _ in range(count):
        node = [node]
    return node


def in_itself() -> list[Any]:
    node: list[Any] = []
    node.append(node)
    return node


def with_pickle(path: Path, pickled: bytes) -> None:
    """Put another pickle into a torch file."""
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w") as target:
        for name, data in records.items():
            target.writestr(name, pickled if name.endswith("data.pkl") else data)


def elsewhere(path: Path) -> Path:
    """Move a file out of the checkpoint, and leave a link to it."""
    run = path.parent if path.name == "latest" else path.parents[1]
    place = run.with_name("elsewhere") / path.name
    place.parent.mkdir(exist_ok=True)
    path.rename(place)
    path.symlink_to(place)
    return place

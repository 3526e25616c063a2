"""How long does it take to plan other tensor and pipeline parallel degrees, and how much memory?

Sparse files stand in for the data, as for `plan_at_scale`. A job of 80 layers is on 8 stages x 8
tensor-parallel x 16 data-parallel ranks, or on 16 tensor-parallel x 64 data-parallel ones; the job
that resumes has half of each degree, and what it saved before its first step is the reference.
`python -m benchmarks.degrees_at_scale` prints seconds and peak memory.
"""

import argparse
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks._fabricate import copy_renamed, save_with_holes
from benchmarks._layout import TAG, Leaf, NativeLayout, Stored
from benchmarks._measure import STREAMSHARD, succeed
from benchmarks._model import MODULE, Model, Run, Shape

_MIB = 1 << 20
_HIDDEN: Final = 768
_PLAN = """
import json, sys
from dataclasses import asdict
import streamshard.cli.main
source, target, like, world_size, tensor, pipeline = sys.argv[1:]
plan = streamshard.plan_repartition(
    source, target, like=like, world_size=int(world_size), tensor_parallel=int(tensor),
    pipeline_parallel=int(pipeline), memory_limit=16 << 30,
)
print(json.dumps(asdict(plan.report)))
"""
_ROWS: Final = ("dense.weight", "down.weight")
_WHOLE: Final = ("norm.weight", "norm.bias", "dense.bias", "down.bias")


@dataclass(frozen=True, slots=True)
class Grid:
    """Degrees of a job."""

    layers: int
    stages: int
    tensor: int
    data: int

    @property
    def ranks(self) -> int:
        """Count of all ranks."""
        return self.stages * self.tensor * self.data

    def of_layer(self, layer: int) -> Iterator[tuple[str, Shape]]:
        """Yield what a tensor-parallel rank has of a layer."""
        h, own = _HIDDEN, _HIDDEN // self.tensor
        at = str(layer) if self.stages > 1 else f"layers.{layer}"
        for norm in ("first_norm", "last_norm"):
            yield from ((f"{at}.{norm}.weight", (h,)), (f"{at}.{norm}.bias", (h,)))
        yield from ((f"{at}.qkv.weight", (3 * own, h)), (f"{at}.qkv.bias", (3 * own,)))
        yield from ((f"{at}.dense.weight", (h, own)), (f"{at}.dense.bias", (h,)))
        yield from ((f"{at}.up.weight", (4 * own, h)), (f"{at}.up.bias", (4 * own,)))
        yield from ((f"{at}.down.weight", (h, 4 * own)), (f"{at}.down.bias", (h,)))

    def of_stage(self, stage: int) -> range:
        """Return the layers of a stage."""
        each = self.layers // self.stages
        return range(stage * each, (stage + 1) * each)

    def model(self, stage: int) -> Model:
        """Return what a rank of a stage trains: matrices with weight decay, vectors without."""
        held = [one for layer in self.of_stage(stage) for one in self.of_layer(layer)]
        groups = tuple(
            {name: shape for name, shape in held if (len(shape) > 1) == is_matrix}
            for is_matrix in (True, False)
        )
        return Model(groups)

    def told(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a model file that tells of the degrees, and how parameters are cut."""
        info = {
            "tp_replicated_parameter_patterns": [rf".*{name}$" for name in _WHOLE],
            "parameter_with_row_parallelism_patterns": [rf".*\.{name}$" for name in _ROWS],
        }
        module = {"module": None} if self.stages > 1 else {}
        return {
            **content,
            **module,
            "mp_world_size": self.stages * self.tensor,
            "checkpoint_parallel_dimensions": {"pp_degree": self.stages, "tp_degree": self.tensor},
            "universal_checkpoint_info": info,
        }


def fabricate(run_dir: Path, grid: Grid) -> None:
    """Write a run directory; files of the ranks of a stage differ in their names alone."""
    (run_dir / TAG).mkdir(parents=True)
    for stage in range(grid.stages):
        first = stage * grid.tensor
        for relative, tree in NativeLayout(grid.model(stage), 1, grid.data).files():
            is_model = relative.endswith("model_states.pt")
            path = run_dir / relative.replace("mp_rank_00", f"mp_rank_{first:02d}")
            save_with_holes(path, grid.told(tree) if is_model else tree)
            for rank in range(first + 1, first + grid.tensor):
                copy_renamed(path, (f"mp_rank_{first:02d}", f"mp_rank_{rank:02d}"))
        for layer in grid.of_stage(stage) if grid.stages > 1 else ():
            path = run_dir / TAG / f"layer_{layer:02d}-model_00-model_states.pt"
            save_with_holes(path, _layer(grid, layer))
            for rank in range(1, grid.tensor):
                copy_renamed(path, ("-model_00", f"-model_{rank:02d}"))
    (run_dir / "latest").write_text(TAG)


def _layer(grid: Grid, layer: int) -> OrderedDict[str, Any]:
    held = OrderedDict[str, Any]()
    for name, shape in grid.of_layer(layer):
        run = Run(MODULE, name, 0, torch.Size(shape).numel())
        held[name.partition(".")[2]] = Leaf(Stored(torch.bfloat16, (run,)), 0, shape)
    return held


FULL = [
    (Grid(80, 8, 8, 16), Grid(80, 4, 8, 1)),
    (Grid(80, 8, 8, 16), Grid(80, 4, 4, 1)),
    (Grid(80, 1, 16, 64), Grid(80, 1, 8, 1)),
]
SHORT = [(Grid(8, 4, 2, 4), Grid(8, 2, 1, 1)), (Grid(8, 1, 4, 4), Grid(8, 1, 2, 1))]


def main() -> None:
    """Fabricate, plan, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a small form, for a quick look")
    parser.add_argument("--dir", type=Path, help="where to fabricate [a temporary directory]")
    arguments = parser.parse_args()
    start = succeed(*STREAMSHARD, "--help")
    print(
        "layers  stages x tensor x data              seconds  of CPU  start-up  MiB above the floor"
    )
    for source, like in SHORT if arguments.short else FULL:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
            places = [Path(directory, name) for name in ("run", "out", "like")]
            fabricate(places[0], source)
            fabricate(places[2], like)
            _report(source, like, places, start.seconds)


def _report(source: Grid, like: Grid, places: list[Path], start_seconds: float) -> None:
    data = source.ranks // (like.stages * like.tensor)
    degrees = (like.stages * like.tensor * data, like.tensor, like.stages)
    done = succeed(sys.executable, "-c", _PLAN, *places, *map(str, degrees))
    above = (done.peak_bytes - done.report["floor_bytes"]) / _MIB
    moved = (source.stages, source.tensor, source.data), (like.stages, like.tensor, data)
    shown = " -> ".join(" x ".join(map(str, degrees)) for degrees in moved)
    print(
        f"{source.layers:6}  {shown:35}  {done.seconds:7.1f}  {done.cpu_seconds:6.1f}"
        f"  {start_seconds:8.2f}  {above:19.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()

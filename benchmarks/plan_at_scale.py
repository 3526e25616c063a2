"""How long does planning take for thousands of ranks or parameters, and how much memory?

Sparse files stand in for the data, so that a checkpoint of terabytes fits on any disk: planning
reads headers only. `python -m benchmarks.plan_at_scale` prints seconds and peak memory; the headers
of 4,096 ranks of stage 3 take 7 GB of disk.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks._fabricate import fabricate
from benchmarks._measure import STREAMSHARD, succeed
from benchmarks._model import Model, Shape

_MIB = 1 << 20
_PLAN = """
import json, sys
from dataclasses import asdict
import streamshard.cli.main
source, target, world_size = sys.argv[1:]
if world_size:
    plan = streamshard.plan_repartition(
        source, target, world_size=int(world_size), memory_limit=16 << 30
    )
else:
    plan = streamshard.plan_convert(source, target, memory_limit=16 << 30)
print(json.dumps(asdict(plan.report)))
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """One question: this many parameters, from N to M ranks."""

    params: int
    source: int
    target: int
    stage: int


FULL = [
    Scale(params, source, target, stage)
    for params, source, target in ((2_000, 1_024, 768), (20_000, 64, 48), (5_000, 4_096, 3_072))
    for stage in (2, 3)
]
SHORT = [Scale(200, 64, 48, stage) for stage in (2, 3)]


def model(params: int) -> Model:
    """Make up a model of a billion elements: what is planned must fit the disk, or is refused."""
    rows = 1_000_003_000 // params // 1_021
    shapes: dict[str, Shape] = {f"layers.{n}.weight": (rows, 1_021) for n in range(params)}
    half = params // 2
    names = list(shapes)
    groups = tuple({name: shapes[name] for name in part} for part in (names[:half], names[half:]))
    return Model(groups, buffers={"scale": (16,)})


def main() -> None:
    """Fabricate, plan, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a small form, for a quick look")
    parser.add_argument("--dir", type=Path, help="where to fabricate [a temporary directory]")
    arguments = parser.parse_args()
    if arguments.dir is not None and not arguments.dir.is_dir():
        parser.error(f"{arguments.dir}: is no directory")
    print(
        "stage  params  ranks         verb         seconds  of CPU  start-up  MiB above the floor"
    )
    for scale in SHORT if arguments.short else FULL:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
            run = Path(directory, "run")
            fabricate(
                run, model(scale.params), stage=scale.stage, world_size=scale.source, sparse=True
            )
            _report(scale, run)


def _report(scale: Scale, run: Path) -> None:
    start = succeed(*STREAMSHARD, "--help")
    verbs = {
        "repartition": (run.with_name("out"), str(scale.target)),
        "convert": (run.with_name("out.zarr"), ""),
    }
    for verb, (out, world_size) in verbs.items():
        # A dry run would also look at the disk, which takes a second whatever there is to plan.
        done = succeed(sys.executable, "-c", _PLAN, run, out, world_size)
        above = (done.peak_bytes - done.report["floor_bytes"]) / _MIB
        ranks = f"{scale.source} -> {scale.target}" if world_size else str(scale.source)
        print(
            f"{scale.stage:5}  {scale.params:6}  {ranks:12}  {verb:11}  {done.seconds:7.1f}"
            f"  {done.cpu_seconds:6.1f}  {start.seconds:8.2f}  {above:19.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

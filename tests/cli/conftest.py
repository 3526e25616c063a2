"""Small checkpoints to try the command line on, and a way to run it."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks._fabricate import fabricate
from benchmarks._layout import TAG
from benchmarks._model import transformer
from streamshard.cli.main import main
from streamshard.cli.parser import parse_command
from streamshard.engine.run import phases
from tests.fabricated import write
from tests.forked import Finished, run_forked
from tests.job import Job

RANKS = 4

_PHASES = (
    phases.READING_HEADERS,
    phases.WRITING,
    phases.SYNCING,
    phases.VERIFYING,
    phases.COMPARING,
    phases.COMMITTING,
    phases.READING,
)
_PROGRESS = re.compile(
    rf"^streamshard: (?:\S+: )?(?:{'|'.join(_PHASES)})(?: \d+%, .*)?\n", re.MULTILINE
)


def without_progress(shown: str) -> str:
    """Leave out the lines that a run writes if the machine is so busy that it takes seconds."""
    return _PROGRESS.sub("", shown)


def streamshard(*arguments: object, script: str = "") -> Finished:
    """Run the command line, or a script, in a process of its own; leave its progress out."""
    done = run_forked(*map(str, arguments), script=script)
    return checked(replace(done, err=without_progress(done.err)))


def checked(done: Finished) -> Finished:
    """Require that the commands that a run shows are valid ones, each at the end of a line."""
    text = done.err if done.out.startswith("{") else f"{done.out}\n{done.err}"
    for shown in re.findall(
        r"(?<!usage)(?<!Example): (streamshard [a-z]+ .*)$", text, re.MULTILINE
    ):
        parse_command(shlex.split(shown)[1:])
    return done


@pytest.fixture
def in_process(capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Run the command line in this process, which takes a fraction of the time."""

    def run(*arguments: object) -> Finished:
        try:
            code = main([*map(str, arguments)])
        except SystemExit as exit:
            code = int(exit.code or 0)
        done = capsys.readouterr()
        return checked(Finished(code, done.out, without_progress(done.err)))

    return run


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Make a checkpoint of a stage once; not to be changed."""
    root = tmp_path_factory.mktemp("saved")
    for stage in (2, 3):
        fabricate(
            root / str(stage),
            transformer(1 << 20, stage=stage, layers=4),
            stage=stage,
            world_size=RANKS,
        )
    return lambda stage: root / str(stage)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small checkpoint that a test may change."""
    return write(Job(stage=2), tmp_path / "run")


@pytest.fixture
def stage_2(saved: Callable[[int], Path], tmp_path: Path) -> Path:
    """A run directory of stage 2 that a test may damage."""
    return Path(shutil.copytree(saved(2), tmp_path / "run"))


@pytest.fixture
def stage_3(saved: Callable[[int], Path], tmp_path: Path) -> Path:
    """A run directory of stage 3 that a test may damage."""
    return Path(shutil.copytree(saved(3), tmp_path / "run"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, if this process may mount one."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def optimizer_file(run_dir: Path, rank: int) -> Path:
    """Where a rank's optimizer file lies."""
    return run_dir / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_file(run_dir: Path, rank: int | None = None) -> Path:
    """Where a model file lies: the shared one, or a rank's in stage 3."""
    name = "mp_rank_00" if rank is None else f"zero_pp_rank_{rank}_mp_rank_00"
    return run_dir / TAG / f"{name}_model_states.pt"


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a directory with its bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }

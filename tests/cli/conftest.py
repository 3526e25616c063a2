"""Small checkpoints to try the command line on, and a way to run it."""

import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import MappingProxyType

import pytest

from benchmarks._fabricate import fabricate
from benchmarks._model import transformer
from streamshard.cli.main import main
from streamshard.cli.parser import parse_command
from streamshard.engine.run import phases
from tests.fabricated import write
from tests.forked import Finished, run_forked
from tests.job import TAG, Job

RANKS = 4
Saved = Callable[[int], Path]

OUTPUTS = (
    "repartition --world-size 3",
    "convert --chunk-size 200000",
    "convert --codec zstd",
    "export --dtype bf16",
    "export --format torch",
    "export --format universal",
    "export --format dcp",
)
"""A command for every kind of target, without its source and target."""

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
    """Require that commands that are shown are valid, each at the end of a line; no traceback."""
    assert "Traceback" not in done.err, done.err
    text = done.err if done.out.startswith("{") else f"{done.out}\n{done.err}"
    for shown in re.findall(
        r"(?<!usage)(?<!Example): (streamshard [a-z]+ .*)$", text, re.MULTILINE
    ):
        parse_command(shlex.split(shown)[1:])
    return done


def command(output: str, source: Path, target: Path) -> tuple[str, ...]:
    """Spell the command that makes a target of a kind of a source."""
    verb, *options = output.split()
    return verb, str(source), str(target), *options


def in_process(*arguments: object) -> Finished:
    """Run the command line in this process, which takes a fraction of the time."""
    kept = BytesIO(), BytesIO()
    out = TextIOWrapper(kept[0], "utf-8", write_through=True)
    err = TextIOWrapper(kept[1], "utf-8", "backslashreplace", write_through=True)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([*map(str, arguments)])
        except SystemExit as exit:
            code = int(exit.code or 0)
    shown, told = (stream.getvalue().decode() for stream in kept)
    return checked(Finished(code, shown, without_progress(told)))


def passed(*arguments: object) -> Finished:
    """Require a command to end well, with nothing on standard error."""
    done = in_process(*arguments)
    assert (done.code, done.err) == (0, "")
    return done


def refused(code: int, says: str, *arguments: object) -> Finished:
    """Require a command to end with an exit code, and to say something on standard error."""
    done = in_process(*arguments)
    assert (done.code, says in done.err) == (code, True), done.err
    return done


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
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
def stage_2(saved: Saved, tmp_path: Path) -> Path:
    """A run directory of stage 2 that a test may damage."""
    return Path(shutil.copytree(saved(2), tmp_path / "run"))


def on_terminal(
    *command: object,
    stream: str = "stderr",
    columns: int = 100,
    variables: Mapping[str, str] = MappingProxyType({}),
    sent: int = 0,
) -> Finished:
    """Run a command in a new interpreter with a terminal for one of its streams.

    Parameters
    ----------
    sent
        Signal that it gets as soon as something is shown.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: slave}
    child = subprocess.Popen(
        # It passes a signal on, and ends what does not end by itself.
        ["timeout", "600", sys.executable, *map(str, command)],
        env={**kept, "TERM": "xterm", **variables},
        stdout=streams["stdout"],
        stderr=streams["stderr"],
    )
    os.close(slave)
    shown = b""
    with suppress(OSError):  # so ends a terminal that nobody writes to any more
        while chunk := os.read(master, 65536):
            shown += chunk
            if sent:
                child.send_signal(sent)
                sent = 0
    os.close(master)
    out, err = ((piped or b"").decode() for piped in child.communicate())
    text = shown.decode()
    return Finished(child.returncode, *((text, err) if stream == "stdout" else (out, text)))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives its rights up, which takes some")


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that others than its owner can reach."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def as_nobody(*arguments: object) -> Finished:
    """Run the command line as a user of no rights."""
    script = "import os\nfrom streamshard.__main__ import program\nos.setuid(4321)\nprogram()\n"
    return streamshard(*arguments, script=script)


def model_file(run_dir: Path, rank: int | None = None) -> Path:
    """Where a model file lies: the shared one, or a rank's in stage 3."""
    name = "mp_rank_00" if rank is None else f"zero_pp_rank_{rank}_mp_rank_00"
    return run_dir / TAG / f"{name}_model_states.pt"


def flip(path: Path, place: float = 0.5) -> None:
    """Change a bit of a file, at that part of its length."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a directory with its bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }

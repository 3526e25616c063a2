"""`python -m streamshard.deepspeed` runs a script as Python does, under every launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine  # type: ignore[import-untyped,unused-ignore]

from streamshard.live.launch import launch
from tests.oracle.ranks import LAUNCHED

LAUNCH_SECONDS = 120.0
SCRIPT = """\
import json
import os
import pickle
import sys
import time

import beside
from deepspeed.runtime.engine import DeepSpeedEngine


class OfTheScript:
    pass


def main():
    assert isinstance(pickle.loads(pickle.dumps(OfTheScript())), OfTheScript)
    said = {
        "argv": sys.argv,
        "file": __file__,
        "main": sys.modules["__main__"].__file__,
        "path": sys.path[0],
        "reshards": hasattr(DeepSpeedEngine.load_checkpoint, "__wrapped__"),
        "saves whole": hasattr(DeepSpeedEngine.save_checkpoint, "__wrapped__"),
    }
    place = f"{os.environ['SAYS']}.{os.environ.get('RANK', 0)}"
    with open(place + ".new", "w") as file:
        json.dump(said, file)
    os.replace(place + ".new", place)
    if "--fails" in sys.argv:
        beside.fail()
    if "--ends" in sys.argv:
        sys.exit(0)
    if "--exits" in sys.argv:
        # A launcher ends all ranks as soon as one has ended.
        for rank in range(int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1):
            while not os.path.exists(f"{os.environ['SAYS']}.{rank}"):
                time.sleep(0.01)
        sys.exit(7)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script and a module of its own; where the script says what it sees."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train_it.py").write_text(SCRIPT)
    (tmp_path / "run" / "beside.py").write_text("def fail():\n    raise ValueError('in the job')\n")
    monkeypatch.setenv("SAYS", str(tmp_path / "said"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("beside", "train_it", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "said"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Launch in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["streamshard/deepspeed.py", *arguments])
    try:
        launch()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def said_by(says: Path, rank: int = 0) -> dict[str, Any]:
    """Return what one rank's script saw."""
    said: dict[str, Any] = json.loads(Path(f"{says}.{rank}").read_text())
    return said


def expected(script: Path, *arguments: str) -> dict[str, Any]:
    """Return what a script sees that Python runs."""
    return {
        "argv": [str(script), *arguments],
        "file": str(script),
        "main": str(script),
        "path": str(script.parent),
        "reshards": True,
        "saves whole": True,
    }


def test_a_script_sees_what_python_would_show_it(
    says: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, "--local_rank=0", "run/train_it.py", "-x", "--help") == 0
    script = says.parent / "run" / "train_it.py"
    assert said_by(says) == expected(script, "--local_rank=0", "-x", "--help")
    assert not hasattr(DeepSpeedEngine.load_checkpoint, "__wrapped__")
    assert not hasattr(DeepSpeedEngine.save_checkpoint, "__wrapped__")


def test_a_module_sees_what_python_would_show_it(
    says: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(says.parent / "run")
    monkeypatch.setattr(sys, "path", [str(says.parent / "run"), *sys.path[1:]])
    assert run(monkeypatch, "--keep-global-batch", "-m", "train_it", "-m") == 0
    assert said_by(says) == expected(says.parent / "run" / "train_it.py", "-m")


def test_a_script_ends_the_process_as_it_likes(says: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "run/train_it.py", "--exits") == 7


@pytest.mark.parametrize("how", [("run/train_it.py",), ("-m", "run.train_it")], ids=str)
def test_a_traceback_begins_in_the_script(
    says: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(says.parent / "run")])
    assert run(monkeypatch, *how, "--fails") == 1
    first, frame, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert frame.startswith(f'  File "{says.parent / "run" / "train_it.py"}", line ')
    assert last == "ValueError: in the job"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(["--help"], 0, "usage: python -m streamshard.deepspeed", id="help"),
        pytest.param([], 2, "error: name a training script", id="nothing"),
        pytest.param(["-m"], 2, "error: name a training script", id="no module"),
        pytest.param(["--lr", "1"], 2, "error: unknown option --lr;", id="option in front"),
        pytest.param(["run/typo.py"], 2, "error: no script 'run/typo.py'", id="no such script"),
        pytest.param(["-m", "run.typo"], 2, "error: no module 'run.typo'", id="no such module"),
        pytest.param(["-m", "typo.typo"], 2, "error: no module 'typo.typo'", id="no such package"),
        pytest.param(["--save-start"], 2, "error: --save-start lacks", id="no directory"),
        pytest.param(["--save-start", "-m"], 2, "error: --save-start lacks", id="option for it"),
        pytest.param(["--save-start", "start"], 2, "error: name a training", id="only a directory"),
        pytest.param(
            ["--save-start", "run", "run/train_it.py"],
            4,
            "error: run: exists, and is not an empty directory; give a directory that is new or",
            id="directory with files",
        ),
        pytest.param(["--save-start", "run/train_it.py"], 4, "error: run/train_it.py", id="a file"),
        pytest.param(
            ["--save-start", "s3://b/start", "run/train_it.py"], 4, "not in a bucket", id="bucket"
        ),
    ],
)
def test_what_cannot_run_is_said(
    says: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    assert run(monkeypatch, *arguments) == code
    out, err = capsys.readouterr()
    assert words in (err if code else out)
    assert "Traceback" not in err
    assert not Path(f"{says}.0").exists()


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
        pytest.param("-x", 3, "error: 'run/train_it.py' ended, and no engine", id="ends"),
        pytest.param("--ends", 3, "error: 'run/train_it.py' ended, and no engine", id="exits well"),
        pytest.param("--exits", 7, "", id="exits badly"),
        pytest.param("--fails", 1, "ValueError: in the job\n", id="fails"),
    ],
)
def test_a_script_that_never_trains_has_no_start(
    says: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argument: str,
    code: int,
    words: str,
) -> None:
    (says.parent / "start").mkdir()  # an empty directory is as good as none
    before = DeepSpeedEngine.forward
    assert run(monkeypatch, "--save-start", "start", "run/train_it.py", argument) == code
    assert said_by(says) == expected(says.parent / "run" / "train_it.py", argument)
    err = capsys.readouterr().err
    assert words in err
    assert ("no engine" in err) == (code == 3)
    assert list((says.parent / "start").iterdir()) == []
    assert DeepSpeedEngine.forward is before


LAUNCHERS = {
    "torchrun": [
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"),
        *("-m", "streamshard.deepspeed"),
    ],
    "deepspeed": [
        *("-m", "deepspeed.launcher.runner", "--num_gpus", "2"),
        *("--module", "streamshard.deepspeed"),
    ],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("-m", "streamshard.deepspeed"),
    ],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_runs_the_script(says: Path, launcher: str) -> None:
    script = says.parent / "run" / "train_it.py"
    command = [sys.executable, *LAUNCHERS[launcher], "run/train_it.py", "--alpha", "1", "--exits"]
    ended = subprocess.run(
        command,
        env={**os.environ, **LAUNCHED},
        timeout=LAUNCH_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    # torchrun, and accelerate by it, report a rank's exit code and end with their own.
    assert ended.returncode == (7 if launcher == "deepspeed" else 1), ended.stderr
    for rank in range(2):
        ranked = [f"--local_rank={rank}"] if launcher == "deepspeed" else []
        assert said_by(says, rank) == expected(script, *ranked, "--alpha", "1", "--exits")

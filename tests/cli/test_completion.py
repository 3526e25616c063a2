"""What a shell offers once it has read the script."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streamshard.cli.completion import SHELLS
from tests.cli.conftest import streamshard

ASK = """
source {script}
COMP_WORDS=(streamshard {words}) COMP_CWORD={at} COMP_LINE="streamshard {words}"
COMPREPLY=()
$(complete -p streamshard | sed 's/.*-F \\([^ ]*\\).*/\\1/') streamshard "{last}" "{before}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def offered(script: Path, *words: str) -> set[str]:
    """Ask bash what would come in place of the last word."""
    before = words[-2] if len(words) > 1 else "streamshard"
    text = " ".join(word or '""' for word in words)
    ask = ASK.format(script=script, words=text, at=len(words), last=words[-1], before=before)
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Print the script for bash."""
    done = streamshard("completion", "bash")
    assert (done.code, done.err) == (0, "")
    path = tmp_path_factory.mktemp("shell") / "completion.bash"
    path.write_text(done.out)
    return path


def test_bash_offers_verbs_options_and_values(script: Path) -> None:
    assert offered(script, "re") == {"repartition"}
    assert {"--world-size", "--zero-stage"} <= offered(script, "repartition", "--")
    assert offered(script, "export", "--dtype", "") == {"fp32", "bf16", "fp16"}


def test_bash_offers_files_wherever_a_path_is_meant(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").touch()
    (tmp_path / "run").mkdir()
    for words in (["apply"], ["diff"], ["diff", "run"], ["inspect"], ["compact", "run"]):
        assert {"plan.json", "run"} <= offered(script, *words, ""), words


@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_a_script_for_every_shell_that_is_named(shell: str) -> None:
    done = streamshard("completion", shell)
    assert (done.code, done.err) == (0, "")
    assert "repartition" in done.out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.out, text=True, check=True)


def test_without_the_package_it_is_said_what_to_install() -> None:
    hide = "import sys; sys.modules['shtab'] = None"
    run = "from streamshard.cli.main import main; sys.exit(main(['completion', 'bash']))"
    done = subprocess.run([sys.executable, "-c", f"{hide}; {run}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install shtab" in done.stderr

"""What a shell offers once it has read the script."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from streamshard.cli.parser import SHELLS, arguments_of
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
    assert offered(script, "export", "--dtype", "=", "b") == {"bf16"}
    assert offered(script, "completion", "") == set(SHELLS)
    assert offered(script, "repartition", "--world-size", "") == set()


def test_bash_offers_files_wherever_a_path_is_meant(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").touch()
    (tmp_path / "run").mkdir()
    for words in (["apply"], ["diff"], ["diff", "run"], ["inspect"], ["compact", "run"]):
        assert {"plan.json", "run"} <= offered(script, *words, ""), words
    (tmp_path / "my run").mkdir()
    assert offered(script, "inspect", "my") == {"my", "run"}  # one offer, of two words
    assert offered(script, "repartition", "--like", "pl") == {"plan.json"}


@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_a_script_for_every_shell_that_is_named(shell: str) -> None:
    done = streamshard("completion", shell)
    assert (done.code, done.err) == (0, "")
    assert "repartition" in done.out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.out, text=True, check=True)


def test_every_option_of_every_verb_is_in_every_script() -> None:
    verbs = next(one.choices for one in arguments_of()._actions if isinstance(one.choices, dict))
    for shell in SHELLS:
        lines = streamshard("completion", shell).out.splitlines()
        for name, verb in verbs.items():
            (begin,) = [n for n, line in enumerate(lines) if line == f"        {name})"] or [0]
            own = [line for line in lines if re.search(rf"\b{name}\b", line)]
            text = "\n".join(own if shell != "zsh" else lines[begin:])
            for option in verb._option_string_actions:
                short = f"-{option[1]}" if option[1] != "-" else option
                told = f"-l {option[2:]} " if option.startswith("--") else f"-s {option[1:]} "
                assert (told if shell == "fish" else short) in f"{text} ", (shell, name, option)

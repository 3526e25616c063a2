"""The command line itself: its help, what is mistyped or cannot be, and what a shell completes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site import completion_scripts
from streamshard.cli.parser import OPTIONS, SHELLS, arguments_of, parse_command
from tests.cli.conftest import Saved, in_process, passed, refused
from tests.fabricated import write
from tests.job import Job


def test_help_teaches_by_example_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    verbs = "repartition convert export verify diff inspect compact"
    for verb in verbs.split():
        done = passed(verb, "--help")
        examples = done.out.partition("Examples:\n")[2].splitlines()
        assert examples
        for example in examples:
            assert example.split()[0] == "streamshard"
            arguments_of().parse_args(shlex.split(example)[1:])
    assert "Exit codes" in in_process("--help").out


def test_completion_is_installed_as_its_help_says(tmp_path: Path) -> None:
    examples = passed("completion", "--help").out.partition("Examples:\n")[2]
    program = f'streamshard() {{ {sys.executable} -m streamshard "$@"; }}'
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(["bash", "-ec", f"{program}\n{examples}"], env=environment, check=True)
    (script,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert "complete" in script.read_text()


def test_help_is_short_and_all_of_it_is_there_when_asked_for() -> None:
    for verb in OPTIONS:
        shown, every = passed(verb, "--help").out, passed(verb, "--help-all").out
        short, long = (set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", t, re.M)) for t in (shown, every))
        assert len(short - {"--help", "--help-all"}) <= 14, verb
        assert short <= long
        assert shown.startswith(f"usage: streamshard {verb} [OPTIONS] ")
        assert "zarr store" not in shown.partition("positional")[0]
        parser = next(a.choices for a in arguments_of()._actions if isinstance(a.choices, dict))
        known = {option for option in parser[verb]._option_string_actions if option[1] == "-"}
        assert known == long


def test_alone_the_program_shows_its_help() -> None:
    alone, asked = in_process(), in_process("--help")
    assert (alone.code, alone.out, alone.err) == (0, asked.out, "")


def test_the_version_is_that_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "streamshard-9.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: streamshard\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = in_process("--version")
    assert (done.code, done.out) == (0, "streamshard 9.9\n")
    monkeypatch.setattr(sys, "path", [])
    done = in_process("--version")
    assert (done.code, "not installed" in done.out) == (0, True)


@pytest.mark.parametrize("flag", ["-q", "--json"])
def test_quiet_prints_the_path_and_json_a_document(flag: str, saved: Saved, tmp_path: Path) -> None:
    done = passed("repartition", saved(2), tmp_path / "out", "--world-size", 2, flag)
    if flag == "-q":
        assert done.out == f"{tmp_path / 'out'}\n"
    else:
        report = json.loads(done.out)
        assert report["peak_bytes"] <= report["projected_bytes"]


# What is mistyped or cannot be --------------------------------------------------------------------


VERBS = ", ".join(OPTIONS) + ", completion"


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("repartion a b", "completion; did you mean repartition?\n"),
        ("foo", f"error: 'foo' is no verb; there are {VERBS}\n"),
        ("help foo", f"error: 'foo' is no verb; there are {VERBS}\n"),
        ("--bogus", "error: unrecognized arguments: --bogus\n"),
        ("repartition a b --world-size x", "--world-size: 'x' is not a whole number\n"),
        ("repartition a b --word-size 6", "; did you mean --world-size?\n"),
        ("repartition a b --ds_config=ds.json --verfy", "; did you mean --ds-config --verify?\n"),
        ("convert a b.zarr --codec ztsd", "; did you mean zstd?\n"),
        ("verify a --agianst b", "; did you mean --against?\n"),
        # An option of other verbs is not taken for a mistyped one.
        (
            "convert a b.zarr --expert-parallel 1",
            "--expert-parallel 1; --expert-parallel is an option of repartition\n",
        ),
        (
            "diff a b --codec=zstd --workrs 2",
            "; --codec is an option of convert, merge; did you mean --workers?\n",
        ),
    ],
)
def test_what_is_mistyped_is_answered_with_what_is_near(line: str, end: str) -> None:
    done = in_process(*line.split())
    assert done.code == 2
    assert done.err.endswith(end)


def test_help_is_a_word_too() -> None:
    for words in ([], ["inspect"]):
        wanted = in_process(*words, "--help").out
        assert wanted.startswith(" ".join(["usage: streamshard", *words]))
        assert in_process("help", *words) == in_process(*words, "--help")
    rarer = in_process("help", "inspect", "--help-all")
    assert rarer == in_process("inspect", "--help-all") != in_process("inspect", "--help")


@pytest.mark.parametrize(
    "line",
    ["inspect ''", "newest ''", "repartition '' out", "repartition SRC '' --world-size 2",
     "convert SRC ''", "export '' out", "compact '' out", "compact SRC ''", "diff SRC ''",
     "verify SRC --against ''", "merge '' SRC out"],
)  # fmt: skip
def test_a_variable_that_is_not_set_is_no_path(
    line: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty path would be the directory where the program was started."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.replace("SRC", str(saved(2))))
    refused(2, "an empty path; is a variable of the shell not set?", *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["frobnicate", "inspect a b", "inspect a --qqqqqq"])
def test_what_is_near_to_nothing_gets_no_advice(line: str) -> None:
    done = in_process(*line.split())
    assert (done.code, "did you mean" in done.err) == (2, False)


RANKS = "1000000", "9" * 40


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        ("repartition SRC OUT", "", "--world-size"),
        ("repartition SRC OUT", "--world-size 0", "--world-size 0"),
        ("repartition SRC OUT", "--world-size many", "is not a whole number"),
        *(("repartition SRC OUT", f"-n --world-size {n}", f"{n}: above 131,072") for n in RANKS),
        *(("inspect SRC", f"--html OUT --world-size {n}", f"{n}: above 131,072") for n in RANKS),
        ("repartition SRC OUT", "--world-size 2 --workers 0", "--workers 0"),
        ("repartition SRC OUT", "--world-size 2 --memory-limit lots", "not a size"),
        ("repartition SRC OUT", "--world-size 2 --memory-limit 120%", "not a size"),
        ("repartition SRC OUT", "--world-size 2 --zero-stage 4", "--zero-stage"),
        ("repartition SRC OUT", "--world-size 2 --ds-config nothing.json", "nothing.json"),
        ("repartition SRC OUT", "--world-size 2 --like SRC", "leave --like out"),
        ("convert SRC OUT", "--like SRC", "leave --like out"),
        ("convert SRC OUT.zip", "", "/o.zarr.zip\n"),
        ("merge SRC OUT", "--last 1", "--last 1: at least 2"),
        ("repartition SRC .", "--world-size 2 --overwrite", "not a name for a new directory"),
        ("repartition SRC ..", "--world-size 2 --overwrite", "not a name for a new directory"),
        ("repartition SRC /", "--world-size 2 --overwrite", "not a name for a new directory"),
        ("repartition SRC .", "--world-size 2 --if-needed", "not a name for a new directory"),
        ("export SRC OUT", "--dtype int8", "invalid choice"),
        ("export SRC OUT", "--include nothing", "no tensor has such a name"),
        ("export SRC OUT", "--max-shard-size many", "is not a size"),
        ("export SRC OUT.safetensors", "", "go into a directory"),
        ("merge SRC OUT.zarr", "--format safetensors", "give a name without .zarr"),
        ("export SRC OUT", "--format universal --dtype bf16", "--dtype: is for files of weights"),
        ("compact SRC OUT", "--keep-last 1", "--keep-last"),
        ("compact SRC OUT", "--keep-every 0", "--keep-every"),
        ("compact SRC OUT", "--grace soon", "--grace"),
        ("compact SRC OUT", "--min-age 5", "--min-age"),
        ("compact SRC OUT", "--workers 0", "--workers"),
        ("compact SRC OUT", "--bwlimit 0MB", "--bwlimit"),
        ("compact SRC OUT", "--bwlimit 200", "has no unit; write 200MB or 200B"),
        ("compact SRC OUT", "--weights-only-older-than old", "--weights-only-older-than"),
        ("compact SRC OUT", "--undelete a --purge b", "--undelete"),
        ("verify SRC", "--health --against SRC", "--health"),
        ("inspect SRC", "--rank 4", "--rank 4: it has data-parallel ranks 0 to 3"),
        ("inspect SRC", "--rank -1", "--rank -1: it has data-parallel ranks 0 to 3"),
        ("inspect SRC", "--param embed.wieght", "such a name; there are embed.we"),
        ("inspect SRC", "--world-size 4", "say where with --html FILE"),
    ],
)
def test_what_cannot_be_is_named_and_leaves_nothing(
    command: str,
    options: str,
    says: str,
    saved: Saved,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = f"{command} {options}".replace("SRC", str(saved(2))).replace("OUT", str(tmp_path / "o"))
    done = in_process(*line.split())
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "JSON"),
        ("[]", "not an object"),
        ('{"bf16": {"enabled": true}}', "stage 0"),
        ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}', "loss scale"),
        ('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}', "make them agree"),
    ],
)
def test_configs_that_cannot_be_followed(
    config: str, says: str, saved: Saved, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(config)
    options = ["--zero-stage", 2] if "agree" in says else []
    command = ("repartition", saved(2), tmp_path / "out", "--world-size", 2, "--ds-config", path)
    refused(2, says, *command, *options)
    assert not (tmp_path / "out").exists()


# What must not get into a log ---------------------------------------------------------------------

URLS = (
    "s3://user:SECRET@bucket/x",
    "s3:/user:SECRET@bucket/x",
    "s3://user:SECRET@bucket",
    "s3://user:SECRET@bucket/x?versionId=3",
    "s3://bucket/x?X-Amz-Signature=SECRET",
    "s3://user:SEC/RET@bucket/x",
    "S3://user:SECRET@bucket/x",
    "s3a://user:SECRET@bucket/x",
    "gs://SECRET@bucket/x",
    "https://user:SECRET@localhost/x",
    "https://localhost/x#SECRET",
    "file://user:SECRET@host/x",
)
WITH_URL = (
    "inspect {url}",
    "verify {url} --against x",
    "repartition {url} out --world-size 2",
    "repartition . {url} --world-size 2",
    "repartition . out --world-size 2 --like {url}",
    "convert . out too {url}",
    "inspect --{url}",
    "{url}",
    "compact {url} {url} --dry-run",
)


@pytest.mark.parametrize("url", URLS)
def test_no_secret_is_printed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in WITH_URL:
        done = in_process(*line.format(url=url).split())
        assert done.code in (2, 3), line
        assert done.err
        for secret in ("SECRET", "SEC/RET", "RET@"):
            assert secret not in done.out + done.err, line


@pytest.mark.parametrize("letter", ["\n", "\r", "\x1b", "\x85"])
def test_a_line_break_in_a_path_makes_no_line(tmp_path: Path, letter: str) -> None:
    forged = "streamshard: forged"
    run = write(Job(stage=2, world_size=2, parts=1), tmp_path / f"a{letter}{forged}")
    out = tmp_path / f"b{letter}{forged}"
    for command in (
        ["inspect", run],
        ["inspect", tmp_path / f"none{letter}{forged}"],
        ["verify", run],
        ["repartition", run, out, "--world-size", "3"],
        ["repartition", run, out, "--world-size", "3"],
        ["diff", run, out],
        ["verify", run, "--against", out],
        ["inspect", f"--x{letter}{forged}"],
    ):
        done = in_process(*command)
        for line in (done.out + done.err).replace("\r", "\n").replace("\x85", "\n").split("\n"):
            assert not line.startswith(forged), command
        assert "\x1b" not in done.out + done.err


# Completion ---------------------------------------------------------------------------------------

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


@pytest.fixture
def bash(tmp_path: Path) -> Path:
    """The script for bash."""
    path = tmp_path / "completion.bash"
    path.write_text(in_process("completion", "bash").out)
    return path


def test_bash_offers_verbs_options_and_values(bash: Path) -> None:
    assert offered(bash, "re") == {"repartition"}
    assert {"--world-size", "--zero-stage"} <= offered(bash, "repartition", "--")
    assert offered(bash, "export", "--dtype", "") == {"fp32", "bf16", "fp16"}
    assert offered(bash, "completion", "") == set(SHELLS)
    assert offered(bash, "he") == {"help"}
    assert offered(bash, "help", "") == {*OPTIONS, "completion"}
    assert offered(bash, "help", "repartition", "--") == {"--help-all"}
    assert offered(bash, "repartition", "--world-size", "") == set()


def test_the_scripts_are_those_of_this_parser() -> None:
    for shell, script in completion_scripts.scripts().items():
        assert completion_scripts.path_of(shell).read_text() == script, (
            "run: python -m docs.site.completion_scripts"
        )


@pytest.mark.parametrize("shell", SHELLS)
def test_every_option_of_every_verb_is_in_every_script(shell: str) -> None:
    done = passed("completion", shell)
    assert done.out == completion_scripts.path_of(shell).read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.out, text=True, check=True)
    verbs = next(one.choices for one in arguments_of()._actions if isinstance(one.choices, dict))
    for name, verb in verbs.items():
        text = "\n".join(line for line in done.out.splitlines() if name in line)
        for option in verb._option_string_actions:
            assert re.search(rf"\b{option.lstrip('-')}\b", done.out if shell == "zsh" else text)


@pytest.mark.parametrize(
    "line",
    [
        "a b out --weights 0.5,0.5 --last 2",
        "--weights 0.5,0.5 --last 2 a b out",
        "a b --weights 0.5,0.5 --last 2 out",
        "a --weights 0.5,0.5 b --last 2 out",
        "--last 2 a --weights 0.5,0.5 b out",
        "a --last 2 b out --weights 0.5,0.5",
    ],
)
def test_options_may_stand_between_sources(line: str) -> None:
    found = parse_command(["merge", *line.split()])
    assert (found.source, found.target) == (["a", "b"], "out")
    assert (found.weights, found.last) == ("0.5,0.5", 2)


def test_what_is_mistyped_between_sources_is_told() -> None:
    refused(2, "did you mean --weights", "merge", "a", "--wieghts", "1", "b", "out")


def test_files_that_are_whole_checkpoints_are_no_ranks_dumps(tmp_path: Path) -> None:
    """Stores in one file each, and model files, with numbers in their names."""
    stores = [str(tmp_path / f"{number}.zarr.zip") for number in range(2)]
    models = [str(tmp_path / f"model-{number}.pt") for number in range(2)]
    for path in (*stores, *models):
        Path(path).touch()
    out = str(tmp_path / "out")
    assert parse_command(["merge", *stores, out]).source == stores
    assert parse_command(["merge", *models, out]).source == models
    found = parse_command(["diff", *stores])
    assert [found.left, found.right] == stores

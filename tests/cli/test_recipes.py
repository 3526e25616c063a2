"""The files of `docs/recipes`: each is parsed by its own reader, and each command in it by ours."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from streamshard.cli.parser import arguments_of
from tests.documents import README, ROOT, TEXTS
from tests.fabricated import write
from tests.job import Job

yaml = pytest.importorskip("yaml")

RECIPES = sorted((ROOT / "docs" / "recipes").iterdir())
COMMAND = re.compile(r"(?:^|[\s/(])(streamshard [a-z][^)#&|;>]*)")
NIGHTLY = re.compile(r"^(?:30 3 \* \* \* |ExecStart=)(/\S*/streamshard compact .*)$", re.MULTILINE)


def recipe(name: str) -> Path:
    return ROOT / "docs" / "recipes" / name


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def texts_and_lists(value: object) -> Iterator[str | list[str]]:
    """Yield every text of several lines, and every list of words, in a document."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from texts_and_lists(inner)
    elif isinstance(value, list):
        if value and all(isinstance(word, str) for word in value):
            yield value
        else:
            for inner in value:
                yield from texts_and_lists(inner)
    elif isinstance(value, str) and "\n" in value:
        yield value


def scripts(path: Path) -> list[str]:
    """List what a shell runs of a recipe."""
    if path.suffix == ".yaml":
        found = (one for document in documents(path) for one in texts_and_lists(document))
        return [one for one in found if isinstance(one, str)]
    return [path.read_text()] if path.suffix in {".sbatch", ".sh"} else []


def commands(path: Path) -> list[list[str]]:
    """List the words of every command of ours."""
    if path.suffix == ".yaml":
        listed = [one for each in documents(path) for one in texts_and_lists(each)]
        own = [one for one in listed if isinstance(one, list) and one[0] == "streamshard"]
    else:
        own = []
    lines = "\n".join(scripts(path) or [path.read_text()]).replace("\\\n", " ").splitlines()
    for line in () if own else lines:
        shown = "" if re.match(r"#\s*(?!podman)", line) else line
        own += [shlex.split(match) for match in COMMAND.findall(shown)]
    numbers = re.compile(r"\$\w*(?:ranks|GPUS_PER_NODE)")
    return [[numbers.sub("6", word) for word in words] for words in own]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_is_linked_and_its_commands_are_understood(path: Path) -> None:
    assert any(f"](recipes/{path.name})" in text for text in TEXTS.values())
    assert path.name in HAVE_NONE or path.suffix == ".py" or commands(path)
    for program, *words in commands(path):
        assert Path(program).name == "streamshard"
        arguments_of().parse_args(words)
    for script in scripts(path):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


HAVE_NONE = {"Containerfile", "dask-tls.sh", "streamshard-compact.timer"}


def test_every_night_runs_what_the_readme_shows() -> None:
    (wanted, *_) = NIGHTLY.findall(TEXTS[README])
    assert Path(shlex.split(wanted)[0]).is_absolute()  # cron and systemd have a short PATH
    for name in ("compact.scrontab", "streamshard-compact.service"):
        assert NIGHTLY.findall(recipe(name).read_text()) == [wanted]
    (words,) = commands(recipe("compact-cronjob.yaml"))
    assert f"/usr/local/bin/{shlex.join(words)}" == wanted


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    names = ("streamshard-compact.service", "streamshard-compact.timer")
    for name in names:
        text = recipe(name).read_text().replace("/usr/local/bin/streamshard", "/bin/true")
        (tmp_path / name).write_text(text)
    command = ["systemd-analyze", "verify", *(str(tmp_path / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["compact-cronjob.yaml", "dask-cluster.yaml"])
def test_a_pod_mounts_what_its_commands_name(name: str) -> None:
    for document in documents(recipe(name)):
        for pod in pods(document):
            for container in pod["containers"]:
                mounts = container.get("volumeMounts", ())
                volumes = {volume["name"] for volume in pod.get("volumes", ())}
                assert {mount["name"] for mount in mounts} <= volumes
                words = [word for word in container["command"] if word.startswith("/")]
                mounted = {mount["mountPath"] for mount in mounts}
                assert {f"/{word.split('/')[1]}" for word in words} <= mounted


def pods(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pods(inner)


def test_the_image_installs_what_the_wheel_needs() -> None:
    lines = recipe("Containerfile").read_text().replace("\\\n", " ").splitlines()
    told = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    assert {word for word, _, _ in told} == {"FROM", "COPY", "RUN", "ENTRYPOINT"}
    copied = {name for word, _, rest in told if word == "COPY" for name in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "README.md", "LICENSE", "streamshard"} == copied
    (entry,) = [rest for word, _, rest in told if word == "ENTRYPOINT"]
    assert json.loads(entry) == ["streamshard"]


STUBS = {
    "srun": 'printf "%s\\n" "$@"',
    "scontrol": "echo node-1; echo node-2",
    "streamshard": f'exec {sys.executable} -m streamshard "$@"',
}


@pytest.mark.parametrize(("ranks", "is_converted"), [((1, 3), True), ((2, 2), False)])
def test_a_slurm_job_resumes_on_what_it_got(
    ranks: tuple[int, int], is_converted: bool, tmp_path: Path
) -> None:
    """Slurm's own programs only say what they are asked."""
    write(Job(stage=2, world_size=4), tmp_path / "runs" / "7b")
    for name, script in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    slurm = dict(zip(("SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE"), map(str, ranks), strict=True))
    slurm |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node-[1-2]", "PYTHONPATH": str(ROOT)}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(recipe("resume.sbatch"))],
        cwd=tmp_path,
        env={**os.environ, **slurm, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    asked = dict(pairwise(words))
    assert asked["--nproc_per_node"] == str(ranks[1])
    assert asked["--rdzv_endpoint"] == "node-1:29400"
    resumed = tmp_path / "runs" / "7b-on-3-17-0"
    assert resumed.exists() == is_converted
    assert tmp_path / asked["--resume"] == (resumed if is_converted else tmp_path / "runs/7b")


@pytest.mark.parametrize("name", ["checks", "release"])
def test_a_workflow_runs_sessions_that_there_are(name: str) -> None:
    (workflow,) = documents(ROOT / ".github" / "workflows" / f"{name}.yml")
    text = (ROOT / "noxfile.py").read_text()
    there = {*re.findall(r"^def (\w+)\(session", text, re.MULTILINE)}
    there |= {*re.findall(r'name="([\w.-]+)"\)', text)}
    jobs = list(workflow["jobs"].values())
    asked = {one for job in jobs for one in matrix(job).get("session", ())}
    for job in jobs:
        for step in job["steps"]:
            asked |= {*re.findall(r"nox -s (\w\S*)", step.get("run", ""))}
    assert asked
    assert asked <= there


def matrix(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job.get("strategy", {}).get("matrix", {})
    return found

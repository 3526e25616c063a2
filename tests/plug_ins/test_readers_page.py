"""The page about readers is enough to write one: its example is built, installed, and tested."""

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.documents import ROOT, page

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the package that the page shows."""
    directory = tmp_path_factory.mktemp("package")
    blocks = BLOCK.findall(page("readers"))
    (index,) = (json.loads(text) for kind, text in blocks if kind == "json")
    assert index["params"] == ["layer.weight"]
    reader, tests = (text for kind, text in blocks if kind == "python")
    (project,) = (text for kind, text in blocks if kind == "toml")
    (directory / "npy_reader.py").write_text(reader)
    (directory / "pyproject.toml").write_text(project)
    (directory / "tests").mkdir()
    (directory / "tests" / "test_npy_reader.py").write_text(tests)
    return directory


@pytest.fixture(scope="module")
def python(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into an environment of its own, which has all that this one has."""
    place = tmp_path_factory.mktemp("venv")
    venv.create(place)
    (site,) = (place / "lib").glob("python*/site-packages")
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    (site / "ours.pth").write_text("\n".join(paths) + "\n")
    python = place / "bin" / "python"
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    source = shutil.copytree(package, place / "source")
    command = [str(python), "-m", "pip", "install", *options, str(source)]
    subprocess.run(command, check=True)
    return python


def test_the_example_passes_the_public_tests(python: Path, package: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-W", "error"]
    command = [str(python), "-m", "pytest", *options, str(package)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=package)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 10

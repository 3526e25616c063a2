"""The demo and the checks; every session sets up all it needs from Python and pip."""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")
HOME = Path(".nox").absolute()
SHARED_VENV = HOME / "engines"
ENV = {
    "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
    "OLD_DEEPSPEEDS": str(HOME),
    # Threads of linear algebra wait for work by spinning, on cores that other tests need.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Of this run alone: who is killed while DeepSpeed builds leaves a lock that others wait for.
    "TORCH_EXTENSIONS_DIR": str(HOME / "torch-extensions" / str(os.getpid())),
    # Tests start thousands of interpreters: none is to compile what another one has compiled.
    "PYTHONDONTWRITEBYTECODE": "",
}
_SLOW_TO_COMPILE = "import torch, torch._dynamo, torch.distributed.tensor"


@nox.session(python=False)
def demo(session: nox.Session) -> None:
    """Train on 4 CPU ranks, reshard, resume on 2, compare the losses."""
    run_shared(session, "-m", "streamshard.demo", *session.posargs)


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Run the first tier: all that needs no engine, and a smoke of real ones."""
    run_tests(session, "first")


@nox.session(python=False)
def oracle(session: nox.Session) -> None:
    """Ask real engines of all versions."""
    run_tests(session, "oracle", old_engines=True)


@nox.session(python=False, name="tests-3.12")
def tests_of_3_12(session: nox.Session) -> None:
    """Run the first tier with Python 3.12."""
    run_tests(session, "first", python="3.12")


@nox.session(python=False, name="tests-3.13")
def tests_of_3_13(session: nox.Session) -> None:
    """Run the first tier with Python 3.13."""
    run_tests(session, "first", python="3.13")


def run_tests(
    session: nox.Session, tier: str, *, old_engines: bool = False, python: str | None = None
) -> None:
    """Run a tier on all cores; arguments after `--` go to pytest."""
    processes = min(4, len(os.sched_getaffinity(0)) + 1)  # one more, as tests wait for disks
    pytest = ("-m", "pytest", "-n", str(processes), "--dist", "loadfile")
    arguments = (*pytest, "-m", tier, *session.posargs)
    run_shared(session, *arguments, groups=["tests"], old_engines=old_engines, python=python)


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules and format."""
    session.install(*packages("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session(python=False)
def types(session: nox.Session) -> None:
    """Check types, with everything installed whose types are used."""
    where = session.posargs or ["streamshard", "tests", "benchmarks", "noxfile.py"]
    run_shared(session, "-m", "mypy", *where, groups=["types"])


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into `build/site`; a link that leads nowhere is an error."""
    session.install(*packages("docs"))
    # What the theme has to say of its next version is for whoever raises the pin.
    env = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(Path.cwd())}
    session.run("mkdocs", "build", "--clean", "--config-file", "docs/site/mkdocs.yml", env=env)


@nox.session(python=False)
def recording(session: nox.Session) -> None:
    """Draw `docs/recording.svg` and `docs/heat-map.png` of what DeepSpeed saved."""
    run_shared(session, "-m", "docs.site.recording", groups=["pictures"])
    run_shared(session, "-m", "docs.site.heat_map", groups=["pictures"])


@nox.session
def build(session: nox.Session) -> None:
    """Make sdist and wheel of this tree in `dist`, and try the wheel in an empty environment."""
    session.install(*packages("build"))
    (wheel,) = make_packages(session, Path.cwd(), Path("dist"))
    try_wheel(session, wheel, sys.executable)


@nox.session(python=False)
def keep(session: nox.Session) -> None:
    """Keep in the tests what the last commit writes, as what its version wrote."""
    run_shared(session, "-m", "tests.released.keep", groups=["tests"])


@nox.session
def release(session: nox.Session) -> None:
    """Make sdist and wheel of the last commit in `dist`, twice, and try them with every Python.

    Nothing is published: `.github/workflows/release.yml` does that with the same files.
    """
    session.install(*packages("build"))
    scratch = Path(session.create_tmp())
    commit = str(session.run("git", "rev-parse", "HEAD", external=True, silent=True)).strip()
    seconds = session.run("git", "log", "-1", "--format=%ct", external=True, silent=True)
    session.env["SOURCE_DATE_EPOCH"] = str(seconds).strip()
    trees = [scratch / "one", scratch / "other"]
    os.umask(0o022)  # a wheel keeps modes
    for tree in trees:
        shutil.rmtree(tree, ignore_errors=True)
        archive = scratch / "commit.tar"
        session.run("git", "archive", "--output", str(archive), commit, external=True)
        with tarfile.open(archive) as files:
            files.extractall(tree / "source", filter="data")
        (wheel,) = make_packages(session, tree / "source", tree / "dist")
    made, again = ({path.name: digest(path) for path in (t / "dist").iterdir()} for t in trees)
    if made != again:
        session.error(f"two builds of {commit} differ: {made}, {again}")
    shutil.rmtree("dist", ignore_errors=True)
    shutil.copytree(trees[0] / "dist", "dist")
    for version in ("3.11", "3.12", "3.13"):
        try_wheel(session, Path("dist") / wheel.name, version)
    for name, sha256 in made.items():
        session.log(f"{sha256}  dist/{name}")


def make_packages(session: nox.Session, source: Path, made: Path) -> list[Path]:
    """Make the sdist of a tree, and the wheel of that sdist; check both; return the wheel.

    That the wheel is made from the sdist shows that the sdist has all that it needs.
    """
    shutil.rmtree(made, ignore_errors=True)
    build = ("python", "-m", "build", "--outdir", str(made))
    session.run(*build, "--sdist", str(source))
    (sdist,) = made.glob("*.tar.gz")
    if "SOURCE_DATE_EPOCH" in session.env:
        without_circumstances(sdist, int(session.env["SOURCE_DATE_EPOCH"] or 0))
    unpacked = Path(session.create_tmp()) / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(sdist) as files:
        files.extractall(unpacked, filter="data")
    session.run(*build, "--wheel", str(unpacked / sdist.name.removesuffix(".tar.gz")))
    session.run("twine", "check", "--strict", *map(str, made.iterdir()))
    return list(made.glob("*.whl"))


def without_circumstances(sdist: Path, seconds: int) -> None:
    """Write an sdist again without times, owners, modes and order of the machine that made it."""
    with tarfile.open(sdist) as files:
        found = [(one, files.extractfile(one)) for one in files.getmembers()]
        content = {one.name: (one, data.read() if data else b"") for one, data in found}
    with (
        sdist.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=seconds) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as files,
    ):
        for name, (old, data) in sorted(content.items()):
            one = tarfile.TarInfo(name)
            one.type, one.size, one.mtime = old.type, len(data), seconds
            one.mode = 0o755 if old.isdir() else 0o644
            files.addfile(one, io.BytesIO(data))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def try_wheel(session: nox.Session, wheel: Path, python: str) -> None:
    """Install a wheel alone into an empty environment, and repartition what DeepSpeed saved."""
    empty = Path(session.create_tmp()) / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    virtualenv = (sys.executable, "-m", "virtualenv", "--quiet", "--python", python, str(empty))
    session.run(*virtualenv, external=True, success_codes=[0, 1])
    if not (empty / "bin" / "python").exists():
        session.warn(f"Python {python} is not installed: the wheel is not tried with it")
        return
    pip = (str(empty / "bin" / "python"), "-m", "pip", "install", "--quiet")
    session.run(*pip, "--disable-pip-version-check", str(wheel.absolute()), external=True)
    with tarfile.open("tests/oracle/old_saves/0.12.6.tar.xz") as saved:
        saved.extractall(empty, filter="data")
    (run, *_) = sorted(path.parent for path in empty.rglob("latest"))
    program, out = str(empty / "bin" / "streamshard"), str(empty / "out")
    for arguments in (
        ["--version"],
        ["inspect", "--help"],
        ["repartition", str(run), out, "--world-size", "3", "--verify"],
        ["verify", out, "--against", str(run)],
    ):
        session.run(program, *arguments, external=True)


@nox.session(python=False)
def fuzz(session: nox.Session) -> None:
    """Fuzz a reader: `-- TARGET -max_total_time=1800`; see `tests/fuzz`."""
    run_shared(session, "-m", "tests.fuzz", *session.posargs, groups=["fuzz"])


@nox.session(python=False)
def faults(session: nox.Session) -> None:
    """Try every fault at every call of a run, `-- --help` for less; see `tests/faults`.

    Without arguments, then try every state after a power failure, run the tests of that tier, and
    those of the first tier that try more on request: thousands of histories, and a failure of every
    request of runs from and to a bucket.
    """
    run_shared(session, "-m", "tests.faults", *session.posargs, groups=["tests"])
    if not session.posargs:
        run_shared(session, "-m", "tests.faults", "--crashes", groups=["tests"])
        session.env.update(EVERY_HISTORY="3000", EVERY_REQUEST="1")
        run_tests(session, "campaign")
        on_request = (
            "tests/faults/test_histories.py",
            "tests/released/test_machine.py",
            "tests/cloud",
        )
        run_shared(session, "-m", "pytest", *on_request, groups=["tests"])


@nox.session(python=False)
def wander(session: nox.Session) -> None:
    """Take random jobs to other random ones, `-- FIRST SECONDS`; see `tests/oracle/wander.py`."""
    arguments = session.posargs or ["0", "600"]
    run_shared(session, "-m", "tests.oracle.wander", *arguments, groups=["tests"], old_engines=True)


@nox.session(python=False)
def bench(session: nox.Session) -> None:
    """Run every benchmark in its short form, or with the arguments after `--`."""
    for file in sorted(Path("benchmarks").glob("[!_]*.py")):
        run_shared(
            session,
            "-m",
            f"benchmarks.{file.stem}",
            *(session.posargs or ["--short"]),
            groups=["tests"],
        )


def run_shared(
    session: nox.Session,
    *args: str,
    groups: list[str] | None = None,
    old_engines: bool = False,
    python: str | None = None,
) -> None:
    """Run Python in the one environment that holds torch and DeepSpeed.

    nox would give every session its own, and each would take half a minute and a gigabyte. pip
    leaves alone what is there already, so that asking again for the same packages is cheap. It
    compiles nothing: of these 18,000 modules, Python compiles the fifth that it imports.
    """
    venv = SHARED_VENV if python is None else HOME / f"engines-{python}"
    executable = str(venv / "bin" / "python")
    quiet = ("-qq", "--disable-pip-version-check")
    pip = (executable, "-m", "pip", "install", "--no-compile", *quiet)
    if is_new := not venv.exists():
        session.log("Installing torch and DeepSpeed, once; this can take some minutes.")
    with_groups = packages("engines", *(groups or []))
    which = () if python is None else ("--python", python)
    session.run_install(sys.executable, "-m", "virtualenv", "--quiet", *which, str(venv))
    session.run_install(*pip, *packages("torch"))
    if is_new:
        # Meanwhile Python compiles what all processes would compile at once when they begin.
        compiling = [executable, "-c", _SLOW_TO_COMPILE]
        subprocess.Popen(compiling, env=os.environ | ENV, stderr=subprocess.DEVNULL)  # noqa: S603
    # DeepSpeed's build asks the torch that is installed; isolated, it would fetch another one.
    session.run_install(*pip, "--no-build-isolation", "--editable=.", *with_groups, env=ENV)
    for old in packages("deepspeed-0-14", "deepspeed-0-16") if old_engines else ():
        install_beside(session, pip, old)
    session.run(executable, *args, env=ENV)


def install_beside(session: nox.Session, pip: tuple[str, ...], requirement: str) -> None:
    """Install a package alone into a directory of its own, which names its version.

    All it depends on is there for the newest version; it comes first in `sys.path` where it counts.
    """
    place = HOME / requirement.replace("==", "-")
    if not place.exists():
        unfinished = place.with_name(f"{place.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        alone = ("--no-deps", "--no-build-isolation", "--target", str(unfinished))
        session.run_install(*pip, *alone, requirement, env=ENV)
        unfinished.rename(place)


def packages(*groups: str) -> list[str]:
    """Return the requirements of these dependency groups."""
    return list(nox.project.dependency_groups(PROJECT, *groups))

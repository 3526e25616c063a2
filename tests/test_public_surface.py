"""What users can see: names, options, exit codes, and what is not needed to use them."""

import argparse
import ast
import inspect
import inspect as inspection
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import streamshard
from streamshard import errors, reader
from streamshard.cli import main, signals
from streamshard.cli.parser import arguments_of, options_of
from streamshard.cli.transfer_command import PLANNERS
from streamshard.formats.pickle.inert_dump import dump
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.options import fields_of, types_of
from streamshard.testing import reader as testing_reader
from streamshard.verb_options import ExportOptions
from tests.documents import page
from tests.fabricated import client_state, load, write
from tests.job import TAG, Job, Keepsake

ROOT = Path(streamshard.__file__).parent.parent

SURFACE = streamshard.__all__
ONE_SOURCE = ("executor", "inspect", "newest", "open", "verify")
"""Functions that take nothing else by position; others take a target, or a second source."""


def test_the_surface_is_that_of_the_page_of_the_api() -> None:
    assert sorted(re.findall(r"^::: streamshard\.(\w+)$", page("api"), re.MULTILINE)) == SURFACE


@pytest.mark.parametrize("module", [reader, testing_reader], ids=["reader", "testing"])
def test_so_is_that_for_other_packages(module: ModuleType) -> None:
    pattern = rf"^::: {re.escape(module.__name__)}\.(\w+)$"
    assert re.findall(pattern, page("api"), re.MULTILINE) == module.__all__
    assert all(inspection.getdoc(getattr(module, name)) for name in module.__all__)


def test_the_surface_is_all_that_can_be_imported() -> None:
    public = {
        name
        for name in dir(streamshard)
        if not name.startswith("_") and not isinstance(getattr(streamshard, name), ModuleType)
    }
    assert public == set(SURFACE)
    with pytest.raises(AttributeError, match="module 'streamshard' has no attribute 'reshard'"):
        streamshard.reshard  # type: ignore[attr-defined]  # noqa: B018
    assert (ROOT / "streamshard" / "py.typed").exists()


def test_what_is_imported_at_first_use_is_what_a_type_checker_sees() -> None:
    seen = {
        alias.name: getattr(import_module(node.module or ""), alias.name)
        for node in ast.walk(ast.parse(Path(streamshard.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module != "importlib"
        for alias in node.names
    }
    assert {name: getattr(streamshard, name) for name in SURFACE} == seen


def loaded_by(arguments: str, code: int) -> set[str]:
    """Name the modules that a command loads; it ends with an exit code."""
    script = "import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    script += f"sys.argv = ['streamshard', *{arguments.split()!r}]\n"
    script += "from streamshard.__main__ import program\nprogram()\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", ["--help", "--version", "repartition --help", "repartion"])
def test_nothing_heavy_is_loaded_to_show_help(arguments: str) -> None:
    loaded = loaded_by(arguments, 2 if arguments == "repartion" else 0)
    assert "streamshard.cli.parser" in loaded
    heavy = {"numpy", "zarr", "tqdm", "numcodecs", "isal", "google_crc32c", "dataclasses"}
    assert loaded & heavy == set()
    assert not [name for name in loaded if name.startswith("streamshard.operations")]


@pytest.mark.parametrize("verb", ["inspect", "newest"])
def test_a_verb_loads_no_other(tmp_path: Path, verb: str) -> None:
    write(Job(stage=2), tmp_path / "run")
    loaded = loaded_by(f"{verb} {tmp_path / 'run'}", 0)
    assert f"streamshard.operations.{verb}.{verb}" in loaded
    others = {"tqdm", "streamshard.merging", "streamshard.degrees"}
    others |= {"numcodecs"} if verb == "inspect" else set()
    others |= {f"streamshard.operations.{other}" for other in ("compact", "convert", "export")}
    assert loaded & others == set()


@pytest.mark.parametrize("name", SURFACE)
def test_everything_public_is_documented_and_takes_options_by_keyword(name: str) -> None:
    value = getattr(streamshard, name)
    assert inspection.getdoc(value)
    if inspection.isfunction(value):
        kinds = [p.kind for p in inspection.signature(value).parameters.values()]
        by_position = kinds.count(inspection.Parameter.POSITIONAL_OR_KEYWORD)
        assert by_position == (1 if name in ONE_SOURCE else 3 if "graft" in name else 2)
        assert kinds[by_position:] == [inspection.Parameter.KEYWORD_ONLY] * len(kinds[by_position:])


CODES = {
    errors.UsageError: 2,
    errors.SourceError: 3,
    errors.TargetError: 4,
    errors.MemoryLimitError: 5,
    errors.IntegrityError: 6,
    errors.ClusterError: 7,
}


def all_errors() -> set[type[errors.StreamshardError]]:
    return {
        value
        for value in vars(errors).values()
        if inspection.isclass(value) and issubclass(value, errors.StreamshardError)
    }


def test_every_branch_of_errors_has_an_exit_code_of_its_own() -> None:
    branches = {kind for kind in all_errors() if kind.__base__ is errors.StreamshardError}
    assert {kind: kind.exit_code for kind in branches} == CODES
    assert len(set(CODES.values())) == len(CODES)
    assert not set(CODES.values()) & {0, 1, *signals.SIGNALS.values()}
    for kind in all_errors() - branches - {errors.StreamshardError}:
        (branch,) = [b for b in branches if issubclass(kind, b)]
        assert kind.exit_code == branch.exit_code
        assert "exit_code" not in vars(kind)


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    drawn = re.findall(r"── (\w+)(?: +(\d))?", errors.__doc__ or "")
    assert {name for name, _ in drawn} == {k.__name__ for k in all_errors()} - {"StreamshardError"}
    assert {name: int(code) for name, code in drawn if code} == {
        kind.__name__: code for kind, code in CODES.items()
    }


def test_exit_codes_are_those_in_the_help_and_in_the_documents() -> None:
    known = {0, *CODES.values(), *signals.SIGNALS.values()}
    parser = arguments_of()
    assert isinstance(parser, argparse.ArgumentParser)
    said = (parser.epilog or "").partition("Exit codes:")[2]
    assert {int(code) for code in re.findall(r"\b(\d+)\b", said)} == known
    listed = re.findall(r"^\| (\d+) \|", page("safety"), re.MULTILINE)
    assert sorted(int(code) for code in listed) == sorted(known)


@pytest.mark.parametrize("kind", sorted(all_errors(), key=str))
def test_the_command_line_exits_with_the_code_on_the_class(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: type[errors.StreamshardError],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kind("the file and both numbers")

    monkeypatch.setattr("streamshard.operations.inspect.inspect.inspect", fail)
    assert main.main(["inspect", "somewhere"]) == kind.exit_code
    assert capsys.readouterr().err == "streamshard: the file and both numbers\n"


SCRIPT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "deepspeed", "zarr", "training_script_of_somebody"}:
            raise RuntimeError(f"imports {name}")

sys.meta_path.insert(0, Refuse())
import streamshard
import streamshard.cli.main
root = sys.argv[1]
streamshard.convert(f"{root}/run", f"{root}/x.zarr", codec="zstd", chunk_size=100)
for source in ("run", "x.zarr"):
    assert streamshard.inspect(f"{root}/{source}").world_size == 2
    for world_size in (2, 3):
        streamshard.repartition(
            f"{root}/{source}", f"{root}/{source}-{world_size}", world_size=world_size, verify=True
        )
    assert streamshard.verify(f"{root}/{source}").is_good
    with streamshard.open(f"{root}/{source}") as ckpt:
        assert ckpt["embed.weight"].fp32[2:5].shape == (3, 4)
assert streamshard.cli.main.main(["inspect", f"{root}/run", "--json"]) == 0
"""


def bare(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own."""
    command = [sys.executable, "-c", script, str(directory)]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_neither_torch_nor_deepspeed_nor_zarr_nor_the_script_is_needed(
    tmp_path: Path, stage: int
) -> None:
    write(Job(stage=stage, client_state=client_state()), tmp_path / "run")
    done = bare(SCRIPT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    name = "mp_rank_00" if stage == 2 else "zero_pp_rank_1_mp_rank_00"
    source = tmp_path / "run" / TAG / f"{name}_model_states.pt"
    for out in ("run-2", "x.zarr-2", "run-3", "x.zarr-3"):
        found = tmp_path / out / TAG / source.name
        for key in ("keepsake", "args", "lr_scheduler", "rng"):
            assert carried(found, key) == carried(source, key)
        state = load(found)
        assert type(state["keepsake"]) is Keepsake
        kept = state["keepsake"].value
        assert kept["shared"] is kept["again"]
        assert kept["shared"] == ["one", "list"]
        first, second, whole = state["views"]
        assert first.untyped_storage()._cdata == whole.untyped_storage()._cdata
        assert second.storage_offset() == 3
        assert (vars(state["args"]), state["rng"].shape) == (
            vars(client_state()["args"]), client_state()["rng"].shape
        )  # fmt: skip


def carried(path: Path, key: str) -> bytes:
    """Spell what a file holds under a key as a pickle, without running it."""

    def name(node: Any) -> Any:  # noqa: ANN401
        if not isinstance(node, Storage):
            return None
        return node.dtype, node.numel, torch_file.checksum(node)

    return dump(torch_file.read(path, 0).root[key], name)


def test_the_hook_would_notice(tmp_path: Path) -> None:
    for module in ("torch", "deepspeed", "zarr"):
        script = SCRIPT.partition("import streamshard\n")[0] + f"import {module}\n"
        done = bare(script, tmp_path)
        assert done.returncode != 0
        assert f"RuntimeError: imports {module}" in done.stderr


ONLY_IN_PYTHON = {
    "verify": {"progress"},
    "diff": {"progress"},
    "compact": {"progress", "now", "chunk_size"},
}
FUNCTIONS: dict[str, Callable[..., object]] = {
    **{verb: getattr(streamshard, f"plan_{verb}") for verb in PLANNERS},
    "verify": streamshard.verify,
    "diff": streamshard.diff,
    "inspect": streamshard.inspect,
    "compact": streamshard.compact,
}


def keywords(function: Callable[..., object]) -> list[inspect.Parameter]:
    """List the keyword-only parameters that `help` shows."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


@pytest.mark.parametrize("verb", FUNCTIONS)
def test_the_command_line_has_every_option_with_the_same_default(verb: str) -> None:
    places = ["a", "b", "c"][: {"verify": 1, "inspect": 1, "graft": 3}.get(verb, 2)]
    parsed = vars(arguments_of().parse_args([verb, *places]))
    for option in keywords(FUNCTIONS[verb]):
        if option.name not in ONLY_IN_PYTHON.get(verb, ()):
            value = parsed[option.name]
            assert (tuple(value) if isinstance(value, list) else value) == option.default


@pytest.mark.parametrize("verb", PLANNERS)
def test_functions_show_the_options_of_the_verb(verb: str) -> None:
    planned = keywords(getattr(streamshard, f"plan_{verb}"))
    types = {option.name: option.annotation for option in planned}
    kind, places = options_of(verb), ("source", "start", "target")
    wanted = {n: of for n, of in types_of(kind).items() if fields_of(kind)[n].help}
    assert types == {name: of for name, of in wanted.items() if name not in places}
    *rest, progress = keywords(getattr(streamshard, verb))
    assert (rest, progress.name) == (planned, "progress")


def test_what_is_no_option_is_refused_also_by_type_checkers() -> None:
    """Without the keywords in the types, the comments that silence the checker were unused."""
    with pytest.raises(TypeError, match="wrld_size"):
        streamshard.plan_repartition("a", "b", wrld_size=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="codek"):
        streamshard.convert("a", "b", codek="zstd")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        streamshard.plan_export("a", "b", "bf16")  # type: ignore[arg-type, call-arg]
    with pytest.raises(TypeError, match="positional"):
        streamshard.export("a", "b", None, "bf16")  # type: ignore[arg-type, call-arg]


def test_options_do_not_change_with_the_lists_they_were_made_from() -> None:
    patterns = ["layers.*"]
    options = ExportOptions("a", "b", include=patterns)
    patterns.append("embed.*")
    assert options.include == ("layers.*",)

"""The rooms of the package, and who may import whom: kept by this test, not by a diagram."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import streamshard
from tests.fabricated import write
from tests.job import Job

ROOT = Path(streamshard.__file__).parent
FLOORS: dict[str, int] = {
    "model": 0, "errors": 0, "sizes": 0,
    "registry": 0, "health": 0,
    "layout": 1, "io": 1, "options": 1, "checksums": 1,
    "engine": 2, "formats": 2, "drawing": 2, "verb_options": 2,
    "checks": 3, "cluster": 3, "reader": 3, "source": 4, "compare": 5, "transfer": 5,
    "native": 6, "operations": 7,
    "degrees": 8, "merging": 8, "grafting": 8, "view": 8,
    "": 9, "cli": 9, "live": 9,
    "__main__": 10, "deepspeed": 10, "testing": 10,
}  # fmt: skip
"""Floor of every room and of every module beside them; the package itself has the empty name."""
INNER: dict[str, tuple[str, ...]] = {
    "engine.numeric": ("engine.jobs", "engine.run", "engine.scan"),
    "engine.jobs": ("engine.run", "engine.scan"),
    "engine.run": ("engine.scan",),
    "formats.pickle": ("formats.torch", "formats.deepspeed", "formats.zarr"),
    "formats.torch": ("formats.deepspeed", "formats.zarr"),
    "formats.deepspeed": ("formats.zarr",),
    "formats.deepspeed.cut": ("formats.deepspeed.read", "formats.deepspeed.write"),
    "formats.deepspeed.read": ("formats.deepspeed.write",),
    "formats.deepspeed.write": ("formats.deepspeed.read",),
    "cli.text": ("engine", "formats", "io", "layout"),
}
"""What a folder may not import although its floor allows it."""
VERBS = (
    "repartition",
    "convert",
    "export",
    "verify",
    "diff",
    "inspect",
    "read",
    "newest",
    "compact",
)
"""Folders of one verb each, and `read`, which is `streamshard.open`."""
CROSSINGS = {("compact", verb) for verb in VERBS} | {("read", "inspect")}
"""`compact` runs other verbs; `open` shows what `inspect` summarizes."""
CORE = "streamshard.operations.repartition.repartition"
CORE_MODULES, CORE_LINES = 80, 14_931
"""What who touches the core has to know: all that it imports, and what that imports, lazily or for
type checking as well."""
PLAIN = {
    "repartition": (125, 20_021),
    "convert": (130, 21_415),
    "inspect": (109, 16_637),
}
"""Modules and lines that a plain run of a verb loads: native shards on a disk, of Adam, for the
same degrees. They fall, unless the plain way itself learns something, as to map its sources, or a
verb comes, whose options all runs load."""
AROUND = (
    "degrees",
    "grafting",
    "merging",
    "formats.deepspeed.model_parallel",
    "view",
    "formats.universal",
    "formats.fsdp_ranks",
)
"""Rooms that the core does not import: other degrees, how models are cut for them, formats."""
LIVE = "live"
"""Meets live engines, which is why it alone imports torch and deepspeed."""
DEMO = "demo"
"""Stands beside the house: what it may import is listed in its own test."""
TESTING = "testing"
"""Tests for packages with a reader of their own, in modules of the names of what they test."""

FLAGS_OF_OTHERS = {
    "--make-vocab-size-divisible-by", "--backend", "--local_dir", "--target_dir", "--checkpoint",
    "--per_device_train_batch_size", "--gradient_accumulation_steps", "--ignore_data_skip",
}  # fmt: skip
"""Flags of other programs, which messages of all rooms may name."""


def module_names(root: Path) -> dict[str, Path]:
    """Name every module of a package, the package itself included."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = module_names(ROOT)


@cache
def import_statements(path: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """List what import statements of a module name, anywhere in it: (from what, names)."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = ""
            if isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
            found.append((base, tuple(alias.name for alias in node.names)))
    return tuple(found)


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """List what a module imports anywhere in it, lazily or for type checking as well."""
    found: set[str] = set()
    for base, names in import_statements(path):
        if not base:
            found |= set(names)
        elif base[0] == ".":
            found.add(base)
        else:
            # `from package import module` imports the module, not just the package.
            whole = {f"{base}.{name}" for name in names}
            modules = {name for name in whole if name in known}
            found |= modules | ({base} if modules != whole else set())
    return found


def is_below_the_surfaces(module: str) -> bool:
    """Tell whether a module serves the command line, Python and live engines alike."""
    surfaces = (DEMO, "drawing", "options", "verb_options")
    return room(module) not in surfaces and FLOORS[room(module)] < FLOORS["cli"]


def room(module: str) -> str:
    """Name the room of a module, or the module itself where it stands beside the rooms."""
    return module.partition(".")[2].partition(".")[0]


def broken(module: str, imported: str) -> str | None:
    """Say which rule an import breaks, if any."""
    if imported.startswith("."):
        return "relative"
    if imported.partition(".")[0] != "streamshard":
        return None
    here, there = room(module), room(imported)
    if here == DEMO or there == DEMO:
        return None if here == DEMO and there in (DEMO, "") else "demo"
    if here == there and here != "":
        return _broken_inside(module, imported)
    if any(_is_in(module, room) and _is_in(imported, other) for room, other in _inner_rules()):
        return "inner"
    return None if FLOORS[there] < FLOORS[here] else "floor"


def _inner_rules() -> list[tuple[str, str]]:
    return [(room, other) for room, others in INNER.items() for other in others]


def _is_in(module: str, room: str) -> bool:
    return f"{module}.".startswith(f"streamshard.{room}.")


def _broken_inside(module: str, imported: str) -> str | None:
    """Say which rule an import inside one room breaks, if any."""
    for inner, others in _inner_rules():
        if _is_in(module, inner) and _is_in(imported, others):
            return "inner"
    one, other = verb(module), verb(imported)
    if one != other and other is not None and (one, other) not in CROSSINGS:
        return "verb"
    return None


def verb(module: str) -> str | None:
    parts = module.split(".")
    is_of_verb = parts[1:2] == ["operations"] and len(parts) > 3 and parts[2] in VERBS
    return parts[2] if is_of_verb else None


def test_every_module_has_a_floor() -> None:
    assert {room(module) for module in MODULES} == {*FLOORS, DEMO}


def test_imports_only_from_below_or_from_its_own_room() -> None:
    found = {
        (module, name): broken(module, name)
        for module, path in MODULES.items()
        for name in imports(path, MODULES)
    }
    assert {names: rule for names, rule in found.items() if rule} == {}


@pytest.mark.parametrize(
    ("module", "imported", "rule"),
    [
        ("streamshard.layout.zero", "streamshard.engine.run.runner", "floor"),
        ("streamshard.engine.run.runner", "streamshard.formats.pickle.inert", "floor"),
        ("streamshard.io.files", "streamshard.formats.pickle.inert", "floor"),
        ("streamshard.formats.pickle.inert", "streamshard.source.source", "floor"),
        ("streamshard.model", "streamshard.errors", "floor"),
        ("streamshard.source.source", "streamshard.cli.main", "floor"),
        ("streamshard.source.source", "streamshard", "floor"),
        ("streamshard.operations.diff.diff", "streamshard.degrees.degree_changes", "floor"),
        ("streamshard.degrees.degree_changes", "streamshard.source.source", None),
        ("streamshard.layout.zero", ".cutting", "relative"),
        ("streamshard.cli.main", "streamshard.demo.rank", "demo"),
        ("streamshard.demo.rank", "streamshard.formats.pickle.inert", "demo"),
        ("streamshard.demo.rank", "streamshard", None),
        ("streamshard.demo.rank", "streamshard.demo", None),
        ("streamshard.cli.main", "streamshard.cli.text.tables", None),
        ("streamshard.cli.main", "streamshard.engine.run.resident_memory", None),
        ("streamshard.cli.text.tables", "streamshard.engine.run.phases", "inner"),
        ("streamshard.engine.numeric.cast", "streamshard.engine.run.work", "inner"),
        ("streamshard.formats.pickle.inert", "streamshard.formats.torch.torch_file", "inner"),
        ("streamshard.operations.diff.diff", "streamshard.operations.verify.verify", "verb"),
        ("streamshard.transfer.target", "streamshard.operations.diff.diff", "floor"),
        ("streamshard.operations.compact.compact", "streamshard.operations.verify.verify", None),
        ("streamshard.formats.checkpoint", "streamshard.layout.zero", None),
        ("streamshard.layout.zero", "numpy", None),
        ("streamshard.layout.zero", "streamshard.layout.cutting", None),
    ],
)
def test_the_rules_themselves(module: str, imported: str, rule: str | None) -> None:
    assert broken(module, imported) == rule


def closure(module: str, graph: dict[str, set[str]]) -> set[str]:
    found, left = {module}, [module]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def test_one_module_alone_imports_by_text() -> None:
    """What is named is there."""
    users = {module for module, path in MODULES.items() if "import_module" in path.read_text()}
    assert users == {"streamshard", "streamshard.registry"}
    named = {
        module: re.findall(r'"(streamshard\.[\w.]+):(\w+)"', path.read_text())
        for module, path in MODULES.items()
    }
    for name, attribute in {pair for pairs in named.values() for pair in pairs}:
        assert re.search(rf"^(def |class )?{attribute}\b", MODULES[name].read_text(), re.MULTILINE)


def test_who_touches_the_core_need_not_know_more_than_before() -> None:
    known = closure(CORE, graph_of(MODULES))
    lines = sum(len(MODULES[module].read_text().splitlines()) for module in known)
    assert len(known) <= CORE_MODULES
    assert lines <= CORE_LINES


@pytest.mark.parametrize("verb", PLAIN)
def test_a_plain_run_loads_no_more_than_before(verb: str, tmp_path: Path) -> None:
    """From its start to its end."""
    run, out = str(write(Job(stage=2), tmp_path / "run")), str(tmp_path / "out")
    arguments = {"repartition": [out, "--world-size", "3"], "convert": [out], "inspect": []}
    command = [verb, run, *arguments[verb], "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *command], check=True, capture_output=True, text=True
    )
    loaded = [MODULES[line] for line in done.stdout.splitlines() if line in MODULES]
    most_modules, most_lines = PLAIN[verb]
    assert len(loaded) <= most_modules
    assert sum(len(path.read_text().splitlines()) for path in loaded) <= most_lines


_LOADED = """
import sys
from streamshard.cli.main import main
assert main(sys.argv[1:]) == 0
print(*(name for name in sys.modules if name.partition(".")[0] == "streamshard"), sep="\\n")
"""


def test_the_core_imports_no_room_around_it() -> None:
    known = closure(CORE, graph_of(MODULES))
    assert [module for module in known if any(_is_in(module, room) for room in AROUND)] == []


def test_no_name_is_used_for_two_things() -> None:
    """Every module, but for a verb's own and its folder, and every class has a name of its own."""
    leaves = Counter(
        path.stem
        for path in MODULES.values()
        if path.name not in ("__init__.py", "__main__.py")
        and path.parent.name not in (DEMO, TESTING)
    )
    classes = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in (leaves + classes).items() if count > 1] == []


def test_what_one_module_alone_uses_is_private_by_name() -> None:
    """A function or a constant that neither another module nor a test names begins with `_`."""
    users = Counter(
        word for path in MODULES.values() for word in set(re.findall(r"\w+", path.read_text()))
    )
    beside = [p for d in ("tests", "benchmarks", "docs") for p in (ROOT.parent / d).rglob("*.py")]
    known = {*streamshard.__all__}
    known.update(*(re.findall(r"\w+", path.read_text()) for path in beside if path.is_file()))
    found = [
        f"{path}: {name}"
        for path in MODULES.values()
        for name in own_names(path) - known
        if users[name] == 1 and name[0] != "_"
    ]
    assert found == []


def own_names(path: Path) -> set[str]:
    """Name the functions and the constants of a module."""
    body = ast.parse(path.read_text()).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    targets = {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    return functions | {name for name in targets if name.isupper()}


def graph_of(known: dict[str, Path]) -> dict[str, set[str]]:
    """Draw who imports whom inside a package."""
    return {
        module: imports(path, known) & known.keys() - {module} for module, path in known.items()
    }


def test_there_are_no_cycles() -> None:
    order = list(TopologicalSorter(graph_of(MODULES)).static_order())
    assert set(order) == set(MODULES)


def test_a_cycle_would_be_found_even_if_it_is_lazy_or_for_types_only(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def f():\n    from house import b\n")
    (package / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.a import f\n"
    )
    known = module_names(package)
    assert set(known) == {"house", "house.a", "house.b"}
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph_of(known)).static_order())


def test_a_room_s_init_holds_a_docstring_only() -> None:
    for path in MODULES.values():
        if path.name == "__init__.py" and path.parent != ROOT:
            tree = ast.parse(path.read_text())
            assert ast.get_docstring(tree), path
            assert len(tree.body) == 1, path


def test_nothing_imports_a_room_for_a_name() -> None:
    rooms = {name for name, path in MODULES.items() if path.name == "__init__.py"} - {"streamshard"}
    for module, path in MODULES.items():
        assert imports(path, MODULES) & rooms == set(), module


def test_the_layout_is_integers_with_the_disk_unplugged() -> None:
    allowed = {"numpy", "math", "collections", "dataclasses", "typing", "itertools", "streamshard"}
    allowed |= {"operator", "types"}
    for module, path in MODULES.items():
        if room(module) == "layout":
            tops = {name.partition(".")[0] for name in imports(path, MODULES)}
            assert tops <= allowed, module


def test_one_room_imports_torch_and_deepspeed_and_the_demo_little_else() -> None:
    for module, path in MODULES.items():
        tops = {name.partition(".")[0] for name in imports(path, MODULES)}
        if room(module) == LIVE:
            continue
        if room(module) == DEMO:
            ours = {"streamshard", "torch", "deepspeed"}
            assert {top for top in tops - ours if not _is_standard(top)} == set(), module
        else:
            # One method hands out torch's tensors, and looks for torch only when it is called.
            lent = {"torch"} if module == "streamshard.source.lazy_tensor" else set()
            assert tops & {"torch", "deepspeed"} == lent, module


def _is_standard(name: str) -> bool:
    return name in sys.stdlib_module_names


def test_only_surfaces_name_flags() -> None:
    """What lies below them names an `Option`, which the caller's surface words."""
    flags = {
        (module, flag)
        for module in filter(is_below_the_surfaces, MODULES)
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", node.value)
    }
    assert {flag for _, flag in flags} <= FLAGS_OF_OTHERS, flags


def test_nothing_prints_but_the_demo() -> None:
    for module, path in MODULES.items():
        calls = [
            node.func
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        ]
        prints = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
        assert not prints or room(module) == DEMO, module

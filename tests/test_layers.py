"""The rooms of the package, and who may import whom: kept by this test, not by a diagram."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import streamshard

ROOT = Path(streamshard.__file__).parent
FLOORS: dict[str, int] = {
    "model": 0, "errors": 0, "reading": 0, "sizes": 0, "defaults": 0,
    "plan": 1, "engine": 1, "formats": 1, "drawing": 1,
    "operations": 2,
    "": 3, "__main__": 3, "cli": 3, "command_line": 3, "options": 3, "completion": 3,
    "progress": 3, "tables": 3, "diff_text": 3, "inspection_tables": 3, "outlook_text": 3,
    "stopping": 3, "streams": 3,
}  # fmt: skip
"""Floor of every room and of every module beside them; the package itself has the empty name."""
DEMO = "demo"
"""Stands beside the house: what it may import is listed in its own test."""


def module_names(root: Path) -> dict[str, Path]:
    """Name every module of a package, the package itself included."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = module_names(ROOT)


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """List what a module imports anywhere in it, lazily or for type checking as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.add("." * node.level + (node.module or ""))
                continue
            base = node.module or ""
            # `from package import module` imports the module, not just the package.
            whole = {f"{base}.{alias.name}" for alias in node.names}
            modules = {name for name in whole if name in known}
            found |= modules | ({base} if modules != whole else set())
    return found


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
        ours = here == there or FLOORS.get(there) == max(FLOORS.values())
        return None if here == DEMO and ours else "demo"
    if here == there and here != "":
        return None
    if FLOORS[there] == FLOORS[here] == max(FLOORS.values()):
        return None
    return None if FLOORS[there] < FLOORS[here] else "floor"


def test_every_module_has_a_floor() -> None:
    assert {room(module) for module in MODULES} == {*FLOORS, DEMO}


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_from_below_or_from_its_own_room(module: str) -> None:
    found = {name: broken(module, name) for name in imports(MODULES[module], MODULES)}
    assert {name: rule for name, rule in found.items() if rule} == {}


@pytest.mark.parametrize(
    ("module", "imported", "rule"),
    [
        ("streamshard.plan.zero", "streamshard.engine.run", "floor"),
        ("streamshard.engine.run", "streamshard.formats.inert", "floor"),
        ("streamshard.formats.inert", "streamshard.plan", "floor"),
        ("streamshard.formats.inert", "streamshard.operations.source", "floor"),
        ("streamshard.model", "streamshard.errors", "floor"),
        ("streamshard.operations.source", "streamshard.cli", "floor"),
        ("streamshard.operations.source", "streamshard", "floor"),
        ("streamshard.plan.zero", ".cutting", "relative"),
        ("streamshard.cli", "streamshard.demo.rank", "demo"),
        ("streamshard.demo.rank", "streamshard.formats.inert", "demo"),
        ("streamshard.demo.rank", "streamshard", None),
        ("streamshard.demo.rank", "streamshard.demo", None),
        ("streamshard.cli", "streamshard.tables", None),
        ("streamshard.cli", "streamshard.engine.memory", None),
        ("streamshard.plan.zero", "numpy", None),
        ("streamshard.plan.zero", "streamshard.plan.grid", None),
    ],
)
def test_the_rules_themselves(module: str, imported: str, rule: str | None) -> None:
    assert broken(module, imported) == rule


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


@pytest.mark.parametrize(
    "init", [p for p in MODULES.values() if p.name == "__init__.py" and p.parent != ROOT]
)
def test_a_room_s_init_holds_a_docstring_only(init: Path) -> None:
    tree = ast.parse(init.read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_nothing_imports_a_room_for_a_name() -> None:
    rooms = {name for name, path in MODULES.items() if path.name == "__init__.py"} - {"streamshard"}
    for module, path in MODULES.items():
        assert imports(path, MODULES) & rooms == set(), module


def test_plan_runs_with_the_disk_unplugged() -> None:
    allowed = {"numpy", "math", "collections", "dataclasses", "typing", "itertools", "streamshard"}
    allowed |= {"operator", "types"}
    for module, path in MODULES.items():
        if room(module) == "plan":
            tops = {name.partition(".")[0] for name in imports(path, MODULES)}
            assert tops <= allowed, module


def test_no_room_imports_torch_or_deepspeed_and_the_demo_little_else() -> None:
    for module, path in MODULES.items():
        tops = {name.partition(".")[0] for name in imports(path, MODULES)}
        if room(module) == DEMO:
            ours = {"streamshard", "torch", "deepspeed"}
            assert {top for top in tops - ours if not _is_standard(top)} == set(), module
        else:
            # One method hands out torch's tensors, and looks for torch only when it is called.
            lent = {"torch"} if module == "streamshard.operations.lazy" else set()
            assert tops & {"torch", "deepspeed"} == lent, module


def _is_standard(name: str) -> bool:
    return name in sys.stdlib_module_names


def test_only_the_command_line_prints() -> None:
    for module, path in MODULES.items():
        calls = [
            node.func
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        ]
        prints = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
        assert not prints or module == "streamshard.cli" or room(module) == DEMO, module

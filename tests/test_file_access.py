"""Who touches files: one room, and a few modules with a reason."""

import ast
import re

import pytest

from tests.test_layers import DEMO, MODULES, TESTING, room

SYSTEM = ("os", "os.path", "shutil", "io")
OF_SYSTEM = {
    "os.PathLike", "os.environ", "os.sep", "os.fsencode", "os.fsdecode", "os.path",
    "os.path.relpath", "os.path.dirname", "os.path.commonpath", "os._exit", "os.geteuid",
    "os.sched_getaffinity", "os.get_terminal_size", "shutil.get_terminal_size", "io.BytesIO",
    "io.StringIO", "io.TextIOWrapper", "os.isatty",
}  # fmt: skip
"""What all rooms may take from these modules: nothing of it looks at a file."""
FILE_MODULES = {"fcntl", "fileinput", "glob", "mmap", "tarfile", "tempfile", "zipfile"}
OF_PATH = {
    "chmod": 2, "exists": 1, "expanduser": 0, "glob": 1, "hardlink_to": 1,
    "is_block_device": 0, "is_dir": 1, "is_fifo": 0, "is_file": 1, "is_mount": 0,
    "is_symlink": 0, "iterdir": 0, "lchmod": 1, "link_to": 1, "lstat": 0, "mkdir": 3,
    "read_bytes": 0, "read_text": 3, "readlink": 0, "rename": 1, "replace": 1,
    "resolve": 1, "rglob": 1, "rmdir": 0, "samefile": 1, "stat": 1, "symlink_to": 2, "touch": 2,
    "unlink": 1, "walk": 3, "write_bytes": 1, "write_text": 4,
}  # fmt: skip
"""Methods of `pathlib.Path` that look at files, with the most arguments that they take: a method of
the same name with more arguments is another, such as `str.replace`."""

TOUCHES_FILES: dict[str, str] = {
    "streamshard.cli.streams": "opens what stands in for the process's own closed streams",
    "streamshard.cli.signals": "writes its last words to a descriptor, in a signal handler",
    "streamshard.engine.run.resident_memory": "reads in /proc how much memory the process has",
}
"""Modules outside of `io` that open, read or write, each with the reason."""


def file_accesses(tree: ast.Module) -> set[str]:
    """List what a module does with files by itself, instead of asking `io` for it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= FILE_MODULES & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in {"os", "os.path", "shutil", "io"}:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= FILE_MODULES & {str(node.module)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in SYSTEM:
            found |= {ast.unparse(node)} - OF_SYSTEM
        if isinstance(node, ast.Call):
            found |= _opened_or_examined(node)
    return found


def _opened_or_examined(call: ast.Call) -> set[str]:
    """Name the built-in `open` or the method of a path that a call is of, if any."""
    if isinstance(call.func, ast.Name):
        return {"open"} & {call.func.id}
    if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) == "os":
        return set()
    name, count = call.func.attr, len(call.args) + len(call.keywords)
    modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    is_open = name == "open" and any(isinstance(mode, str) for mode in modes)
    return {f".{name}()"} if is_open or count <= OF_PATH.get(name, -1) else set()


def test_only_one_room_touches_files() -> None:
    found = {
        module: accesses
        for module, path in MODULES.items()
        if room(module) not in ("io", DEMO, TESTING)
        and (accesses := file_accesses(ast.parse(path.read_text())))
    }
    assert {module: found[module] for module in found.keys() - TOUCHES_FILES.keys()} == {}
    assert found.keys() == TOUCHES_FILES.keys()


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("import tempfile", True),
        ("from mmap import mmap", True),
        ("from os import scandir", True),
        ("from shutil import rmtree", True),
        ("os.stat(path)", True),
        ("os.path.exists(path)", True),
        ("stack.callback(os.close, descriptor)", True),
        ("shutil.disk_usage(path).free", True),
        ("open(path)", True),
        ("path.open('rb')", True),
        ("(path / 'latest').is_file()", True),
        ("path.mkdir(parents=True, exist_ok=True)", True),
        ("path.read_text(errors='replace')", True),
        ("temporary.replace(path)", True),
        ("text.replace('a', 'b')", False),
        ("request.open()", False),
        ("sources.read_bytes(storage, 0, 4)", False),
        ("is_file(path)", False),
        ("os.fsencode(path)", False),
        ("os.path.relpath(path)", False),
        ("def f(path: str | os.PathLike[str]) -> None: ...", False),
        ("shutil.get_terminal_size()", False),
    ],
)
def test_what_counts_as_touching_files(line: str, is_found: bool) -> None:
    assert bool(file_accesses(ast.parse(line))) == is_found


OPENS_TO_WRITE = {
    "streamshard.io.writable": "refuses links and what is no file of its own",
    "streamshard.io.node_memory": "makes memory without a name, and opens that of other processes",
    "streamshard.cli.streams": "opens the null device",
    "streamshard.engine.run.resident_memory": "writes to a file of /proc",
    "streamshard.demo.rank": "writes into a directory that the demo has just made",
    "streamshard.demo.__main__": "writes into a directory that the demo has just made",
}
"""Modules that open what they write to themselves, each with the reason that it may."""


def opens_to_write(node: ast.AST) -> bool:
    """Tell whether an expression opens a file to write it, other than by `io.writable`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, text = node.func.attr, ast.unparse(node)
    if name == "open" and text.startswith("os."):
        return bool({"O_WRONLY", "O_RDWR", "O_CREAT"} & set(re.findall(r"\w+", text)))
    if name == "open":
        return bool(re.search(r"""open\(.*['"][wax+]""", text))
    return name in {"write_bytes", "write_text", "copyfile"}


def test_files_are_opened_to_write_in_one_place() -> None:
    found = {
        module
        for module, path in MODULES.items()
        if room(module) != TESTING
        and any(map(opens_to_write, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == OPENS_TO_WRITE.keys()


def test_no_error_of_the_system_is_ignored_whatever_it_is() -> None:
    """One that a wrong call of ours causes has to show; see `io.retry.ignored`."""
    calls = (
        (module, ast.unparse(node))
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")
    )
    wide = {"OSError", "Exception", "BaseException"}
    assert [call for call in calls if wide & set(re.findall(r"\w+", call[1]))] == []

"""The harness itself: it sees every call, and what it breaks is what it says."""

import errno
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.losses import Loss, lose
from tests.faults.scenarios import OUT, SCENARIOS, Scenario, make_sources
from tests.faults.server import Server
from tests.faults.shim import NO_KIND, Action, Arming, Call, Kind, Option, Side

# Name of the system's call → how the shim names what leads to it.
NAMES = {
    "openat": {"open", "opendir"},
    "read": {"read"},
    "pread64": {"pread64"},
    "preadv": {"preadv64"},
    "preadv2": {"preadv64v2"},
    "write": {"write"},
    "pwrite64": {"pwrite64"},
    "newfstatat": {"stat", "lstat", "fstatat"},
    "statfs": {"statvfs"},
    "fstatfs": {"fstatfs"},
    "mkdir": {"mkdir"},
    "unlink": {"unlink"},
    "unlinkat": {"unlinkat"},
    "rmdir": {"rmdir"},
    "rename": {"rename"},
    "renameat2": {"renameat2"},
    "fsync": {"fsync"},
    "fdatasync": {"fdatasync"},
    "syncfs": {"syncfs"},
    "sync_file_range": {"sync_file_range"},
    "fallocate": {"fallocate", "posix_fallocate64"},
    "fadvise64": {"posix_fadvise64"},
    "flock": {"flock"},
    "ftruncate": {"ftruncate"},
    "fchmod": {"fchmod"},
    "chmod": {"chmod"},
    "utimensat": {"utimensat"},
    "readlink": {"readlink"},
    "link": {"link"},
}
LEFT_OUT = {"execve", "close", "ioctl", "lseek", "fcntl", "fstat", "getdents64"}
"""Calls that cannot fail here, or that libc makes by itself as well."""


@pytest.fixture
def server(shim: Path) -> Iterator[Server]:
    with Server(shim) as found:
        yield found


@pytest.fixture(scope="module")
def sources(place: Path) -> Path:
    return make_sources(place / "sources of the harness")


@pytest.mark.kernel
@pytest.mark.parametrize("scenario", SCENARIOS[:3], ids=lambda scenario: scenario.name)
def test_it_sees_what_the_kernel_sees(
    scenario: Scenario, server: Server, sources: Path, tmp_path: Path
) -> None:
    """A call that the shim does not stand in front of would never fail in these tests."""
    strace = shutil.which("strace")
    if strace is None or platform.machine() != "x86_64":
        pytest.skip("needs strace, and the names that calls have on x86_64")
    log = tmp_path / "log"
    place = tmp_path / "target"
    place.mkdir()
    arguments = scenario.arguments(sources, place)
    command = [strace, "-f", "-y", "-o", str(log), sys.executable, "-m", "streamshard", *arguments]
    traced = subprocess.run(command, capture_output=True, text=True)
    if "ptrace" in traced.stderr:
        pytest.skip(f"strace may not trace here: {traced.stderr}")
    assert traced.returncode == 0, traced.stderr
    shutil.rmtree(place / OUT)
    ended = server.run(arguments, source=sources, target=place, with_calls=True)
    assert ended.code == 0
    expected = kernel_calls(log.read_text(), (sources, place))
    seen = Counter(call.name for call in ended.calls)
    assert expected.keys() <= NAMES.keys()
    for name, ours in NAMES.items():
        assert sum(seen[our] for our in ours) == expected[name], name


def kernel_calls(log: str, roots: Sequence[Path]) -> Counter[str]:
    """Count the calls that name something below directories, but for those that libc adds."""
    found: Counter[str] = Counter()
    for line in log.splitlines():
        begun = re.match(r"\d+ +(\w+)\((.*)", line)
        name, rest = begun.groups() if begun else ("", "")
        # What is looked at with an empty path is a descriptor.
        is_left_out = name in LEFT_OUT or (name == "newfstatat" and ', "",' in rest)
        if not is_left_out and any(str(root) in rest for root in roots):
            found[name] += 1
    return found


@pytest.mark.parametrize("onward", [NO_KIND, Kind.READ], ids=["once", "from there on"])
def test_an_error_is_that_of_the_call_it_was_meant_for(
    onward: Kind, server: Server, sources: Path, tmp_path: Path
) -> None:
    target = tmp_path / "errors"
    arguments = SCENARIOS[0].arguments(sources, target)
    whole = server.run(
        arguments, source=sources, target=target, options=Option.HURRY, with_calls=True
    )
    shutil.rmtree(target)
    reads = [call for call in whole.calls if call.kind & Kind.READ]
    ended = server.run(
        arguments,
        source=sources,
        target=target,
        arming=Arming(reads[3].number, Action.FAIL, errno.EIO, Kind.READ, Side.SOURCE, onward),
        options=Option.HURRY,
        with_calls=True,
    )
    assert ended.fired == ended.calls[reads[3].number]
    assert ended.failed == Kind.READ
    failed = [call for call in ended.calls if call.error == errno.EIO]
    assert failed == [call for call in ended.calls if call.kind & Kind.READ][3:][: len(failed)]
    assert (ended.code, "Input/output error" in ended.err) == (3, True)


def test_a_part_is_half_of_it(server: Server, sources: Path, tmp_path: Path) -> None:
    arming = Arming(0, Action.SHORT, 0, Kind.READ, Side.SOURCE, Kind.READ)
    arguments = SCENARIOS[0].arguments(sources, tmp_path / "parts")
    ended = server.run(
        arguments, source=sources, target=tmp_path / "parts", arming=arming, with_calls=True
    )
    reads = [call for call in ended.calls if call.kind & Kind.READ and call.length > 1]
    assert reads
    assert all(call.result <= (call.length + 1) // 2 for call in reads)


WRITTEN = Call(1, "pwrite64", Side.TARGET, Kind.WRITE, "", "", 0, 2, 4, 4, 0, is_done=True)
"""Four bytes at the second, of a file that is still to be named."""


@pytest.mark.parametrize("synced", ["no", "fsync", "syncfs", "another"])
@pytest.mark.parametrize(("loss", "left"), [(Loss.ZEROS, b"ab\0\0\0\0"), (Loss.CUT, b"ab")])
def test_content_is_lost_that_was_not_synced(
    loss: Loss, left: bytes, synced: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    wrote = replace(WRITTEN, path=str(path), inode=path.stat().st_ino)
    sync = replace(wrote, name="fsync", kind=Kind.SYNC, result=0)
    calls = {
        "no": [wrote],
        "fsync": [wrote, sync],
        "syncfs": [wrote, replace(sync, name="syncfs", path=str(tmp_path), inode=1)],
        "another": [wrote, replace(sync, path=f"{path}2", inode=1)],
    }[synced]
    lose(loss, calls, tmp_path, [])
    assert path.read_bytes() == (b"abcdef" if synced in ("fsync", "syncfs") else left)


@pytest.mark.parametrize(
    ("synced", "left"),
    [
        ((), {"old", "partial"}),
        ((".",), {"old", "out"}),
        (("partial", "."), {"old", "out", "out/file"}),
    ],
    ids=["nothing", "where it was moved", "both"],
)
def test_names_are_lost_that_were_not_synced(
    synced: Sequence[str], left: set[str], tmp_path: Path
) -> None:
    """A directory that was there before, a file in it, and then it is moved."""
    (tmp_path / "old").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    partial, out = str(tmp_path / "partial"), str(tmp_path / "out")
    made = replace(WRITTEN, name="open", kind=Kind.MAKE, path=f"{partial}/file")
    sync = replace(WRITTEN, name="fsync", kind=Kind.SYNC)
    moved = replace(made, name="rename", kind=Kind.MAKE | Kind.DROP, path=partial, other=out)
    inner = [replace(sync, path=partial)] if "partial" in synced else []
    outer = [replace(sync, path=str(tmp_path))] if "." in synced else []
    before = [tmp_path, tmp_path / "old", tmp_path / "partial"]
    lose(Loss.NAMES, [made, *inner, moved, *outer], tmp_path, before)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == left


@pytest.mark.parametrize("synced", [(), ("from",), ("to",), ("from", "to")])
def test_a_move_from_one_directory_to_another_needs_both_synced(
    synced: Sequence[str], tmp_path: Path
) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "file").touch()
    paths = [str(tmp_path / name / "file") for name in ("from", "to")]
    kind = Kind.MAKE | Kind.DROP
    moved = replace(WRITTEN, name="rename", kind=kind, path=paths[0], other=paths[1])
    sync = replace(WRITTEN, name="fsync", kind=Kind.SYNC)
    syncs = [replace(sync, path=str(tmp_path / name)) for name in synced]
    before = [tmp_path, tmp_path / "from", tmp_path / "to", tmp_path / "from" / "file"]
    lose(Loss.NAMES, [moved, *syncs], tmp_path, before)
    where = "to" if len(synced) == 2 else "from"
    assert [path.parent.name for path in tmp_path.rglob("file")] == [where]


def test_a_further_name_of_a_file_is_lost_like_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "new").hardlink_to(tmp_path / "old")
    paths = [str(tmp_path / name) for name in ("old", "new")]
    linked = replace(WRITTEN, name="link", kind=Kind.MAKE, path=paths[0], other=paths[1])
    lose(Loss.NAMES, [linked], tmp_path, [tmp_path, tmp_path / "old"])
    assert [path.name for path in tmp_path.iterdir()] == ["old"]

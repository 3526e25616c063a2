"""The harness itself: it sees every call, and what it breaks is what it says."""

import errno
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.scenarios import OUT, SCENARIOS, Scenario, make_sources
from tests.faults.server import Server
from tests.faults.shim import NO_KIND, Action, Arming, Kind, Option, Side

# Name of the system's call → how the shim names what leads to it.
NAMES = {
    "openat": {"open", "opendir"},
    "read": {"read"},
    "pread64": {"pread64"},
    "preadv": {"preadv64"},
    "preadv2": {"preadv64v2"},
    "write": {"write"},
    "pwrite64": {"pwrite64"},
    "pwritev2": {"pwritev64v2"},
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
@pytest.mark.parametrize("scenario", SCENARIOS[:3:2], ids=lambda scenario: scenario.name)
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
    """Count the calls that name something below directories, except those that libc adds."""
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

"""Runs of `compact` that are killed at calls of the file system, or that these fail; and the next.

At every moment the tag is whole where it was or in the trash, or its archive is whole.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compact.runs import make_run

DRIVER = """
import errno, json, os, shutil, signal, sys, traceback
import streamshard as api
from streamshard.engine.journal import Journal
from pathlib import Path

base, work = Path(sys.argv[1]), Path(sys.argv[2])
setup, killed, kinds, fails = map(json.loads, sys.argv[3:])
run, archive, tag = work / "run", work / "archive", "global_step80"
OWNERS = {kind: os for kind in ("rename", "replace", "link", "unlink", "rmdir")} | {"note": Journal}

def bits(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

def prepare():
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(base, run, copy_function=shutil.copy2)
    for options in setup:
        assert api.compact(run, archive, keep_last=2, **options).exit_code == 0

def stores():
    return {p.name: bits(p) for p in archive.glob("[!.]*.zarr")}

def places():
    return sorted(str(p.relative_to(work)) for p in work.rglob("global_step*[0-9]") if p.is_dir())

def cut_off_at(kind, count):
    # Runs in a child of its own; tells whether it came to that call.
    child = os.fork()
    if not child:
        owner, left = OWNERS[kind], [count]
        real = getattr(owner, kind)
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] == -1 and fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(arguments[0]))
            if left[0] == -1:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        setattr(owner, kind, call)
        try:
            api.compact(run, archive, keep_last=2, **killed)
        except api.StreamshardError:
            pass
        except BaseException:
            traceback.print_exc()
            os._exit(99)
        os._exit(0 if left[0] >= 0 else 1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGKILL
    assert os.WEXITSTATUS(status) in (0, 1), (kind, count)
    return os.WEXITSTATUS(status) == 1

def is_safe(original):
    for place in (run / tag, run / ".streamshard.trash" / tag):
        if place.is_dir() and bits(place) == original:
            return True
    return (archive / f"{tag}.zarr").is_dir() and api.verify(archive / f"{tag}.zarr").is_good

original = bits(base / tag)
prepare()
assert api.compact(run, archive, keep_last=2, **killed).exit_code == 0
wanted = stores(), places()
times = {}
for kind, step in kinds.items():
    count = 0
    while True:
        prepare()
        if not cut_off_at(kind, count):
            break
        assert is_safe(original), (kind, count)
        found = api.compact(run, archive, keep_last=2, **killed)
        # What was asked for by hand may have been done at the moment of the kill.
        assert found.exit_code in (0, 2), (kind, count, found)
        if found.exit_code == 2:
            assert "undelete" in killed or "purge" in killed
            assert api.compact(run, archive, keep_last=2, dry_run=True).exit_code == 0
        assert places() == wanted[1], (kind, count, places())
        for name, held in stores().items():
            other = wanted[0][name]
            differing = [p for p in held.keys() | other.keys() if held.get(p) != other.get(p)]
            assert not differing, (kind, count, name, differing)
        left = [str(p) for p in work.rglob("*") if "partial" in p.name or ".streamshard." in p.name]
        # Where nothing was left to write, nobody was there to remove the lock of the dead.
        known = (".trash", ".going", ".lock.global_step80.zarr", ".lock.global_step90.zarr")
        left = [p for p in left if not p.endswith(known)]
        assert not left, (kind, count, left)
        times[kind] = times.get(kind, 0) + 1
        count += step
print(json.dumps(times))
"""

DELETE = {"delete": True}
CASES = {
    "archive": ([], {}, {"rename": 1, "replace": 11, "link": 19, "unlink": 1, "note": 29}),
    "delete": ([{}], DELETE, {"rename": 1, "replace": 1, "unlink": 1}),
    "undelete": ([DELETE], {"undelete": ["global_step80"]}, {"rename": 1, "replace": 1}),
    "purge": (
        [DELETE],
        {"purge": ["global_step80"]},
        {"rename": 1, "unlink": 1, "rmdir": 1, "replace": 1},
    ),
}


@pytest.mark.parametrize("fails", [False, True], ids=["killed", "failing"])
@pytest.mark.parametrize("name", CASES)
def test_whatever_call_it_ends_at_nothing_is_lost(name: str, fails: bool, tmp_path: Path) -> None:
    make_run(tmp_path / "base")
    setup, killed, kinds = CASES[name]
    given = [
        str(tmp_path / "base"),
        str(tmp_path / "work"),
        *map(json.dumps, (setup, killed, kinds, fails)),
    ]
    done = subprocess.run([sys.executable, "-c", DRIVER, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout)
    assert times.keys() == kinds.keys()
    assert all(times.values())

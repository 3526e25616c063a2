"""A directory as it is before a run, and again as it may be after a power failure."""

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from tests.faults.crash_model import Node, State
from tests.faults.scenarios import empty

_LOCK: Final = ".streamshard.lock"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_OTHER_BOOT: Final = "00000000-0000-4000-8000-000000000000"


class CrashDisk:
    """A directory that is put into one state after another.

    In the directory that stays, files keep their inodes and times, by which `compact` knows them.
    They are links to those that were there first: nothing may write into them, and `is_intact`
    tells whether anything has.

    Parameters
    ----------
    keep
        Place beside the directory, for the links; what is there stays.
    stays
        Name of a directory in it that keeps its own inode, too.
    """

    def __init__(self, root: Path, keep: Path, stays: str = "") -> None:
        self._root = root
        self._stays = stays
        self.inodes: dict[int, Node] = {}
        keep.mkdir(exist_ok=True)
        self._keep = Path(tempfile.mkdtemp(dir=keep))
        self.start = self._read(root, stays=False)

    def _read(self, path: Path, *, stays: bool) -> Node:
        status = path.lstat()
        known = self.inodes.get(status.st_ino)
        if known is not None:
            return known
        node = Node(path.is_dir(), status.st_mode, times=(status.st_atime_ns, status.st_mtime_ns))
        self.inodes[status.st_ino] = node
        if node.is_directory:
            for entry in path.iterdir():
                node.names[entry.name] = self._read(entry, stays=stays or entry.name == self._stays)
            return node
        node.content = path.read_bytes()
        if stays and not path.name.startswith(_LOCK):
            node.original = self._keep / str(status.st_ino)
            os.link(path, node.original)
        return node

    def make(self, state: State) -> None:
        """Make the directory what it may be after the machine has started again."""
        boot = _BOOT.read_text().strip().encode() if _BOOT.exists() else b""
        self._clear()
        made: dict[int, Path] = {}
        directories = []
        for name, (mode, content, node) in state.tree.items():
            path = self._root / name
            if node.is_directory:
                path.mkdir(exist_ok=True)
                directories.append((path, mode, node))
            elif id(node) in made:
                os.link(made[id(node)], path)
            elif node.original is not None and content == node.content and mode == node.mode:
                os.link(node.original, path)
            else:
                # A lock tells in which life of the machine it was taken.
                path.write_bytes(content.replace(boot, _OTHER_BOOT.encode()) if boot else content)
                path.chmod(stat.S_IMODE(mode))
            made.setdefault(id(node), path)
        for path, mode, node in reversed(directories):
            path.chmod(stat.S_IMODE(mode))
            if node.times is not None:
                os.utime(path, ns=node.times)

    def _clear(self) -> None:
        for entry in self._root.iterdir():
            if entry.name == self._stays:
                empty(entry)
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    @property
    def is_intact(self) -> bool:
        """Whether nothing has written into a file that was there first."""
        files = (node for node in self.inodes.values() if node.original is not None)
        return all(node.original.read_bytes() == node.content for node in files if node.original)

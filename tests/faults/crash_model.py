"""What a disk may hold after a power failure: a weak model of file systems.

A run is a list of changes, each of one of these kinds: a name (made, removed, renamed, linked),
a file's content, a file's size (cut off), and a mode. A change becomes durable at any moment after
its call, and at the latest when a later call makes it so:

- fsync and fdatasync of a file: its content, size and mode. Not its name.
- fsync of a directory: the names in it, and that they exist. Not what they lead to.
- syncfs: everything.

Until then every change is durable or not, whatever the others are, with these exceptions, which
every file system keeps that streamshard is for:

- A rename happens wholly or not at all. It is certain to be durable only after a sync of both
  directories, if there are two.
- Changes of one and the same name become durable in their order.

So a file may have its name and be empty, have its size and hold zeros, or hold a part of what was
written; a new name may be there without the older one next to it, and so on. Modes and content of
directories that are gone do not matter. Times, owners and access lists are not modelled.

The bound. States are chosen at *moments*: after every change, and just before every sync and at
the end, where the most changes are not certain.

1. After every change: all of them durable, and none that is not certain.
2. Before every sync: names without content, names with zeros, content without names; every single
   change missing; every single one alone; every single content torn (zeros, or its first half).
3. Before every sync: every two changes missing, and every two alone, that are at most `_WINDOW`
   changes apart.
4. Before every sync: sets of changes by chance, from a seed.

States that look alike are one.
"""

import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

from tests.faults.shim import Call, Kind, Side

_WINDOW: Final = 3
"""Two changes that are so many apart, of those that are not certain, are tried together."""
_CHANCES: Final = 4
"""Sets of changes that are chosen by chance, for every sync."""
_NEVER: Final = 1 << 40
_END: Final = _NEVER - 1
"""Where there is no call any more."""

_FULL: Final = "full"
_ZEROS: Final = "zeros"
_HALF: Final = "half"


@dataclass(eq=False, slots=True)
class Node:
    """A file or a directory; directories know the names in them when the run began."""

    is_directory: bool
    mode: int
    content: bytes = b""
    names: "dict[str, Node]" = field(default_factory=dict)
    original: Path | None = None
    """A link to the file that was there when the run began."""
    times: tuple[int, int] | None = None
    """Times of access and change that it had then, ns."""


Slot: TypeAlias = tuple[Node, str]
"""A directory and a name in it."""


@dataclass(eq=False, slots=True)
class Change:
    """A change of a name, of content, of a size or of a mode."""

    number: int
    """Of its call."""
    text: str
    names: tuple[tuple[Slot, Node | None], ...] = ()
    """What is in which slot from then on."""
    node: Node | None = None
    offset: int = 0
    content: bytes | None = None
    """What is written at the offset."""
    size: int | None = None
    mode: int | None = None
    certain: int = _NEVER
    """Number of the call after which it is durable."""
    unsynced: set[int] = field(default_factory=set)
    """Directories, by their `id`, that are still to be synced."""


Seen: TypeAlias = tuple[int, bytes, Node]
"""Mode with the kind of file, content, and which file it is."""
Tree: TypeAlias = dict[str, Seen]
"""Relative path → what is there."""


@dataclass(frozen=True, slots=True)
class State:
    """What is on the disk: a choice of changes."""

    text: str
    tree: Tree
    is_at_end: bool
    """Whether the run had come to its end by then."""

    @property
    def key(self) -> tuple[bool, frozenset[tuple[str, int, bytes]]]:
        """Tell by its look whether two are the same."""
        looks = frozenset((path, mode, content) for path, (mode, content, _) in self.tree.items())
        return self.is_at_end, looks


class History:
    """All changes of a run below one directory.

    Raises
    ------
    ValueError
        A call did something that the model does not know.
    """

    def __init__(
        self, root: Path, start: Node, inodes: Mapping[int, Node], calls: Sequence[Call]
    ) -> None:
        self._root = root
        self._start = start
        self._inodes = dict(inodes)
        self._live: dict[int, dict[str, Node]] = {}
        self.changes: list[Change] = []
        self.syncs: list[int] = []
        """Numbers of the calls before which the most is uncertain, and of the end."""
        for call in calls:
            if call.side & Side.TARGET and call.is_done and call.result >= 0:
                self._take(call)
        self.syncs.append(_END)
        self._numbers = [change.number for change in self.changes]

    # What calls change ---------------------------------------------------------------------------

    def _take(self, call: Call) -> None:
        if call.kind & Kind.SYNC:
            self._sync(call)
        elif call.kind & Kind.WRITE:
            if call.result:
                if call.content is None:
                    raise ValueError(f"{call}: nobody knows what it wrote")
                node, content = self._inodes[call.inode], bytes.fromhex(call.content)
                self._note(call, node=node, offset=call.offset, content=content)
        elif call.name in ("ftruncate", "truncate"):
            self._note(call, node=self._inodes[call.inode], size=call.offset)
        elif call.name.startswith(("rename", "link", "unlink", "rmdir", "mkdir")):
            self._name(call)
        elif call.name == "open" and call.kind & (Kind.MAKE | Kind.CHANGE):
            self._open(call)
        elif call.name in ("chmod", "fchmod", "fchmodat"):
            self._note(call, node=self._inodes[call.made], mode=call.mode)
        elif call.kind & (Kind.MAKE | Kind.DROP) or call.name.startswith("fallocate"):
            raise ValueError(f"{call}: the model does not know it")

    def _open(self, call: Call) -> None:
        slot = self._slot(call.path)
        node = self._names(slot[0]).get(slot[1])
        if node is None:
            self._name(call)
        elif call.offset & os.O_TRUNC:
            self._note(call, node=node, size=0)

    def _name(self, call: Call) -> None:
        slot = self._slot(call.path)
        known = self._names(slot[0]).get(slot[1])
        if call.name.startswith("rename"):
            self._set(call, (slot, None), (self._slot(call.other), known))
        elif call.name.startswith("link"):
            self._set(call, (self._slot(call.other), known))
        elif call.kind & Kind.DROP:
            self._set(call, (slot, None))
        else:
            node = Node(call.name.startswith("mkdir"), call.mode)
            self._inodes[call.made] = node
            self._set(call, (slot, node))

    def _set(self, call: Call, *names: tuple[Slot, Node | None]) -> None:
        for (directory, name), node in names:
            if node is None:
                self._names(directory).pop(name)
            else:
                self._names(directory)[name] = node
        change = self._note(call, names=names)
        change.unsynced = {id(directory) for (directory, _), _ in names}

    def _note(
        self,
        call: Call,
        *,
        names: tuple[tuple[Slot, Node | None], ...] = (),
        node: Node | None = None,
        offset: int = 0,
        content: bytes | None = None,
        size: int | None = None,
        mode: int | None = None,
    ) -> Change:
        text = str(call).replace(f"{self._root}/", "")
        change = Change(call.number, text, names, node, offset, content, size, mode)
        self.changes.append(change)
        return change

    def _sync(self, call: Call) -> None:
        self.syncs.append(call.number)
        node = None if call.name == "syncfs" else self._inodes[call.inode]
        for change in self.changes:
            if change.certain < _NEVER:
                continue
            change.unsynced.discard(id(node))
            is_synced = not change.unsynced if change.names else change.node is node
            if node is None or is_synced:
                change.certain = call.number

    def _names(self, directory: Node) -> dict[str, Node]:
        return self._live.setdefault(id(directory), dict(directory.names))

    def _slot(self, path: str) -> Slot:
        """Find the directory that a path lies in at that moment."""
        *parents, name = Path(path).relative_to(self._root).parts
        directory = self._start
        for parent in parents:
            directory = self._names(directory)[parent]
        return directory, name

    # What may be left of them --------------------------------------------------------------------

    def states(self, seed: int) -> Iterator[State]:
        """Yield the states within the bound, one of those that look alike; see the module."""
        chosen, seen = set(), set()
        for choice in self._choices(Random(seed)):
            if choice.key in chosen:
                continue
            chosen.add(choice.key)
            state = State(choice.text, self._tree(choice), choice.is_at_end)
            if state.key not in seen:
                seen.add(state.key)
                yield state

    def _choices(self, chance: Random) -> "Iterator[_Choice]":
        yield _Choice("before the first call", set())
        for change in self.changes:
            certain, open_ = self._at(change.number + 1)
            yield _Choice(f"after {change.text}: all", certain | {*open_})
            yield _Choice(f"after {change.text}: nothing uncertain", certain)
        for number in self.syncs:
            at = f"before #{number}" if number < _END else "at the end"
            certain, open_ = self._at(number)
            for choice in _of_sync(certain, open_, chance):
                yield replace(choice, text=f"{at}: {choice.text}", is_at_end=number == _END)

    def _at(self, number: int) -> tuple[set[Change], list[Change]]:
        """Divide the changes before a call: those that are certain, and the others."""
        done = self.changes[: bisect_right(self._numbers, number - 1)]
        certain = {change for change in done if change.certain < number}
        # What is earlier in the same place is certain too.
        certain = _with_earlier(certain, done)
        return certain, [change for change in done if change not in certain]

    def _tree(self, choice: "_Choice") -> Tree:
        """Apply changes in their order."""
        disk = _Disk(self._quiet)
        for change in self.changes:
            if change in choice.changes:
                disk.apply(change, choice.torn.get(change, _FULL))
        tree: Tree = {}
        disk.look(tree, "", self._start)
        return tree

    @cached_property
    def _quiet(self) -> dict[int, list[tuple[str, Seen]]]:
        """What is below each directory in which nothing ever changes: most are of that kind."""
        touched = {id(change.node) for change in self.changes}
        touched |= {id(slot[0]) for change in self.changes for slot, _ in change.names}
        quiet: dict[int, list[tuple[str, Seen]]] = {}

        def below(directory: Node) -> list[tuple[str, Seen]] | None:
            inside: list[tuple[str, Seen]] = []
            is_quiet = id(directory) not in touched
            for name, node in directory.names.items():
                is_quiet &= id(node) not in touched
                inside.append((name, (node.mode, node.content, node)))
                deeper = below(node) if node.is_directory else []
                is_quiet &= deeper is not None
                inside += [(f"{name}/{path}", seen) for path, seen in deeper or ()]
            if is_quiet:
                quiet[id(directory)] = inside
            return inside if is_quiet else None

        below(self._start)
        return quiet


class _Disk:
    """What is on a disk: all that has changed since the start."""

    def __init__(self, quiet: Mapping[int, Sequence[tuple[str, Seen]]]) -> None:
        self._quiet = quiet
        self._names: dict[int, dict[str, Node]] = {}
        self._files: dict[int, bytearray] = {}
        self._modes: dict[int, int] = {}

    def _names_of(self, directory: Node) -> dict[str, Node]:
        names = self._names.get(id(directory))
        if names is None:
            names = self._names[id(directory)] = dict(directory.names)
        return names

    def apply(self, change: Change, how: str) -> None:
        """Apply a change, or of its content only a part."""
        for (directory, name), node in change.names:
            if node is None:
                self._names_of(directory).pop(name, None)
            else:
                self._names_of(directory)[name] = node
        if change.node is not None and change.mode is not None:
            self._modes[id(change.node)] = change.mode
        elif change.node is not None:
            data = self._files.get(id(change.node))
            if data is None:
                data = self._files[id(change.node)] = bytearray(change.node.content)
            _alter(data, change, how)

    def look(self, tree: Tree, prefix: str, directory: Node) -> None:
        """Enter all that is below a directory, directories before what is in them."""
        names = self._names.get(id(directory), directory.names)
        for name, node in sorted(names.items()):
            path = prefix + name
            content = bytes(self._files.get(id(node), node.content))
            tree[path] = self._modes.get(id(node), node.mode), content, node
            if id(node) in self._quiet:
                tree.update((f"{path}/{deeper}", seen) for deeper, seen in self._quiet[id(node)])
            elif node.is_directory:
                self.look(tree, f"{path}/", node)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A choice of changes that are durable."""

    text: str
    changes: Collection[Change]
    torn: Mapping[Change, str] = field(default_factory=dict)
    """Those whose content is not all there, and what of it is."""
    is_at_end: bool = False

    @property
    def key(self) -> tuple[bool, frozenset[Change], frozenset[tuple[Change, str]]]:
        """Tell whether two are the same."""
        return self.is_at_end, frozenset(self.changes), frozenset(self.torn.items())


def _of_sync(
    certain: set[Change], uncertain: Sequence[Change], chance: Random
) -> Iterator[_Choice]:
    """Choose of the changes before a sync; items 2 to 4 of the bound."""
    every = certain | {*uncertain}
    names = {change for change in uncertain if change.names}
    content = [change for change in uncertain if change.content]
    yield _Choice("all", every)
    yield _Choice("nothing uncertain", certain)
    yield _Choice("names without content", certain | names)
    yield _Choice("names with zeros", every, dict.fromkeys(content, _ZEROS))
    yield _Choice("content without names", every - names)
    for change in content:
        for how in (_ZEROS, _HALF):
            yield _Choice(f"{how} of {change.text}", every, {change: how})
    for few in _few(uncertain):
        text = " and ".join(change.text for change in few)
        yield _Choice(f"without {text}", every - _with_later(few, uncertain))
        yield _Choice(f"only {text}", certain | _with_earlier(few, uncertain))
    for _ in range(_CHANCES if len(uncertain) > 1 else 0):
        share = chance.choice((0.2, 0.5, 0.8))
        some = [change for change in uncertain if chance.random() < share]
        torn = {c: chance.choice((_FULL, _ZEROS, _HALF)) for c in some if c.content}
        yield _Choice("by chance", certain | _with_earlier(some, uncertain), torn)


def _alter(data: bytearray, change: Change, how: str) -> None:
    """Change a file's content."""
    if change.size is not None:
        del data[change.size :]
        data.extend(bytes(change.size - len(data)))
    if change.content is not None:
        stop = change.offset + len(change.content)
        data.extend(bytes(max(0, stop - len(data))))
        half = len(change.content) // 2
        part = {_FULL: change.content, _HALF: change.content[:half], _ZEROS: b""}
        data[change.offset : change.offset + len(part[how])] = part[how]


def _few(changes: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    """Yield single changes, and pairs that are not far apart."""
    for number, change in enumerate(changes):
        yield (change,)
        for other in changes[number + 1 : number + 1 + _WINDOW]:
            yield change, other


def _with_earlier(some: Collection[Change], among: Sequence[Change]) -> set[Change]:
    """Add the earlier changes of the same names."""
    return _closed(some, list(reversed(among)))


def _with_later(some: Collection[Change], among: Sequence[Change]) -> set[Change]:
    """Add the later changes of the same names."""
    return _closed(some, among)


def _closed(some: Collection[Change], order: Sequence[Change]) -> set[Change]:
    found = {*some}
    slots: set[tuple[int, str]] = set()
    for change in order:
        own = {(id(directory), name) for (directory, name), _ in change.names}
        if change in found or own & slots:
            found.add(change)
            slots |= own
    return found

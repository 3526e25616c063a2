"""What lies in a directory that a target may take the place of."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Self

from streamshard import registry
from streamshard.formats.deepspeed import names
from streamshard.io.entries import entries, files_below, is_directory, paths_in
from streamshard.io.readable import Entry
from streamshard.model import Template
from streamshard.source.unfinished import COMMITTED, JOURNAL

_MARKS: Final = (COMMITTED, JOURNAL)
"""What a run leaves in a target, which belongs to no checkpoint."""


@dataclass(frozen=True)
class DirectoryContent:
    """The entries of a directory, as they were listed."""

    root: Path
    template: Template | None
    """Names of the dumps, if it is to be a directory of dumps."""
    entries: Sequence[Entry]

    @classmethod
    def of(cls, root: Path, template: Template | None) -> Self:
        return cls(root, template, list(entries(root)))

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the entries, without a run's own marks."""
        return frozenset({entry.name for entry in self.entries}.difference(_MARKS))

    @cached_property
    def directories(self) -> frozenset[str]:
        """Names of the entries that lead to directories."""
        return frozenset(
            entry.name
            for entry in self.entries
            if entry.name in self.names
            and (entry.is_directory or (entry.is_link and is_directory(entry.path)))
        )

    @cached_property
    def files(self) -> Sequence[str]:
        """Relative paths of all files below it, without a run's own marks."""
        found = (path.relative_to(self.root) for path in files_below(self.root))
        return [path.as_posix() for path in found if path.parts[0] not in _MARKS]

    def is_path_alone(self, tag: str) -> bool:
        """Tell whether the parent directories of a tag that is a path hold nothing else."""
        parts = Path(tag).parts
        if not names.is_tag(tag) or not is_directory(self.root / tag):
            return False
        levels = [self.root.joinpath(*parts[:depth]) for depth in range(1, len(parts))]
        return all(
            [entry.name for entry in paths_in(level)] == [parts[depth]]
            for depth, level in enumerate(levels, start=1)
        )

    def is_one_checkpoint(self) -> bool:
        """Tell whether it is one checkpoint, store, set of dumps or export, and no more."""
        answers = (reader.is_alone_in(self) for reader in registry.own_readers())
        return next((answer for answer in answers if answer is not None), False)

"""Names of raw per-rank dumps: a template in which `{rank}` stands for the rank."""

import re
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from streamshard.errors import IncompleteError, SourceNotFoundError, UsageError


@dataclass(frozen=True, slots=True)
class Template:
    """Files in one directory whose names differ by rank only: ``optimizer.{rank:02d}.pt``."""

    directory: Path
    name: str

    def file_name(self, rank: int) -> str:
        """Name one rank's file.

        >>> Template(Path("."), "optimizer.{rank:02d}.pt").file_name(3)
        'optimizer.03.pt'
        """
        return self.name.format(rank=rank)

    def rank_of(self, file_name: str) -> int | None:
        """Tell the rank that a file name stands for; None if the template does not make it.

        >>> Template(Path("."), "optimizer.{rank:02d}.pt").rank_of("optimizer.12.pt")
        12
        """
        before, after = (re.escape(text) for text in _literals(self.name))
        match = re.fullmatch(f"{before}([0-9]+){after}", file_name)
        if match is None or self.file_name(int(match[1])) != file_name:
            return None
        return int(match[1])

    def find(self) -> tuple[Path, ...]:
        """List the files of all ranks.

        Raises
        ------
        SourceError
            There are none, or one is missing between others.
        """
        where = self.directory / self.name
        if not self.directory.is_dir():
            raise SourceNotFoundError(f"{self.directory}: no such directory")
        ranks = {self.rank_of(entry.name) for entry in self.directory.iterdir()} - {None}
        if not ranks:
            raise SourceNotFoundError(f"{where}: no file of this name for any rank")
        for rank in range(len(ranks)):
            if rank not in ranks:
                missing = self.directory / self.file_name(rank)
                message = f"{missing}: missing, while ranks up to {max(filter(None, ranks))} exist"
                raise IncompleteError(f"{message}; copy it from the node that saved it")
        return tuple(self.directory / self.file_name(rank) for rank in range(len(ranks)))


def is_template(path: str) -> bool:
    """Tell whether a path stands for one file per rank."""
    return "{" in path


def parse(path: str) -> Template:
    """Read a template from the command line.

    Raises
    ------
    UsageError
        It does not name the rank exactly once, in the file's name.
    """
    whole = Path(path)
    try:
        fields = [field for _, field, _, _ in Formatter().parse(whole.name) if field is not None]
        fits = fields == ["rank"] and "{" not in str(whole.parent)
        template = Template(whole.parent, whole.name)
        fits = fits and template.file_name(0) != template.file_name(1)
    except (ValueError, KeyError, IndexError):
        fits = False
    if not fits:
        message = f"{path}: a template names the rank once, in the file's name"
        raise UsageError(f"{message}, such as 'ckpt/optimizer.{{rank:02d}}.pt'")
    return template


def _literals(name: str) -> tuple[str, str]:
    """Return the text before and after the rank."""
    texts = ["", ""]
    after = 0
    for literal, field, _, _ in Formatter().parse(name):
        texts[after] += literal
        if field is not None:
            after = 1
    return texts[0], texts[1]

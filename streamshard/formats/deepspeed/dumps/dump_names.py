"""Names of raw per-rank dumps: a template in which `{rank}` stands for the rank."""

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from string import Formatter
from typing import Final

from streamshard.errors import IncompleteError, SourceNotFoundError, UsageError
from streamshard.formats.deepspeed.names import is_template
from streamshard.io.entries import is_directory, is_file, paths_in
from streamshard.io.object_path import as_path
from streamshard.model import Template
from streamshard.sizes import some_of

_NUMBER: Final = re.compile(r"[0-9]+")
_SUFFIXES: Final = (".pt", ".pth", ".bin")


def files_of(template: Template) -> tuple[Path, ...]:
    """List the files of all ranks' dumps."""
    where = template.directory / template.name
    if not is_directory(template.directory):
        raise SourceNotFoundError("no such directory", path=template.directory)
    ranks = {template.rank_of(entry.name) for entry in paths_in(template.directory)} - {None}
    if not ranks:
        message = f"{where}: no file of this name for any rank{_hint_of_templates(where)}"
        raise SourceNotFoundError(message)
    for rank in range(len(ranks)):
        if rank not in ranks:
            missing = template.directory / template.file_name(rank)
            message = f"missing, while ranks up to {max(filter(None, ranks))} exist; copy it"
            raise IncompleteError(f"{message} from the node that saved it", path=missing)
    return tuple(template.directory / template.file_name(rank) for rank in range(len(ranks)))


def parse(path: str) -> Template:
    """Read a template from the command line."""
    whole = as_path(path)
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


# Templates of existing files ----------------------------------------------------------------------


def parse_source(path: str) -> Template:
    """Read a template of existing files, such as `raw/*.pt` or `{rank}` with its padding."""
    whole = as_path(path)
    if is_template(path):
        return _as_padded(parse(path))
    files = [name for name in _files_in(whole.parent) if fnmatchcase(name, whole.name)]
    if not files:
        raise SourceNotFoundError(f"{path}: no such file{_hint_of_templates(whole)}")
    name = fitting(files)
    if name is None:
        message = f"{path}: {some_of(files)}: these names do not differ in"
        raise UsageError(f"{message} the rank alone{_hint_of_templates(whole)}")
    return Template(whole.parent, name)


def template_for(paths: Sequence[Path]) -> str:
    """Return the template of files that were listed one by one, as a shell expands `raw/*.pt`."""
    name = fitting([path.name for path in paths])
    where = paths[0].with_name(name or paths[0].name)
    if name is None or {*files_of(Template(where.parent, name))} != {*paths}:
        message = f"{paths[0]} and {len(paths) - 1:,} more files: are not the dumps of all ranks"
        raise UsageError(f"{message}{_hint_of_templates(where)}")
    return str(where)


def fitting(file_names: Sequence[str]) -> str | None:
    """Find the only template that fits all of these names; None if there is not exactly one.

    >>> fitting(["7b-00.pt", "7b-01.pt"]), fitting(["7b-0.pt", "7b-10.pt"]), fitting(["a", "b"])
    ('7b-{rank:02d}.pt', '7b-{rank}.pt', None)
    """
    found = [name for name, made in _templates(file_names) if len(made) == len(file_names)]
    if len(found) > 1:  # a single file: its name may hold numbers other than the rank
        found = [name for name in found if Template(Path(), name).rank_of(file_names[0]) == 0]
    return found[0] if len(found) == 1 else None


def template_of(file_name: str, siblings: Iterable[str]) -> str | None:
    """Find the template that fits a file and the other ranks' files in its directory."""
    templates = {
        name: m
        for name, m in _templates(siblings)
        if Template(Path(), name).rank_of(file_name) is not None
    }
    whole = [name for name, m in templates.items() if len(m) > 1 and {*m} == {*range(len(m))}]
    found = whole or [*templates]
    return found[0] if len(found) == 1 else None


def _hint_of_templates(path: Path) -> str:
    """Say which templates fit the files in a path's directory."""
    templates = {
        name: ranks
        for name, ranks in _templates(_files_in(path.parent))
        if {*ranks} == {*range(len(ranks))} and name.endswith(_SUFFIXES)
    }
    most = sorted(templates, key=lambda name: (-len(templates[name]), name))
    if len(most) > 1:  # in names such as `step0-rank3` each number might be the rank
        most = [name for name in most if len(templates[name]) > 1]
    if not most:
        return "; give a template such as 'ckpt/optimizer.{rank:02d}.pt'"
    shown = " or ".join(f"'{path.parent / name}'" for name in most[:3])
    return f"; the files that are there have the template {shown}"


def _as_padded(template: Template) -> Template:
    """Use the padding of the existing files if the template's own padding misses some of them."""
    before, after = template.around
    names = _files_in(template.directory)
    alike = [n for n in names if re.fullmatch(f"{re.escape(before)}[0-9]+{re.escape(after)}", n)]
    own = {template.rank_of(name) for name in alike} - {None}
    if own and own == {*range(len(own))}:
        return template
    for name, ranks in _templates(alike):
        padded = Template(template.directory, name)
        if padded.around == template.around and len(ranks) == len(alike):
            return padded
    return template


def _files_in(directory: Path) -> list[str]:
    if not is_directory(directory):
        raise SourceNotFoundError("no such directory", path=directory)
    return sorted(entry.name for entry in paths_in(directory) if is_file(entry))


def _templates(file_names: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield each template that fits some names, with its ranks; each number in turn is the rank."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in file_names:
        for match in _NUMBER.finditer(name):
            around = name[: match.start()], name[match.end() :]
            numbers.setdefault(around, []).append(match[0])
    for around, texts in numbers.items():
        before, after = (text.replace("{", "{{").replace("}", "}}") for text in around)
        width = min(map(len, texts))
        is_padded = width > 1 and any(text.startswith("0") for text in texts)
        template = Template(Path(), f"{before}{{rank{f':0{width}d' * is_padded}}}{after}")
        ranks = [template.rank_of("".join((around[0], text, around[1]))) for text in texts]
        known = [rank for rank in ranks if rank is not None]
        if len(known) == len(texts):
            yield template.name, known

"""Finds the sidecars that a model's weights need: configurations, tokenizer, chat template."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from streamshard.formats import pretrained
from streamshard.formats.checkpoint import OtherFile
from streamshard.io.entries import examine, identify, is_directory, is_file, is_link, paths_in
from streamshard.io.files import stays_inside
from streamshard.model import FILE, Whole
from streamshard.source.source import Source
from streamshard.transfer.file_layout import Elements, FileLayout


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A file that is copied as it is."""

    path: str
    """Relative to the model's directory."""
    tensor: int
    """Number of the checkpoint's tensor that holds it."""
    mode: int
    """Permission bits."""


@dataclass(frozen=True, slots=True)
class ModelSidecars:
    """The sidecars, and the source to read them from."""

    source: Source
    """The given source, with the files next to it added as if they were in it."""
    sidecars: tuple[Sidecar, ...]
    notes: tuple[str, ...]

    def layouts(self) -> Iterator[FileLayout]:
        """Yield the layouts of the files."""
        for one in self.sidecars:
            nbytes = self.source.checkpoint.tensors[one.tensor].nbytes
            yield FileLayout(
                one.path, [Elements(Whole(one.tensor), nbytes, "uint8")], mode=one.mode
            )


def find_model_sidecars(source: Source, config: str) -> ModelSidecars:
    """Find the sidecars in a checkpoint, and missing ones in the directory around it.

    If the user may not read that directory, a note says so.
    `config`: the file that interprets the weights; a note says that there is none.
    """
    checkpoint = source.checkpoint
    inside = pretrained.in_order_of_preference(
        [file.path for file in checkpoint.files], checkpoint.tag, (config,)
    )
    root = source.path.absolute()
    # Of others' checkpoints only tensors are read.
    places = [root, root.parent] if checkpoint.foreign and is_directory(root) else [root.parent]
    neighbours: dict[str, Path] = {}
    notes: list[str] = []
    for place in places:
        try:
            files, links = _beside(place, {*inside, *neighbours}, config)
        except OSError as error:
            notes.append(f"Nothing was copied from {place}: it cannot be read ({error.strerror}).")
            continue
        neighbours |= files
        copied = files if place != root else {}
        notes += _notes(copied, place, links)
    source = _adopted(source, neighbours)
    paths = {**inside, **{name: str(path) for name, path in neighbours.items()}}
    tensors = {t.name: i for i, t in enumerate(source.checkpoint.tensors) if t.state == FILE}
    modes = {file.path: file.mode for file in source.checkpoint.files}
    sidecars = [Sidecar(name, tensors[path], modes[path]) for name, path in sorted(paths.items())]
    if config not in paths:
        notes.append(
            f"No {config} in or next to the source: from_pretrained needs the job's, next to the "
            "weights."
        )
    return ModelSidecars(source, tuple(sidecars), tuple(notes))


def _beside(place: Path, names: Collection[str], config: str) -> tuple[dict[str, Path], list[str]]:
    """Find sidecars in a directory that are not known yet, and links that lead out of it."""
    files: dict[str, Path] = {}
    links = []
    for entry in sorted(paths_in(place)):
        name = entry.name
        comes = name == config or pretrained.comes_along(name)
        if name in names or not name.isprintable() or not comes:
            continue
        if is_file(entry) and stays_inside(entry, place):
            files[name] = entry
        elif is_link(entry):
            links.append(name)
    return files, links


def _adopted(source: Source, neighbours: Mapping[str, Path]) -> Source:
    """Add files to a source, each as one piece of raw bytes."""
    if not neighbours:
        return source
    files = [identify(path) for path in neighbours.values()]
    others = [OtherFile(str(f.path), examine(f.path).permissions) for f in files]
    added = source.append_files([other.path for other in others], files)
    checkpoint = replace(added.checkpoint, files=(*added.checkpoint.files, *others))
    return replace(added, checkpoint=checkpoint)


def _notes(files: Mapping[str, Path], around: Path, links: Sequence[str]) -> Iterator[str]:
    if files:
        yield f"Copied from next to the source, {around}: {', '.join(files)}."
    if links:
        yield (
            f"Not copied, as they are links that lead out of {around}: {', '.join(links)}. Put "
            "copies of what belongs to the model next to the weights."
        )

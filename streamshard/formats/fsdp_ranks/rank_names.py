"""Names of the files that FSDP's ranks save in verl, and of those next to them."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from streamshard.errors import IncompleteError, raise_first
from streamshard.formats.deepspeed.read.rank_files import missing_ranks
from streamshard.io.entries import is_directory, names_in, paths_in

MODEL: Final = "model"
OPTIMIZER: Final = "optim"
EXTRA: Final = "extra_state"
KINDS: Final = (MODEL, OPTIMIZER, EXTRA)
"""What each rank saves, a file of each."""
CONFIG: Final = "fsdp_config.json"
"""File in which verl keeps the count of ranks (`verl/model_merger` reads it)."""
LORA: Final = "lora_train_meta.json"
"""File in which verl keeps rank and alpha of LoRA."""
PRETRAINED: Final = "huggingface"
"""Directory next to the files in which verl keeps the model's config and tokenizer."""
_FILE: Final = re.compile(rf"({'|'.join(KINDS)})_world_size_(\d{{1,6}})_rank_(\d{{1,6}})\.pt")


def rank_file(kind: str, ranks: int, rank: int) -> str:
    """Return the name of a rank's file.

    >>> rank_file(MODEL, 8, 3)
    'model_world_size_8_rank_3.pt'
    """
    return f"{kind}_world_size_{ranks}_rank_{rank}.pt"


def is_rank_file(name: str, kind: str = "") -> bool:
    """Tell whether a file has the name of a rank's file, of one kind or of any.

    >>> is_rank_file("optim_world_size_8_rank_3.pt"), is_rank_file("optim.pt")
    (True, False)
    """
    match = _FILE.fullmatch(name)
    return match is not None and kind in ("", match[1])


def path_of_file(name: str, directory: str) -> str:
    """Return the path of a file that is no rank's, from the name that a checkpoint gives to it.

    >>> path_of_file("config.json", "actor"), path_of_file("actor/notes.md", "actor")
    ('huggingface/config.json', 'notes.md')
    """
    own = f"{directory}/"
    return name.removeprefix(own) if name.startswith(own) else f"{PRETRAINED}/{name}"


def is_of_ranks(directory: Path) -> bool:
    """Tell whether a directory holds models of FSDP's ranks."""
    return is_directory(directory) and any(is_rank_file(n, MODEL) for n in names_in(directory))


def files_of(directory: Path) -> Mapping[str, list[Path]]:
    """List the files of all ranks by kind, in order of rank; none of what was not saved.

    Raises
    ------
    IncompleteError
        A rank's model is missing, or models of another count of ranks lie among them.
    """
    files: dict[tuple[str, int], dict[int, Path]] = {}
    for path in sorted(paths_in(directory)):
        if match := _FILE.fullmatch(path.name):
            files.setdefault((match[1], int(match[2])), {})[int(match[3])] = path
    counts = [ranks for kind, ranks in files if kind == MODEL]
    if len(counts) > 1:
        one, other = counts[:2]
        message = f"holds files of {one} ranks and of {other}; move away the set that is older"
        raise IncompleteError(message, path=directory)
    (ranks,) = counts
    _require_all(directory, MODEL, ranks, files[MODEL, ranks])
    own = {kind: files.get((kind, ranks), {}) for kind in KINDS}
    return {kind: [paths[rank] for rank in sorted(paths)] for kind, paths in own.items()}


def require_ranks(directory: Path, kind: str, paths: Collection[Path], ranks: int) -> None:
    """Refuse files of some of the ranks."""
    numbers = {int(match[3]): path for path in paths if (match := _FILE.fullmatch(path.name))}
    _require_all(directory, kind, ranks, numbers)


def _require_all(directory: Path, kind: str, ranks: int, paths: Mapping[int, Path]) -> None:
    def file_of(rank: int) -> Path:
        return directory / rank_file(kind, ranks, rank)

    raise_first(missing_ranks(paths.keys(), ranks, file_of))
    if len(paths) > ranks:
        raise IncompleteError(f"of a rank beyond the {ranks} of its save", path=paths[max(paths)])

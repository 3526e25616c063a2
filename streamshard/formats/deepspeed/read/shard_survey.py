"""Lists all errors of a set of shards that cannot be opened, file by file.

Readers stop at the first error. A user who repairs a checkpoint needs all of them: every missing
rank, and every file that is torn or belongs to another step.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeVar

from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    SourceError,
    release_frames,
)
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.formats.deepspeed.read.agreement import rank_counts, stage_of
from streamshard.formats.deepspeed.read.rank_files import fingerprint, fingerprints, require
from streamshard.formats.deepspeed.read.zero_reader import malformed
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import of_file, require_unrolled
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import tensor_of
from streamshard.formats.torch.tree_comparison import spell_few, spell_key
from streamshard.io.entries import paths_in

Roots = Mapping[Path, Mapping[str, Node]]
Facts = Mapping[str, bytes]
T = TypeVar("T")

_MOST_MISSING: Final = 1000
"""Most missing ranks that are listed one by one; more than that are listed as ranges."""

_SAME_IN_RANKS: Final = (
    names.ZERO_STAGE,
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    names.CLIP_GRAD,
    names.DS_VERSION,
)
_SAME_IN_MODELS: Final = (
    "global_steps",
    "skipped_steps",
    "global_samples",
    names.PARAM_SHAPES,
    names.MP_WORLD_SIZE,
)


@dataclass(frozen=True, slots=True)
class Survey:
    """The errors of a set of shards."""

    own: list[SourceError]
    """Errors of single files, whatever set they belong to."""
    together: list[SourceError]
    """Errors of the files as a set that ZeRO saved: missing ranks, contradictions."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The values that most files of a set record about their save; None if no file records one."""

    zero_stage: int | None
    world_size: int | None
    global_steps: int | None
    version: str | None


def recorded(paths: Iterable[Path]) -> Recorded:
    """Return the values recorded in shards or dumps that cannot be opened as a checkpoint."""
    errors: list[SourceError] = []
    roots = dict(_readable(paths, errors))
    states = {path: _state(r) if names.OPTIMIZER in r else r for path, r in roots.items()}
    cut = {
        path: s for path, s in states.items() if names.FLAT_GROUPS_3 in s or names.FLAT_GROUPS in s
    }
    models = {path: root for path, root in roots.items() if names.DP_WORLD_SIZE in root}
    stages = _of_each(cut, lambda state, path: stage_of([state], [path]), errors)
    ranks = _of_each(models, _ranks_in_model, errors) or _of_each(cut, _count_in_rank, errors)
    return Recorded(
        zero_stage=_most_common(stages.values(), int),
        world_size=_most_common(ranks.values(), int),
        global_steps=_most_common((root.get("global_steps") for root in models.values()), int),
        version=_most_common((root.get(names.DS_VERSION) for root in roots.values()), str),
    )


def _ranks_in_model(root: Mapping[str, Node], path: Path) -> Node:
    """Count all ranks, including those of tensor, pipeline and sequence parallelism."""
    data_parallel, parts = _count_in_model(root, path), root.get(names.MP_WORLD_SIZE, 1)
    config = root.get(names.DS_CONFIG)
    if not isinstance(data_parallel, int) or not isinstance(parts, int):
        return None
    known = config if isinstance(config, dict) else {}
    return data_parallel * parts * ds_config.sequence_replicas(known, data_parallel)


def _most_common(values: Iterable[Node], kind: type[T]) -> T | None:
    counts = Counter(value for value in values if isinstance(value, kind))
    return counts.most_common(1)[0][0] if counts else None


def survey(tag_dir: Path, aside: Set[Path]) -> Survey:
    """List the errors of the files of a tag directory, of each file and of the set.

    Parameters
    ----------
    aside
        Existing files that must not be opened.
    """
    parsed = {path: names.parse(path.name) for path in sorted(paths_in(tag_dir))}
    files = {path: found for path, found in parsed.items() if found is not None}
    errors: list[SourceError] = []
    found = Survey([], errors)
    roots = dict(_readable(files.keys() - aside, found.own))
    states = {path: _state(root) for path, root in roots.items() if names.OPTIMIZER in root}
    models = {path: root for path, root in roots.items() if files[path].kind == "model"}
    errors += _contradictions(_of_each(states, _facts_of_rank, errors))
    errors += _contradictions(_of_each(models, _facts_of_model, errors))
    counts = {
        **_of_each(states, _count_in_rank, errors),
        **_of_each(models, _count_in_model, errors),
    }
    world_size = _usual(counts, errors)
    for mp_rank in sorted({parsed.mp_rank for parsed in files.values() if parsed.kind != "part"}):
        own = {p: f for p, f in files.items() if f.mp_rank == mp_rank and f.kind != "part"}
        errors += _missing(tag_dir, own, mp_rank, world_size)
    return found


def survey_dumps(template: Template, aside: Set[Path]) -> Survey:
    """List the errors of raw per-rank dumps, of each file and of the set."""
    ranks = {template.rank_of(entry.name) for entry in paths_in(template.directory)}
    present = {rank for rank in ranks if rank is not None}
    paths = {template.directory / template.file_name(rank) for rank in present}
    errors: list[SourceError] = []
    found = Survey([], errors)
    states = dict(_readable(paths - aside, found.own))
    errors += _contradictions(_of_each(states, _facts_of_rank, errors))
    world_size = _usual(_of_each(states, _count_in_rank, errors), errors)
    errors += _missing_ranks(
        present,
        max([world_size, *(rank + 1 for rank in present)]),
        lambda rank: template.directory / template.file_name(rank),
    )
    return found


def _readable(
    paths: Iterable[Path], errors: list[SourceError]
) -> Iterator[tuple[Path, Mapping[str, Node]]]:
    """Yield the contents of readable files; add an error for each file that cannot be read."""
    for path in sorted(paths):
        try:
            root = torch_file.read(path, -1).root
            if not isinstance(root, dict):
                message = f"{path}: holds a {type(root).__name__} where a dict belongs"
                raise CorruptFileError(message)
            with of_file(path):
                require_unrolled(root[key] for key in names.LOOKED_INTO if key in root)
        except SourceError as error:
            release_frames(error)
            errors.append(error)
            continue
        except OSError as error:
            errors.append(SourceError(f"{path}: cannot be read ({error.strerror})"))
            continue
        yield path, root


def _state(root: Mapping[str, Node]) -> Mapping[str, Node]:
    held = root[names.OPTIMIZER]
    return held if isinstance(held, dict) else {}


def _of_each(
    roots: Roots, look: Callable[[Mapping[str, Node], Path], T], errors: list[SourceError]
) -> dict[Path, T]:
    """Apply `look` to each file; add an error for each file with a wrong layout."""
    found: dict[Path, T] = {}
    for path, root in roots.items():
        try:
            with malformed(path):
                found[path] = look(root, path)
        except SourceError as error:
            errors.append(error)
    return found


def _facts_of_model(root: Mapping[str, Node], _: Path) -> Facts:
    return {key: fingerprint(root.get(key)) for key in _SAME_IN_MODELS}


def _facts_of_rank(state: Mapping[str, Node], path: Path) -> Facts:
    """Return fingerprints of the values that must be equal on all ranks."""
    facts = {key: fingerprint(state.get(key)) for key in _SAME_IN_RANKS}
    inner = state.get(names.BASE_OPTIMIZER) or state.get(names.OPTIMIZER)
    if isinstance(inner, dict):
        facts["param_groups"] = fingerprint(inner.get("param_groups"))
        units = inner.get("state")
        single = {
            (unit, key): value
            for unit, held in (units if isinstance(units, dict) else {}).items()
            for key, value in (held if isinstance(held, dict) else {}).items()
            for tensor in (tensor_of(value),)
            if tensor is None or tensor.numel == 1
        }
        for (unit, key), found in fingerprints(single, path).items():
            facts[f"'{spell_key(key)}' of group {spell_key(unit)}"] = found
    return facts


def _contradictions(facts: Mapping[Path, Facts]) -> Iterator[SourceError]:
    """Find the files whose values differ from those of most files."""
    alike = Counter(tuple(sorted(held.items())) for held in facts.values())
    usual = dict(alike.most_common(1)[0][0]) if alike else {}
    example = next((path for path, held in facts.items() if dict(held) == usual), None)
    for path, held in facts.items():
        wrong = [key for key in {**usual, **held} if usual.get(key) != held.get(key)]
        if wrong:
            message = f"{path} and {example} disagree about {spell_few(wrong)}"
            yield DisagreementError(f"{message}: they are not of one step of one run")


def _count_in_rank(state: Mapping[str, Node], path: Path) -> Node:
    """Return among how many ranks an optimizer's state was cut; None if all groups are experts'."""
    return next(iter(rank_counts(state, path)), None)


def _count_in_model(root: Mapping[str, Node], path: Path) -> Node:
    return require(root, names.DP_WORLD_SIZE, path)


def _usual(counts: Mapping[Path, Node], errors: list[SourceError]) -> int:
    """Return the count of ranks that most files record; add an error for each other file."""
    told = Counter(count for count in counts.values() if isinstance(count, int))
    usual = told.most_common(1)[0][0] if told else 0
    for path, count in counts.items():
        if count not in (usual, None):
            message = f"{path}: was saved by {show(count)} ranks, most other files by {usual}"
            errors.append(DisagreementError(f"{message}; move away the files of the other run"))
    return usual


def _missing(
    tag_dir: Path, files: Mapping[Path, names.RankFile], mp_rank: int, world_size: int
) -> Iterator[SourceError]:
    """Find the ranks of a family whose files are missing."""
    optimizer = {f.dp_rank: f for f in files.values() if f.kind == "optim"}
    model = {f.dp_rank for f in files.values() if f.kind == "model"}
    known = [rank for rank in {*optimizer, *model} if rank is not None]
    ranks = max([world_size, *(rank + 1 for rank in known)])
    bf16 = any(f.prefix == "bf16_" for f in optimizer.values())
    yield from _missing_ranks(
        {rank for rank in optimizer if rank is not None},
        ranks,
        lambda rank: tag_dir / names.optimizer_file(rank, bf16=bf16, mp_rank=mp_rank),
    )
    if model - {None}:
        yield from _missing_ranks(
            {rank for rank in model if rank is not None},
            ranks,
            lambda rank: tag_dir / names.model_file(rank, mp_rank),
        )
    if not model:
        path = tag_dir / names.model_file(None, mp_rank)
        yield IncompleteError(f"{path}: the model file is missing")


def _missing_ranks(
    present: Set[int], ranks: int, file_of: Callable[[int], Path]
) -> Iterator[SourceError]:
    """Find the missing ranks. `ranks` is the expected count, which some file claims."""
    ends = [-1, *sorted(present), ranks]
    gaps = [range(before + 1, after) for before, after in pairwise(ends) if before + 1 < after]
    single = sum(gap.stop - gap.start for gap in gaps) <= _MOST_MISSING
    for gap in gaps:
        for rank in gap if single else gap[:1]:
            path = file_of(rank)
            if single or gap.stop - rank == 1:
                who, what = f"rank {rank} is missing", "it"
            else:
                who, what = f"ranks {rank} to {gap.stop - 1} are missing", "them"
            message = f"{path}: {who}; copy {what} from the node that saved {what}, or take an"
            yield IncompleteError(f"{message} earlier tag")

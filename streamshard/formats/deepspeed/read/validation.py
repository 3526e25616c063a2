"""Validates a set of shards by the reader's rules, and lists all errors, file by file.

Opening stops at the first error. A user who repairs a checkpoint needs all of them: every missing
rank, and every file that is torn or belongs to another step.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from streamshard.errors import DisagreementError, SourceError, release_frames
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.ds_versions import version_in
from streamshard.formats.deepspeed.model_parallel.missing_layers import Listed, missing_layers
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import is_stage
from streamshard.formats.deepspeed.read.agreement import (
    PARAM_GROUPS,
    SAME_IN_ALL,
    Facts,
    disagreements,
    group_facts,
    model_facts,
    rank_counts,
    rank_facts,
    stage_of,
)
from streamshard.formats.deepspeed.read.fingerprints import fingerprints
from streamshard.formats.deepspeed.read.rank_files import (
    TagFiles,
    missing_ranks,
    read_dict,
    require,
)
from streamshard.formats.deepspeed.read.state_of_ranks import may_be_rank_local
from streamshard.formats.deepspeed.read.zero_reader import malformed
from streamshard.formats.pickle.inert import Node, show, show_key
from streamshard.formats.pickle.node_checks import name_of
from streamshard.formats.torch.torch_tensor import tensor_of
from streamshard.io.entries import paths_in
from streamshard.io.files import unreadable
from streamshard.model import Template

Root = Mapping[str, Node]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SetErrors:
    per_file: list[SourceError]
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


def validate(tag_dir: Path, aside: Set[Path]) -> SetErrors:
    """List the errors of the files of a tag directory, of each file and of the set.

    `aside`: existing files that must not be opened.
    """
    files = TagFiles(tag_dir, sorted(paths_in(tag_dir)))
    errors: list[SourceError] = []
    report = SetErrors([], errors)
    roots = dict(_readable(files.shards - aside, report.per_file))
    ranks, models = {}, {}
    for mp_rank, model_part in files.model_parts.items():
        optimizers = {path: roots[path] for path in model_part.optimizer.values() if path in roots}
        ranks[mp_rank] = {
            p: _state(root) for p, root in optimizers.items() if names.OPTIMIZER in root
        }
        models[mp_rank] = {path: roots[path] for path in model_part.model.values() if path in roots}
    errors += files.mixed()
    errors += _contradictions(ranks, _facts_of_rank, {PARAM_GROUPS})
    errors += _contradictions(models, _facts_of_model, {names.PARAM_SHAPES})
    counts: dict[Path, Node] = {}
    for one, other in zip(ranks.values(), models.values(), strict=True):
        counts |= _of_each(one, _count_in_rank, errors) | _of_each(other, _count_in_model, errors)
    world_size = _usual_count(counts, errors)
    if not files.prefixes and any(
        _is_whole(root) for own in models.values() for root in own.values()
    ):
        world_size = 0  # stage 0 has no optimizer files
    configs = (ds_config.config_in(root) for own in models.values() for root in own.values())
    is_bf16 = any(ds_config.module_dtype(config) == "bfloat16" for config in configs)
    for mp_rank, model_part in sorted(files.model_parts.items()):
        known = [rank for rank in (*model_part.optimizer, *model_part.model) if rank is not None]
        expected = max([world_size, *(rank + 1 for rank in known)])
        errors += files.incomplete(mp_rank, expected, is_bf16=is_bf16)
    errors += _missing_layers(files, models)
    return report


def validate_dumps(template: Template, aside: Set[Path]) -> SetErrors:
    """List the errors of raw per-rank dumps, of each file and of the set."""
    ranks = {template.rank_of(entry.name) for entry in paths_in(template.directory)}
    present = {rank for rank in ranks if rank is not None}
    paths = {template.directory / template.file_name(rank) for rank in present}
    errors: list[SourceError] = []
    report = SetErrors([], errors)
    states = dict(_readable(paths - aside, report.per_file))
    errors += _contradictions({0: states}, _facts_of_rank, frozenset())
    world_size = _usual_count(_of_each(states, _count_in_rank, errors), errors)
    errors += missing_ranks(
        present,
        max([world_size, *(rank + 1 for rank in present)]),
        lambda rank: template.directory / template.file_name(rank),
    )
    return report


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


def _ranks_in_model(root: Root, path: Path) -> Node:
    """Count all ranks, including those of tensor, pipeline and sequence parallelism."""
    data_parallel, parts = _count_in_model(root, path), root.get(names.MP_WORLD_SIZE, 1)
    if not isinstance(data_parallel, int) or not isinstance(parts, int):
        return None
    config, version = ds_config.config_in(root), version_in(root)
    return data_parallel * parts * ds_config.sequence_replicas(config, data_parallel, version)


def _most_common(values: Iterable[Node], kind: type[T]) -> T | None:
    counts = Counter(value for value in values if isinstance(value, kind))
    return counts.most_common(1)[0][0] if counts else None


def _readable(paths: Iterable[Path], errors: list[SourceError]) -> Iterator[tuple[Path, Root]]:
    """Yield the contents of readable files; add an error for each file that cannot be read."""
    for path in sorted(paths):
        try:
            root = read_dict(path).root
        except SourceError as error:
            release_frames(error)
            errors.append(error)
            continue
        except OSError as error:
            errors.append(unreadable(error, path))
            continue
        yield path, root


def _is_whole(root: Root) -> bool:
    """Tell whether a model file also holds the optimizer's state; see `detect.is_stage_0`."""
    return root.get(names.WHOLE_OPTIMIZER) is not None and root.get(names.PARAM_SHAPES) is None


def _state(root: Root) -> Root:
    state = root[names.OPTIMIZER]
    return state if isinstance(state, dict) else {}


def _of_each(
    roots: Mapping[Path, Root], look: Callable[[Root, Path], T], errors: list[SourceError]
) -> dict[Path, T]:
    """Apply `look` to each file; add an error for each file with a wrong layout."""
    by_path: dict[Path, T] = {}
    for path, root in roots.items():
        try:
            with malformed(path):
                by_path[path] = look(root, path)
        except SourceError as error:
            errors.append(error)
    return by_path


def _missing_layers(
    files: TagFiles, models: Mapping[int, Mapping[Path, Root]]
) -> list[SourceError]:
    """Find the missing files of a pipeline's layers, if the stages' files can all be read."""
    first = [next(iter(own.items()), None) for _, own in sorted(models.items())]
    stages = dict(filter(None, first))
    if len(stages) < len(first) or not all(map(is_stage, stages.values())):
        return []
    errors: list[SourceError] = []
    listed = _of_each(stages, _listed, errors)
    if not errors:
        errors += missing_layers(files.tag_dir, [*listed.values()], {p.name for p in files.parts})
    return errors


def _listed(root: Root, _: Path) -> Listed:
    units = root.get(names.PARAM_SHAPES) or []
    buffers = root.get(names.BUFFER_NAMES) or []
    return Listed([name_of(name) for unit in units for name in unit], [*map(name_of, buffers)])


def _facts_of_model(root: Root, _: Path) -> Facts:
    return model_facts(root, (*SAME_IN_ALL, names.PARAM_SHAPES))


def _facts_of_rank(state: Root, _: Path) -> Facts:
    """Return fingerprints of the values that are equal on all ranks of a part of the model."""
    inner = state.get(names.BASE_OPTIMIZER) or state.get(names.OPTIMIZER)
    if not isinstance(inner, dict):
        return rank_facts(state)
    units = inner.get("state")
    single = {
        (unit, key): value
        for unit, group in (units if isinstance(units, dict) else {}).items()
        for key, value in (group if isinstance(group, dict) else {}).items()
        for tensor in (tensor_of(value),)
        if (tensor is None or tensor.numel == 1) and not may_be_rank_local(key, value)
    }
    scalars = {
        f"'{show_key(key)}' of group {show_key(unit)}": found
        for (unit, key), found in fingerprints(single).items()
    }
    groups = inner.get("param_groups")
    common = [
        {key: value for key, value in group.items() if not may_be_rank_local(key, value)}
        if isinstance(group, dict)
        else group
        for group in (groups if isinstance(groups, list) else ())
    ]
    return {**rank_facts(state), **group_facts({"param_groups": common}), **scalars}


def _contradictions(
    parts: Mapping[int, Mapping[Path, Root]],
    facts_of: Callable[[Root, Path], Facts],
    differ_by_part: Set[Node],
) -> Iterator[SourceError]:
    """Find the files whose values differ from those of most files.

    Files are compared within each part of the model; then the rest of the files of all parts.

    `differ_by_part`: values that are equal within a part only.
    """
    agreeing: dict[Path, Facts] = {}
    for roots in parts.values():
        errors: list[SourceError] = []
        facts = _of_each(roots, facts_of, errors)
        yield from errors
        if facts:
            usual = _usual(facts)
            yield from disagreements(facts, usual)
            agreeing |= {path: own for path, own in facts.items() if own == facts[usual]}
    if agreeing:
        common = frozenset[Node].intersection(*map(frozenset, agreeing.values()))
        common -= differ_by_part
        everywhere = {path: {k: own[k] for k in common} for path, own in agreeing.items()}
        yield from disagreements(everywhere, _usual(everywhere))


def _usual(facts: Mapping[Path, Facts]) -> Path:
    """Return the first of the files whose values most files have."""
    alike = Counter(frozenset(own.items()) for own in facts.values())
    usual = alike.most_common(1)[0][0]
    return next(path for path, own in facts.items() if frozenset(own.items()) == usual)


def _count_in_rank(state: Root, path: Path) -> Node:
    """Return among how many ranks an optimizer's state was cut; None if all groups are experts'."""
    return next(iter(rank_counts(state, path)), None)


def _count_in_model(root: Root, path: Path) -> Node:
    return require(root, names.DP_WORLD_SIZE, path)


def _usual_count(counts: Mapping[Path, Node], errors: list[SourceError]) -> int:
    """Return the count of ranks that most files record; add an error for each other file."""
    usual = _most_common(counts.values(), int) or 0
    for path, count in counts.items():
        if count not in (usual, None):
            message = f"was saved by {show(count)} ranks, most other files by {usual}"
            errors.append(
                DisagreementError(f"{message}; move away the files of the other run", path=path)
            )
    return usual

"""Checks that the ranks' files belong to one save, and that none is missing."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from streamshard.errors import DisagreementError, UnsupportedError, raise_first
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.fingerprints import fingerprint, fingerprints
from streamshard.formats.deepspeed.read.rank_files import ModelPartFiles, require
from streamshard.formats.pickle.inert import GETATTR, Call, Node, show, show_few
from streamshard.sizes import counted

SAME_IN_ALL: Final = ("global_steps", "skipped_steps", "global_samples", names.MP_WORLD_SIZE)
"""Entries that are equal in the model files of all parts of the model."""
PARAM_GROUPS: Final = "the optimizer's param groups"

Facts = Mapping[Node, bytes]
"""Fingerprints of values, by key."""


def model_part_stage(states: Sequence[Mapping[str, Node]], files: ModelPartFiles) -> int:
    """Return the ZeRO stage. Refuse model files that do not fit this stage."""
    stage = stage_of(states, files.optimizer_files)
    if (stage == 3) != (len(files.model_files) > 1 or "zero_pp" in files.model_files[0].name):
        message = f"does not belong to optimizer files of stage {stage}"
        raise DisagreementError(message, path=files.model_files[0])
    return stage


def stage_of(states: Sequence[Mapping[str, Node]], paths: Sequence[Path]) -> int:
    """Return the ZeRO stage in which the optimizer states of all ranks agree."""
    # BF16_Optimizer works like stage 1, but does not record a stage.
    stages = [_enum_value(state.get(names.ZERO_STAGE, 1)) for state in states]
    for stage, path in zip(stages, paths, strict=True):
        if stage not in (1, 2, 3):
            raise UnsupportedError(f"ZeRO stage {show(stage)} is not known", path=path)
        if stage != stages[0]:
            message = f"of ZeRO stage {stage}, {paths[0]} of {stages[0]}"
            raise DisagreementError(f"{message}; move away the files of the older run", path=path)
    return int(stages[0])


def _enum_value(node: Node) -> Node:
    """Read an int, or a member of an int enum, which is pickled as a call of its class.

    Early Python 3.11 pickled it as an attribute of its class; Debian 12 has such a version.
    """
    if not isinstance(node, Call):
        return node
    if len(node.args) == 1:
        return node.args[0]
    if node.function in GETATTR and len(node.args) == 2 and node.args[0] == names.STAGE_ENUM:
        return names.STAGES.get(node.args[1], node)
    return node


def check_world_size(
    states: Sequence[Mapping[str, Node]],
    models: Sequence[Mapping[str, Node]],
    files: ModelPartFiles,
) -> None:
    """Refuse a set of files if a file records another count of ranks than there are files."""
    ranks = len(states)
    records = [
        (require(model, names.DP_WORLD_SIZE, path), path)
        for model, path in zip(models, files.model_files, strict=True)
    ]
    for state, path in zip(states, files.optimizer_files, strict=True):
        records += [(count, path) for count in rank_counts(state, path)]
    for world_size, path in records:
        if world_size == ranks:
            continue
        there = counted(ranks, "optimizer file")
        message = (
            f"saved by {show(world_size)} ranks, but there {'is' if ranks == 1 else 'are'} {there}"
        )
        if isinstance(world_size, int) and world_size > ranks:
            last = files.optimizer_files[-1]
            missing = last.with_name(
                last.name.replace(f"pp_rank_{ranks - 1}_", f"pp_rank_{ranks}_")
            )
            message += f"; {missing} is missing: copy it from the node that saved it"
        else:
            surplus = files.optimizer_files[world_size if isinstance(world_size, int) else 0]
            message += f"; {surplus} is of another world size: move it and its siblings away"
        raise DisagreementError(message, path=path)


def rank_counts(state: Mapping[str, Node], path: Path) -> list[Node]:
    """Return all counts of ranks that an optimizer's state records for its partitioning.

    Groups of experts are left out: they record how many ranks share each expert, which may be any
    divisor of the count of ranks.
    """
    counts = require(state, names.PARTITION_COUNT, path)
    if not isinstance(counts, list):
        return [counts]
    wrapped = require(state, names.BASE_OPTIMIZER, path)
    groups = wrapped["param_groups"] if isinstance(wrapped, dict) else [{}] * len(counts)
    if len(groups) == 1 < len(counts) and "lr_decay" in groups[0]:
        message = f"one param group for {len(counts)} flat groups: DeepSpeed joins those of torch's"
        message = f"{message} Adagrad, and fails in the first step. Give it one param group, and"
        raise UnsupportedError(f"{message} begin with the model again", path=path)
    return [
        count
        for count, group in zip(counts, groups, strict=True)
        if group.get(names.IS_EXPERTS) is not True
    ]


def facts_of_each(roots: Sequence[Mapping[str, Node]], cut: Container[str]) -> list[Facts]:
    """Return fingerprints of the entries of each rank that do not depend on the rank.

    `cut`: keys of the entries that do.
    """
    return [fingerprints({k: n for k, n in root.items() if k not in cut}) for root in roots]


def rank_facts(state: Mapping[str, Node]) -> Facts:
    """Return fingerprints of the values in an optimizer's state that do not depend on the rank."""
    return facts_of_each([state], names.CUT_IN_OPTIMIZER)[0]


def group_facts(inner: Mapping[str, Node]) -> Facts:
    """Return the fingerprint of the hyper-parameters, which are equal on all ranks."""
    return {PARAM_GROUPS: fingerprint(inner.get("param_groups"))}


def model_facts(model: Mapping[str, Node], keys: Iterable[str]) -> Facts:
    """Return fingerprints of some entries of a model file."""
    return {key: fingerprint(model.get(key)) for key in keys}


def disagreements(facts: Mapping[Path, Facts], reference: Path) -> Iterator[DisagreementError]:
    """Find the files that record other values than a reference file does."""
    for path, own in facts.items():
        wrong = differing(facts[reference], own)
        if wrong:
            yield disagreement(path, reference, show_few(wrong))


def differing(one: Facts, other: Facts) -> list[Node]:
    """List the keys whose values differ, or that only one file has."""
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def disagreement(path: Path, reference: Path, what: str) -> DisagreementError:
    """Return the error of two files that record different values of something."""
    message = f"disagrees with {reference} about {what}: they are not of one step of one run"
    return DisagreementError(message, path=path)


def check_agreement(states: Sequence[Mapping[str, Node]], paths: Sequence[Path]) -> None:
    """Refuse ranks that disagree about values that do not depend on the rank."""
    facts = facts_of_each(states, names.CUT_IN_OPTIMIZER)
    raise_first(disagreements(dict(zip(paths, facts, strict=True)), paths[0]))

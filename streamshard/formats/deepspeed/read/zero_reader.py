"""Reads a native ZeRO checkpoint into logical tensors, with the places of their bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    UsageError,
    raise_first,
)
from streamshard.formats import frameworks
from streamshard.formats.checkpoint import Checkpoint, ModelPart, OtherFile, Reading, Uncut
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.part_cut import undo_round_robin
from streamshard.formats.deepspeed.cut.zero_cutting import cut_source
from streamshard.formats.deepspeed.read.agreement import SAME_IN_ALL, disagreements, model_facts
from streamshard.formats.deepspeed.read.model_part import ModelPartReading, read_model_part
from streamshard.formats.deepspeed.read.rank_files import (
    ModelPartFiles,
    SourceFiles,
    TagFiles,
    find,
)
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch import torch_file
from streamshard.io.entries import examine
from streamshard.model import FILE, LogicalTensor


def read(
    tag_dir: Path,
    run_files: Sequence[tuple[Path, str]],
    *,
    tag: str | None = None,
) -> Reading:
    """Open a tag directory.

    `run_files`: other files to copy: their path, and their path relative to the run directory.
    `tag`: path of the tag directory in the run directory; by default its name.
    """
    tag = tag or tag_dir.name
    with malformed(tag_dir):
        try:
            files, parts = find(tag_dir)
            inside = [
                (path, f"{tag}/{path.relative_to(tag_dir).as_posix()}")
                for path in (*files.parts, *files.sidecars)
            ]
            return _read_shards(tag, files, parts, [*run_files, *inside])
        except UsageError as error:  # in the config that the checkpoint keeps
            raise CorruptFileError(f"{error}", path=tag_dir) from error


@contextmanager
def malformed(place: Path) -> Iterator[None]:
    """Turn errors from an unexpected file layout into a message."""
    try:
        with of_file(place):
            yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The missing key may be an arbitrary value from the file, so shorten it.
        said = show(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        message = f"not laid out as DeepSpeed does it ({type(error).__name__}: {said})"
        raise CorruptFileError(message, path=place) from error


def _read_shards(
    tag: str,
    files: TagFiles,
    parts: Sequence[ModelPartFiles],
    sidecars: Sequence[tuple[Path, str]],
) -> Reading:
    sources = SourceFiles()
    readings: list[ModelPartReading] = []
    tensors: list[LogicalTensor] = []
    for part in parts:
        name = names.model_part(part.mp_rank) if len(parts) > 1 else ""
        tied = readings[0].tied if readings else {}
        first = len(tensors)
        if part.optimizer_files:
            reading = read_model_part(part, sources, name=name, first=first, tied=tied)
        else:
            # Not at the top: most checkpoints are ZeRO's.
            from streamshard.formats.deepspeed.read.uncut_part import read_uncut_part

            reading = read_uncut_part(part, sources, name=name, first=first)
        readings.append(reading)
        tensors += readings[-1].tensors
    layout = readings[0].layout
    _check_model_parts(readings, [part.model_files[0] for part in parts])
    model_parts = [reading.model_part for reading in readings]
    _check_parts(files, parts, model_parts, layout.stage)
    if layout.round_robin:
        model_parts = [
            undo_round_robin(model_part, layout.world_size) for model_part in model_parts
        ]
    whole = {k: v for reading in readings for k, v in reading.whole.items()}
    uncut = _uncut(tag, parts, readings)
    if uncut is not None:
        paths = chain.from_iterable(part.optimizer_files for part in parts)
        sidecars = [*sidecars, *zip(paths, uncut.files, strict=True)]
    other_files = adopt_files(sidecars, sources, tensors, whole)
    checkpoint = Checkpoint(
        tag=tag,
        layout=layout,
        tensors=tuple(tensors),
        model_parts=tuple(model_parts),
        module_dtype=readings[0].module_dtype,
        files=other_files,
        notes=(*sources.notes, *dict.fromkeys(note for r in readings for note in r.notes)),
        uncut=uncut,
        is_bf16="bf16_" in files.prefixes,
        accelerate_step=accelerate_step(sidecars, layout.world_size * len(readings)),
    )
    frozen = {k: v for reading in readings for k, v in reading.shards.items()}
    part_maps = [reading.part_map for reading in readings]
    return cut_source(checkpoint, sources.files, whole, frozen, part_maps)


def _uncut(
    tag: str, parts: Sequence[ModelPartFiles], readings: Sequence[ModelPartReading]
) -> Uncut | None:
    """Say for which states the ranks' files are kept; None if all can be cut."""
    error = next((reading.uncut for reading in readings if reading.uncut), None)
    if error is None:
        return None
    files = (f"{tag}/{path.name}" for part in parts for path in part.optimizer_files)
    return Uncut(str(error.args[0]), tuple(files), Path(error.path) if error.path else None)


def _check_model_parts(readings: Sequence[ModelPartReading], paths: Sequence[Path]) -> None:
    """Refuse model parts that were not saved together, and missing parts of the model."""
    models = [reading.model_part.model_state for reading in readings]
    keys = (*SAME_IN_ALL, names.DP_WORLD_SIZE)
    facts = {path: model_facts(model, keys) for model, path in zip(models, paths, strict=True)}
    raise_first(disagreements(facts, paths[0]))
    for reading, path in zip(readings, paths, strict=True):
        if (reading.layout, reading.module_dtype) != (
            readings[0].layout,
            readings[0].module_dtype,
        ):
            message = f"{path} and {paths[0]} were trained with different settings"
            raise DisagreementError(f"{message}: they are not of one run")
    saved = models[0].get(names.MP_WORLD_SIZE, len(models))
    if saved != len(models):
        message = f"one of {show(saved)} tensor or pipeline parallel parts of the model"
        raise IncompleteError(f"{message}, but there are files of {len(models)}", path=paths[0])


def _check_parts(
    files: TagFiles, parts: Sequence[ModelPartFiles], model_parts: Sequence[ModelPart], stage: int
) -> None:
    """Refuse layer and expert files that cannot be opened, and missing layers and experts."""
    model = model_parts[0].model_state
    for path in files.parts:
        torch_file.read(path, -1)
    present = {path.name for path in files.parts}
    if model[names.MODULE_STATE] is None and not present:
        message = "no layer_*-model_states.pt file, in which a pipeline keeps the weights: copy"
        raise IncompleteError(f"{message} them from the nodes that saved them", path=files.tag_dir)
    if model[names.MODULE_STATE] is None:
        # Not at the top: only pipelines have files of layers.
        from streamshard.formats.deepspeed.model_parallel.missing_layers import (
            listed_in,
            missing_layers,
        )

        listed = [listed_in(model_part) for model_part in model_parts]
        raise_first(missing_layers(files.tag_dir, listed, present))
    # A training script may keep an entry of this name: then there are neither groups nor files.
    has_experts = bool(present) or (model_parts[0].trains_experts and stage < 3)
    counts = model.get(names.EXPERT_COUNTS)
    for layer, count in enumerate(counts if isinstance(counts, list) else []):
        for expert in range(count if has_experts and isinstance(count, int) else 0):
            for part in parts:
                wanted = names.expert_file(layer, expert, part.mp_rank)
                if wanted not in present:
                    message = f"missing; layer {layer} has {count} experts: copy it from the node"
                    raise IncompleteError(f"{message} that saved it", path=files.tag_dir / wanted)


def accelerate_step(others: Sequence[tuple[Path, str]], world_size: int) -> int | None:
    """Read the step that Accelerate saves with each rank's random state; None if there is none."""
    steps: dict[Path, int | None] = {}
    for path, relative in others:
        rank = frameworks.accelerate_rank(relative)
        if rank is not None and rank < world_size:
            root = torch_file.read(path, -1).root
            step = root.get("step") if isinstance(root, dict) else None
            steps[path] = step if isinstance(step, int) else None
    for path, step in steps.items():
        first = next(iter(steps))
        if step != steps[first]:
            message = f"{path} is of Accelerate's step {step}, {first} of {steps[first]}"
            raise DisagreementError(f"{message}: they are not of one save")
    return next(iter(steps.values()), None)


def adopt_files(
    sidecars: Sequence[tuple[Path, str]],
    sources: SourceFiles,
    tensors: list[LogicalTensor],
    whole: dict[int, tuple[int, int]],
) -> tuple[OtherFile, ...]:
    files = []
    numbers = {file.path: number for number, file in enumerate(sources.files)}
    for path, relative in sidecars:
        index = numbers[path] if path in numbers else sources.add(path)
        whole[len(tensors)] = (index, 0)
        tensors.append(LogicalTensor(FILE, relative, "uint8", (sources.files[index].nbytes,)))
        files.append(OtherFile(relative, examine(path).permissions))
    if len({file.path for file in files}) != len(files):
        raise CorruptFileError("two files claim the same place in the checkpoint")
    return tuple(files)

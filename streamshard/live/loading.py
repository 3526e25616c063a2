"""Loads a checkpoint of any world size into a live engine, by DeepSpeed's own loader."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from deepspeed.runtime import engine as ds_engine
from torch import distributed

from streamshard.errors import SourceNotFoundError, UsageError
from streamshard.formats.zarr.store_index import is_hierarchy
from streamshard.io.changes import stub_directory
from streamshard.io.files import require_all_unchanged
from streamshard.io.object_path import is_object
from streamshard.layout.batch import BatchPlan
from streamshard.live import live_engine
from streamshard.live.consensus import Agreement, say
from streamshard.live.global_batch import plan_batch, set_batch
from streamshard.live.live_engine import Engine, replaced
from streamshard.live.same_optimizer import require_same_optimizer
from streamshard.live.served_files import ServedFiles, weights_of
from streamshard.model import NoteKind
from streamshard.native.files_on_demand import FilesOnDemand
from streamshard.native.resharding import Resharding
from streamshard.native.target_settings import left_out
from streamshard.options import SourceOptions
from streamshard.sizes import show_bytes, show_time
from streamshard.source.source import Source, open_source

Load = Callable[..., tuple[str | None, Any]]
"""`DeepSpeedEngine.load_checkpoint`, the engine included."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one load did."""

    source: Path
    tag: str
    source_world_size: int
    world_size: int
    is_plain: bool
    """Whether DeepSpeed loaded the source's own files: they fit the job as they are."""
    read_bytes: tuple[int, ...]
    """Bytes of tensors that each rank read."""
    mapped_bytes: tuple[int, ...]
    """Bytes of tensors that each rank mapped."""
    seconds: float
    notes: tuple[str, ...]
    """What the user of the job has to know; printed on rank 0."""

    def __str__(self) -> str:
        """Return the report in one line."""
        ways = f"{self.source}, tag {self.tag}: {self.source_world_size} -> {self.world_size} ranks"
        if self.is_plain:
            return f"{ways}: its files fit as they are, and DeepSpeed loaded them"
        read, mapped = (show_bytes(max(n)) for n in (self.read_bytes, self.mapped_bytes))
        return f"{ways}: each read at most {read} and mapped {mapped}, in {show_time(self.seconds)}"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The arguments of `DeepSpeedEngine.load_checkpoint`, after the directory and the tag."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., object] | None = None

    @property
    def loads_states(self) -> bool:
        """Whether the optimizer's states are loaded, so that a training goes on."""
        return self.load_optimizer_states and not self.load_module_only

    def as_arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def as_plain_values(self) -> dict[str, Any]:
        """Return what can be compared with that of another rank."""
        name = getattr(self.custom_load_fn, "__name__", None)
        return {**self.as_arguments(), "custom_load_fn": name}


class Loading:
    """One load of a checkpoint into an engine, on one rank of many that do the same."""

    def __init__(
        self,
        engine: Engine,
        plain: Load,
        options: LoadOptions,
        *,
        keeps_global_batch: bool = False,
    ) -> None:
        self._engine = engine
        self._plain = plain
        self._options = options
        self._keeps_global_batch = keeps_global_batch
        self._agreement = Agreement()
        self._weights = weights_of(live_engine.mp_rank_of(engine))
        self.resharding: Resharding | None = None
        """How the checkpoint is cut; None if there was none."""

    def run(
        self, path: Path, tag: str | None, *, may_be_missing: bool = False
    ) -> tuple[str | None, Any, LoadReport | None]:
        """Load a checkpoint; returns what DeepSpeed returns, and a report.

        `may_be_missing`: whether DeepSpeed is to say what it says where there is no checkpoint at
        all. Then there is no report.
        """
        started = time.perf_counter()
        self._agreement.require_alike({"tag": tag, **self._options.as_plain_values()})
        with self._agreement.step():
            live_engine.require_servable(self._engine)
        resharding = self._open(path, tag, may_be_missing=may_be_missing)
        self.resharding = resharding
        if resharding is None:
            return (
                *self._plain(self._engine, str(path), tag, **self._options.as_arguments()),
                None,
            )
        with self._agreement.step():
            batch = plan_batch(self._engine, resharding) if self._keeps_global_batch else None
        source = resharding.source
        is_here = not is_object(source.path)  # DeepSpeed itself loads from a disk alone
        is_plain = (is_here and resharding.has_these_files()) or self._is_uncut(resharding)
        if is_plain:
            returned = self._load_plainly(resharding)
            counts = [(0, 0)] * distributed.get_world_size()
        else:
            returned, count = self._serve(resharding)
            counts = self._agreement.gather(count)
        self._require_unchanged(source)
        if batch is not None:
            set_batch(self._engine, batch)
        report = LoadReport(
            source=source.path,
            tag=source.checkpoint.tag,
            source_world_size=source.checkpoint.ranks,
            world_size=distributed.get_world_size(),
            is_plain=is_plain,
            read_bytes=tuple(read for read, _ in counts),
            mapped_bytes=tuple(mapped for _, mapped in counts),
            seconds=time.perf_counter() - started,
            notes=self._notes(resharding),
        )
        say("\n".join([str(report), *report.notes]))
        return (*returned, report)

    def _open(self, path: Path, tag: str | None, *, may_be_missing: bool) -> Resharding | None:
        """Open the checkpoint on rank 0, which reads all headers, and send it to all ranks."""
        resharding: Resharding | bool | None = None
        with self._agreement.step():
            if distributed.get_rank() == 0:
                resharding = self._opened(path, tag, may_be_missing=may_be_missing)
        shared = self._agreement.share(resharding)
        return shared if isinstance(shared, Resharding) else None

    def _opened(self, path: Path, tag: str | None, *, may_be_missing: bool) -> Resharding | bool:
        try:
            opened = open_source(path.absolute(), SourceOptions(tag=tag))
        except SourceNotFoundError:
            # A store whose metadata is damaged must not count as a fresh start.
            if may_be_missing and not is_hierarchy(path):
                return False
            raise
        if opened.checkpoint.is_dumps:
            message = f"{path}: raw dumps of an optimizer, without the model's files"
            raise UsageError(
                f"{message}: run 'streamshard repartition' on them, and load what it writes with "
                "engine.optimizer.load_state_dict"
            )
        opened.require_training_state("load")
        opened.require_states()
        found = live_engine.resharding_for(self._engine, opened, distributed.get_world_size())
        if is_object(opened.path) or not found.has_these_files():
            opened.require_cut_states()
        return found

    def _require_unchanged(self, source: Source) -> None:
        """Refuse files that changed since rank 0 read their headers, whoever loaded them.

        A store has checksums, and more files.
        """
        with self._agreement.step():
            if distributed.get_rank() == 0 and not source.kind.is_store:
                require_all_unchanged(source.files)

    def _notes(self, resharding: Resharding) -> tuple[str, ...]:
        """Write the notes on rank 0, which may read a file for them, and send them to all ranks."""
        notes: tuple[str, ...] | None = None
        with self._agreement.step():
            if distributed.get_rank() == 0:
                goes_on = self._options.loads_states
                notes = _notes_of(self._engine, resharding, goes_on=goes_on)
        return self._agreement.share(notes)

    @staticmethod
    def _is_uncut(resharding: Resharding) -> bool:
        """Tell whether DeepSpeed itself loads the files on any count of ranks."""
        source = resharding.source
        return source.kind.is_tag and not source.checkpoint.layout.stage

    def _load_plainly(self, resharding: Resharding) -> tuple[str | None, Any]:
        source = resharding.source
        if is_object(source.path):
            message = f"{source.path}: saved without ZeRO (stage 0), whose files DeepSpeed itself"
            raise UsageError(f"{message} loads, from a local disk alone: copy them to one")
        where, arguments = str(source.path), self._options.as_arguments()
        with self._agreement.step():
            self._require_fit(resharding, FilesOnDemand(resharding))
            return self._plain(self._engine, where, source.checkpoint.tag, **arguments)

    def _serve(self, resharding: Resharding) -> tuple[tuple[str | None, Any], tuple[int, int]]:
        """Let DeepSpeed load files that are made while it loads them."""
        source, tag = resharding.source, resharding.source.checkpoint.tag
        with ExitStack() as stack:
            with self._agreement.step():
                files = FilesOnDemand(resharding)
                maps = self._options.custom_load_fn is None and not is_object(source.path)
                served = ServedFiles(source, files, maps=maps)
                stack.callback(served.close)
                self._require_fit(resharding, files)
                live_engine.require_frozen(self._engine, resharding)
                names = [*self._own_files(tag)]
                for name in names:
                    served.prepare(name)
            self._share(served, self._weights if self._weights in names else names[0])
            path, state = self._load_served(served, tag)
            read = self._agreement.gather(served.log.take())
            with self._agreement.step():
                if distributed.get_rank() == 0:
                    served.require_intact(read)
        if path is not None:
            path = str(source.path / path)
        return (path, state), (served.read_bytes, sum(served.mapped.values()))

    def _share(self, served: ServedFiles, path: str) -> None:
        """Read what ranks of one machine need alike of a file once for all of them."""
        rank, step, gather = distributed.get_rank(), self._agreement.step, self._agreement.gather
        with step():
            share = served.share(path, distributed.get_world_size())
            own = share.ask()
        wanted = gather(own)
        with step():
            has_joined = share.join(wanted, rank)
        have_joined = gather(has_joined)
        with step():
            share.fill(have_joined, rank, served.fill)

    def _load_served(self, served: ServedFiles, tag: str) -> tuple[str | None, Any]:
        """Let DeepSpeed load; returns the path as it is in the run directory, and the state."""
        engine, step = self._engine, self._agreement.step_at
        with self._agreement.step(), stub_directory(served.paths) as root:
            stand_in = _ServingEngine(engine.checkpoint_engine, served, root, self._agreement)
            with (
                step(engine, "load_module_state_dict"),
                step(engine.optimizer, "load_state_dict"),
                # With it ranks load one after the other; then none would wait for all.
                replaced(engine._config.zero_config, _ONE_BY_ONE, False),
                replaced(engine, "checkpoint_engine", stand_in),
                replaced(ds_engine, _MERGE, lambda *args, **kwargs: served.load(self._weights)),
            ):
                path, state = self._plain(engine, str(root), tag, **self._options.as_arguments())
            served.settle()
            return None if path is None else os.path.relpath(path, root), state

    def _own_files(self, tag: str) -> Iterator[str]:
        """Yield the paths of what this rank loads in any case, the module first."""
        yield os.path.relpath(self._engine._get_ckpt_name("/", tag), "/")
        if self._options.loads_states and self._engine.zero_optimization():
            yield os.path.relpath(self._engine._get_zero_ckpt_name("/", tag), "/")
        # As in `DeepSpeedEngine._load_checkpoint`.
        leaves_states = not self._options.load_optimizer_states and not self._engine.has_moe_layers
        if leaves_states and self._engine.zero_optimization_partition_weights():
            yield self._weights

    def _require_fit(self, resharding: Resharding, files: FilesOnDemand) -> None:
        """Compare with the live optimizer, unless it is not loaded."""
        engine, loads_states = self._engine, self._options.loads_states
        if loads_states and engine.zero_optimization() and resharding.settings.layout.stage:
            ranks = live_engine.rank_and_world_size(engine)
            require_same_optimizer(engine.param_names, engine.optimizer, resharding, files, ranks)


_MERGE = "get_fp32_state_dict_from_zero_checkpoint"
"""What `DeepSpeedEngine._load_checkpoint` merges all files with, if stage 3 loads no states."""


_ONE_BY_ONE = "pipeline_loading_checkpoint"
"""Setting of DeepSpeed with which each rank loads when the one before has loaded."""


class _ServingEngine:
    """Stands in for an engine's checkpoint engine while it loads.

    Every rank loads its own files in the same order, so that all can agree at each of them.
    """

    def __init__(
        self,
        inner: Any,
        served: ServedFiles,
        root: Path,
        agreement: Agreement,
    ) -> None:
        self._inner = inner
        self._served = served
        self._root = root
        self._agreement = agreement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Return the object in a file."""
        name = os.path.relpath(path, self._root)
        known = self._served.real_path(name)
        if known is not None:
            return self._inner.load(str(known), *args, **kwargs)
        if self._served.is_sidecar(name):
            return self._served.load(name)
        # One model file and one optimizer file, on every rank; of a pipeline all take the first's.
        with self._agreement.step():
            return self._served.load(name)


def _notes_of(engine: Engine, resharding: Resharding, *, goes_on: bool) -> tuple[str, ...]:
    """Return what the user has to know or to do; nothing that the running job does already.

    Of the notes of a conversion, those about the files that it writes say nothing here.

    `goes_on`: whether the training goes on. Else the weights alone are of interest.
    """
    checkpoint = resharding.source.checkpoint
    mixed = [note.text for note in checkpoint.notes if note.kind is NoteKind.MIXED and goes_on]
    if resharding.has_these_files():
        return (*checkpoint.warnings, *mixed)
    lost = (NoteKind.LEFT_OUT, NoteKind.UNREAD)
    of_content = [note.text for note in checkpoint.notes if note.kind in lost]
    if not goes_on:
        return (*checkpoint.warnings, *of_content)
    job = BatchPlan(
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )
    return (
        *checkpoint.warnings,
        *mixed,
        *of_content,
        *left_out(checkpoint, resharding.settings.layout.stage),
        *resharding.explain(job).notes,
    )

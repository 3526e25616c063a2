"""Opens a source: finds the checkpoint at a path, and calls the reader of its format."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np

from streamshard import registry
from streamshard.engine.numeric.cast import cast_between
from streamshard.engine.run.work import Region
from streamshard.errors import Option, UnsupportedError, UsageError, command
from streamshard.formats.checkpoint import Checkpoint, Reading
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.ds_config import Config
from streamshard.formats.facts import NO_FACTS, Facts
from streamshard.io.entries import listings_kept
from streamshard.io.files import source_errors
from streamshard.io.object_path import as_path
from streamshard.io.place import place_of
from streamshard.io.retry import try_again
from streamshard.layout.cutting import Segments, coalesce
from streamshard.model import ITEMSIZE, Template
from streamshard.options import Path_, SourceOptions
from streamshard.source.unfinished import require_finished

_BY_DEFAULT: Final = SourceOptions()

_RENAMED: Final = "distributed checkpoints of PyTorch and Megatron"
_UNTOLD: Final = (
    "what else a DeepSpeed job needs: the order of the parameters in the optimizer, which "
    "tensors are frozen weights and which buffers, which names are tied, the DeepSpeed config, the "
    "loss scaler, the learning rate scheduler and the counters of steps"
)


class Kind:
    """What one kind of checkpoint is like; a `Reader` is the kind that it reads."""

    name: str
    """What reports call this kind."""
    title: str
    """What text calls it."""
    is_tag: ClassVar[bool] = False
    """Whether it is a tag of a run directory, with the files that an engine saved."""
    is_store: ClassVar[bool] = False
    """Whether it is one of our stores."""
    is_of_ranks: ClassVar[bool] = False
    """Whether its files are those of data-parallel ranks, as ZeRO cuts."""
    is_foreign: ClassVar[bool] = False
    """Whether it is not of DeepSpeed."""
    is_of_job: ClassVar[bool] = True
    """Whether it may hold the state of a job even where it has no states of an optimizer."""
    changes_degrees: ClassVar[bool] = False
    """Whether its model can be cut for other parallel degrees."""
    completes: ClassVar[bool] = False
    """Whether a job's config can tell what it lacks."""
    facts: ClassVar[frozenset[str]] = frozenset()
    """The facts of a source that it takes; see `formats/facts.py`."""
    form: ClassVar[str] = ""
    """The `format` of `repartition` that writes such files again; empty for DeepSpeed's own."""

    def needs_like(self, checkpoint: Checkpoint) -> bool:
        """Tell whether a checkpoint can only be read with a reference checkpoint."""
        return False

    def complete(
        self, source: "Source", config: Config, stage: int | None, world_size: int
    ) -> Checkpoint:
        """Add what a job's config tells of the training state, where `completes`."""
        raise NotImplementedError

    def rewritten(self, source: "Source") -> Sequence[str]:
        """Return the paths of what another tool rewrote in it."""
        return ()

    def remarks(self, source: "Source") -> Sequence[str]:
        """Return what to say of its files, next to the checkpoint's own remarks."""
        return ()

    def health(self, source: "Source") -> Mapping[str, Any] | None:
        """Return the `TensorHealth` of its tensors, as measured when it was made, if at all."""
        return None

    def codec(self, source: "Source") -> str | None:
        """Return the codec of its files, if they are compressed."""
        return None

    def other_files(self, source: "Source") -> Iterable[tuple[str, int]]:
        """Yield relative path and size of the files that hold no tensors."""
        return ()

    def pattern_of(self, path: str) -> str:
        """Return what is the same for all files that differ in numbers only."""
        return re.sub(r"\d+", "*", path)

    def is_shard(self, path: Path) -> bool:
        """Tell whether a file records what ZeRO's files do: stage, ranks, steps."""
        return names.parse(path.name) is not None

    def ranks_of_files(self, source: "Source") -> list[int | None]:
        """Return for each file the data-parallel rank that saved it; None if it is not one."""
        return [None] * len(source.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(Reading):
    """An opened checkpoint: its content, and the place of every element."""

    path: Path
    """The run directory, the store, or the directory of the dumps."""
    kind: Kind
    codec_bytes: int = 0
    """Memory that decoding one file takes."""
    reference: "Source | None" = None
    """Reference checkpoint: another one of the same job, which supplies what this one lacks."""
    facts: Facts = NO_FACTS
    """What a user says of it and of the job that will resume."""
    details: Any = None
    """What its kind knows of it, and no other kind has."""

    @classmethod
    def of(cls, path: Path, kind: Kind, found: Reading) -> Self:
        content = found.checkpoint, found.cutting, found.files, found.repeats
        return cls(*content, path=path, kind=kind)

    def region(self, tensor: int, start: int, stop: int, dtype: str | None = None) -> Region:
        """Return the region that elements of a tensor fill; `dtype` if they are cast."""
        source_dtype = self.checkpoint.tensors[tensor].dtype
        one = np.array([tensor], dtype=np.int64)
        segments = Segments(one, np.array([start]), np.array([stop]), np.zeros_like(one))
        dtype = dtype or source_dtype
        return self.region_of(segments, source_dtype, dtype, (stop - start) * ITEMSIZE[dtype])

    def region_of(self, segments: Segments, source_dtype: str, dtype: str, nbytes: int) -> Region:
        """Return the region that segments fill: elements of one dtype, cast to another."""
        copies = self.cutting.locate(segments, target_itemsize=ITEMSIZE[dtype])
        return Region(
            content_bytes=nbytes,
            copies=coalesce(
                copies, itemsize=ITEMSIZE[source_dtype], target_itemsize=ITEMSIZE[dtype]
            ),
            source_itemsize=ITEMSIZE[source_dtype],
            target_itemsize=ITEMSIZE[dtype],
            cast=cast_between(source_dtype, dtype),
        )

    @property
    def directories(self) -> frozenset[Path]:
        """The directories that its files lie in, and its own; no link leads out of a store."""
        files = () if self.kind.is_store else self.files
        return frozenset({self.path, *(file.path.parent for file in files)})

    @property
    def place(self) -> Path:
        """The directory of the checkpoint itself: its tag directory, or its path."""
        return self.path / self.checkpoint.tag if self.kind.is_tag else self.path

    @property
    def like(self) -> Checkpoint | None:
        return None if self.reference is None else self.reference.checkpoint

    @property
    def needs_like(self) -> bool:
        """Whether it can only be read with a reference checkpoint."""
        return self.kind.needs_like(self.checkpoint)

    @property
    def is_weights_alone(self) -> bool:
        """Whether it is a model's weights, and no state of a job."""
        checkpoint = self.checkpoint
        has_states = any(model_part.groups for model_part in checkpoint.model_parts)
        return bool(checkpoint.foreign) and not (self.kind.is_of_job or has_states)

    def require_training_state(self, then: str = "") -> None:
        """Refuse a source without what a job needs; `then`: what a caller without `like` does."""
        if self.is_weights_alone:
            message = f"{self.checkpoint.foreign}, without an optimizer's state: a job begins with"
            message = f"{message} them, and resumes from nothing{self._form_advice()}"
            raise UnsupportedError(message, path=self.path)
        if self.checkpoint.foreign:
            message = f"{self.checkpoint.foreign}, which does not tell {_UNTOLD}"
            advice = f"{supply()}{self._config_advice()}{self._form_advice()}"
            if then:
                way = command("repartition", self.path, "OUT", world_size="N", like="RUN")
                advice = f"{then} OUT, made with RUN, a ZeRO checkpoint of that job, by {way}"
            raise UnsupportedError(f"{message}: {advice}", path=self.path)

    def _form_advice(self) -> str:
        """Say how such files are written for other ranks."""
        if not self.kind.form:
            return ""
        form = Option("format", self.kind.form)
        return f". For another count of FSDP's ranks give 'streamshard repartition' {form}"

    def _config_advice(self) -> str:
        """Say what may do if all tensors are trained, so that only a config is lacking."""
        if self.checkpoint.unrecorded or not self.kind.completes:
            return ""
        with_config = f"{Option('ds_config_file')} with the job's config may do for"
        return f". All of its tensors are trained, so {with_config} 'streamshard repartition'"

    def require_states(self) -> None:
        """Refuse a store whose optimizer states were dropped."""
        dropped = self.checkpoint.dropped
        if dropped is not None:
            message = f"holds weights only: {dropped}, so no job can resume from it"
            way = command("export", self.path, "OUT")
            raise UnsupportedError(f"{message}. Its weights are written by: {way}", path=self.path)

    def require_cut_states(self, *, in_blocks: bool = True) -> None:
        """Refuse optimizer states that a target cannot hold.

        `in_blocks`: whether it can hold those that have one scale for a block of elements.
        """
        uncut = self.checkpoint.uncut
        if uncut is not None:
            raise UnsupportedError(uncut.why, path=uncut.path or self.path)
        if not in_blocks and self.checkpoint.largest_block > 1:
            message = "its optimizer keeps 8 bits of each element and a scale for each block, which"
            message = f"{message} only files of ZeRO and stores hold. Give another"
            raise UnsupportedError(f"{message} {Option('format')} for the weights", path=self.path)

    def require_use_of_like(self, *, needed: bool = False, if_needed: bool = False) -> None:
        """Refuse a reference checkpoint that is not needed.

        `if_needed`: whether it may be given though it is not needed, as by a job script that runs
        before every start. Its degrees must be the source's then: else the script does not ask for
        those of its job.
        """
        if self.like is not None and not (self.needs_like or needed):
            message = f"needs no reference checkpoint; leave {Option('like')} out"
            if len(self.like.model_parts) == len(self.checkpoint.model_parts):
                if if_needed:
                    return
            else:
                degrees = f"{Option('tensor_parallel')} or {Option('pipeline_parallel')}"
                message = f"{message}, or ask for its degrees with {degrees}"
            raise UsageError(message, path=self.path)


@dataclass(frozen=True, slots=True)
class Request:
    """The path of a checkpoint, with everything that is needed to open it."""

    path: Path_
    tag: str | None = None
    facts: Facts = NO_FACTS
    """What its files do not say."""
    like: Source | None = None
    """Reference checkpoint: another one of the same job, which supplies what this one lacks."""
    takes_bare: bool = False
    """Whether some of a group's parameters may lack states: for grafts and what only looks."""
    opened: Source | None = None
    """The checkpoint, where it is open already."""

    @property
    def root(self) -> Path:
        """The path, on a disk or in a bucket."""
        return as_path(self.path)

    @property
    def template(self) -> Template | None:
        """Template of the file names, if the checkpoint is raw dumps."""
        path = str(self.path)
        if not names.is_source_template(path):
            return None
        # Not at the top: raw dumps alone have templates.
        from streamshard.formats.deepspeed.dumps.dump_names import parse_source

        return parse_source(path)

    def reader(self) -> tuple[Any, Path]:
        """Return the reader of this kind of checkpoint, and the checkpoint's place."""
        known = ((reader, reader.recognizes(self)) for reader in registry.readers())
        reader, place = next((reader, place) for reader, place in known if place is not None)
        facts = self.facts
        for key, is_given, kinds in (
            ("ds_config", facts.ds_config is not None, "raw dumps"),
            ("rename", facts.rename is not None, _RENAMED),
            ("wrapped", bool(facts.wrapped), "files of FSDP's ranks"),
        ):
            if is_given and key not in reader.facts:
                message = f"{Option('facts', what=f'source.{key}')} is for {kinds}"
                raise UsageError(f"{message}; this is another kind: {reader.title}", path=self.root)
        return reader, place

    def open(self) -> Source:
        return try_again(self._open) if self.opened is None else self.opened

    def _open(self) -> Source:
        with listings_kept(), source_errors(self.root):
            reader, place = self.reader()
            opened: Source = reader.open(place, self)
            if self.like is not None and opened.needs_like and opened.checkpoint.foreign:
                completed = registry.load(registry.COMPLETED)
                opened = completed(opened, self.like, takes_bare=self.takes_bare)
        return replace(opened, reference=self.like, facts=self.facts)


def supply() -> str:
    """Say how to supply what a distributed checkpoint lacks."""
    return (
        f"give {Option('like', 'RUN')}, a ZeRO checkpoint of the job that is to resume. Start that "
        "job, let it save before its first step, and give what it saved"
    )


def open_source(
    path: Path_,
    options: SourceOptions = _BY_DEFAULT,
    *,
    takes_model: bool = False,
    takes_bare: bool = False,
) -> Source:
    """Open a run directory, a tag directory, a store, or raw dumps.

    `takes_model`: whether the reference checkpoint may be a model's weights alone, which supply
    nothing and are only compared. `takes_bare`: see `Request`.
    """
    request = replace(requests(options, path, takes_model=takes_model)[0], takes_bare=takes_bare)
    is_model = request.like is not None and request.like.is_weights_alone
    with listings_kept():
        with source_errors(request.root):
            place_of(request.root).look_ahead(request.root, names.LATEST)
        require_finished(request.root)
        opened = (replace(request, like=None) if is_model else request).open()
    return replace(opened, reference=request.like)


def requests(
    options: SourceOptions, first: Path_, *paths: Path_, takes_model: bool = False
) -> list[Request]:
    """Read the facts and the reference checkpoint to open checkpoints with.

    The tag and the facts are those of the first.
    """
    facts = NO_FACTS
    if options.facts is not None:
        facts = registry.load(registry.FACTS)(options.facts)
    reference = None if options.like is None else open_source(options.like)
    if reference is not None and not (takes_model and reference.is_weights_alone):
        _require_of_job(options.like, reference)
    request = Request(first, options.tag, facts, reference)
    return [request, *(Request(path, like=reference) for path in paths)]


def _require_of_job(like: Path_ | None, source: Source) -> None:
    """Refuse a reference checkpoint that does not tell what a job of DeepSpeed needs."""
    if source.checkpoint.foreign:
        message = f"{like}: {source.checkpoint.foreign}, which does not tell what is lacking; give"
        message = f"{message} a checkpoint that DeepSpeed saved with {Option('like')}"
        model = ". A base model is compared by 'export' alone" if source.is_weights_alone else ""
        raise UsageError(f"{message}{model}")
    if not source.checkpoint.layout.stage:
        message = f"{like}: saved without ZeRO (stage 0), which does not name the parameters of its"
        message = f"{message} optimizer; give a checkpoint of stage 1, 2 or 3"
        raise UsageError(f"{message} with {Option('like')}")

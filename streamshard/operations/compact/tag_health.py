"""Finds out which tags are good, and remembers it: each save is read once."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from streamshard.checks.problems import UNREADABLE, kind_of
from streamshard.compare.assessment import Assessor
from streamshard.errors import SourceError, StreamshardError, TargetError, release_frames
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import show
from streamshard.health import TensorHealth
from streamshard.operations.compact.prune import RunDirectory, Tag
from streamshard.operations.compact.receipts import JsonRecord, moment_of, parse_moment, show_moment
from streamshard.operations.compact.run_context import RunContext
from streamshard.operations.compact.run_directory import open_tag
from streamshard.source.source import Request, open_source

_HEALTH: Final = f"{names.OWN_PREFIX}.health.json"
"""Name of the record in a directory of archives."""


@dataclass(frozen=True, slots=True)
class TagHealth:
    """Whether a tag was good when it was read."""

    tag: str
    looks: str
    """Digest of how its files looked then; of an archive, that of the list of its checksums."""
    saved: str
    """Time of the last change of anything in the tag, in UTC; empty for an archive."""
    unhealthy: str
    """Why it is not good; empty if it is."""
    tensors: Mapping[str, TensorHealth] = field(default_factory=dict)
    """Array → which numbers its tensor holds; of a good tag all that are measured."""


@dataclass(frozen=True, slots=True)
class HealthRecord(JsonRecord):
    """What is known of the tags of a run directory."""

    tags: tuple[TagHealth, ...] = ()

    def require_sound(self) -> None:
        for tag in self.tags:
            if not names.is_tag(tag.tag):
                raise ValueError(f"{show(tag.tag)} is not a tag")
            if tag.saved:
                parse_moment(tag.saved)
            for found in tag.tensors.values():
                found.require_possible()

    @classmethod
    def of(cls, archive_dir: Path) -> Self:
        return cls.read(archive_dir / _HEALTH) or cls()


class TagHealths:
    """Judges tags: those that look as in the record by the record, others by reading them."""

    def __init__(self, context: RunContext, *, remembers: bool) -> None:
        self._context = context
        self._remembers = remembers
        """Whether what is found out is recorded: a dry run writes nothing."""
        self._healths = dict[tuple[str, str], TagHealth]()
        with suppress(SourceError):  # then each tag is read again, and the record replaced
            record = HealthRecord.of(context.archive_dir)
            self._healths = {(one.tag, one.looks): one for one in record.tags}

    def read(self, tag: Tag) -> str | SourceError:
        """Say why a tag is not good, empty if it is; read it if that is not known.

        The error is that of a tag that could not be read. It is not remembered, as it says nothing
        about what another run will find.
        """
        return self._judge(tag, self._measured)

    def recall(self, tag: Tag) -> str | SourceError:
        """Do the same without reading: a tag that is not known does not count as good."""
        return self._judge(tag, lambda _tag, _looks: "it was saved or changed since the run began")

    def _judge(self, tag: Tag, otherwise: Callable[[Tag, str], str]) -> str | SourceError:
        try:
            # What is in the trash is identified by its archive, which holds all of it.
            archived = self._context.archived(tag.name)
            looks = tag.looks or archived.require_receipt().sums_sha256
            known = self._healths.get((tag.name, looks))
            return otherwise(tag, looks) if known is None else known.unhealthy
        except StreamshardError as error:
            release_frames(error)
            return SourceError(str(error)) if kind_of(error) == UNREADABLE else str(error)

    def _measured(self, tag: Tag, looks: str) -> str:
        if tag.looks:
            opened = open_tag(self._context.run_dir, tag.name)
            request = Request(opened.path, opened.checkpoint.tag)
        else:
            receipt = self._context.archived(tag.name).require_receipt()
            request = Request(self._context.archive_of(receipt).store)
            opened = open_source(request.root)
        progress = self._context.progress
        progress.tag = tag.name
        findings = Assessor(self._context.limits, progress, progress.advance).find(opened, request)
        unhealthy = findings.problems[0].message if findings.problems else ""
        if tag.looks:
            unhealthy = unhealthy.removeprefix(f"{self._context.run_dir / tag.name}: ")
        if any(problem.kind == UNREADABLE for problem in findings.problems):
            raise SourceError(unhealthy)
        when = show_moment(moment_of(tag.changed_ns)) if tag.looks else ""
        tensors = {} if unhealthy or not tag.looks else findings.health
        self._healths[tag.name, looks] = TagHealth(tag.name, looks, when, unhealthy, tensors)
        return unhealthy

    def tensors(self, tag: Tag) -> Mapping[str, TensorHealth]:
        known = self._healths.get((tag.name, tag.looks))
        return {} if known is None else known.tensors

    def record(self, run: RunDirectory) -> None:
        """Record what is known of the tags that are there; that it cannot be stops nothing."""
        keys, trashed = {(t.name, t.looks) for t in run.tags}, {t.name for t in run.trashed}
        tags = tuple(
            one
            for key, one in self._healths.items()
            if key in keys or (one.tag in trashed and not one.saved)
        )
        if self._remembers:
            with suppress(TargetError):
                HealthRecord(tags).write(self._context.archive_dir / _HEALTH)

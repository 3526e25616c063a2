"""Records ambiguous tags that the user accepts as they are, so that no run reports them again."""

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from streamshard.commands import command
from streamshard.errors import CorruptFileError, Option, SourceError, UsageError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed import names
from streamshard.formats.links import require_regular
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import exists, paths_like, read_document
from streamshard.io.files import source_errors, target_errors
from streamshard.operations.compact import compact_report, tag_choice
from streamshard.operations.compact.archive.receipts import show_moment
from streamshard.operations.compact.compact_report import CompactedTag
from streamshard.operations.compact.tag_choice import Choice, Tag

_ENDING: Final = ".acknowledged.json"
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class _Acknowledgement:
    """The state of a tag when the user acknowledged it."""

    tag: str
    looks: str
    """Digest of the path, mode, size, inode and time of change of everything in it."""
    changed_ns: int
    problem: str
    """Why it could not be opened; empty if it could."""
    at: str

    @classmethod
    def of(cls, tag: Tag, at: str) -> "_Acknowledgement":
        return cls(tag.name, tag.looks, tag.changed_ns, tag.problem or "", at)


@dataclass(frozen=True, slots=True)
class Acknowledging:
    """The acknowledged tags: a small file for each, beside the receipts."""

    run_dir: Path
    directory: Path
    """Directory of the archives."""

    def acknowledge(self, choice: Choice, now: datetime, *, is_dry_run: bool) -> CompactedTag:
        """Record that a tag stays as it is, and is not reported again until it changes."""
        tag = choice.tag
        if choice.verdict == tag_choice.KEPT:
            raise UsageError(f"kept anyway ({choice.reason}), so there is nothing to acknowledge")
        if choice.verdict == tag_choice.CANDIDATE:
            message, keep = (
                "it can be opened, and no rule keeps it",
                Option("keep_tags", [tag.name]),
            )
            raise UsageError(f"{message}; {keep} in every run leaves it alone")
        if not is_dry_run:
            noted = _Acknowledgement.of(tag, show_moment(now))
            data = json.dumps({"format": _FORMAT, **asdict(noted)}, indent=1).encode()
            path = self._path(tag.name)
            with target_errors(path):
                write_durably(path, data, path.with_name(f"{names.OWN_PREFIX}.{path.name}"))
        what = "kept, and reported again when a file in it changes or another problem appears"
        return CompactedTag(tag.name, choice.step, compact_report.ACKNOWLEDGED, what)

    def judge(self, choice: Choice) -> CompactedTag:
        """Report an ambiguous tag, or that it is acknowledged."""
        tag = choice.tag
        known = self._read(tag.name)
        if known is not None and known == _Acknowledgement.of(tag, known.at):
            reason = f"{choice.reason}; acknowledged {known.at[:10]}"
            return CompactedTag(tag.name, choice.step, compact_report.KEPT, reason)
        way = command("compact", self.run_dir, self.directory, acknowledge=tag.name)
        advice = f"To leave it as it is: {way}"
        if known is not None:
            advice = f"It is not as it was when it was acknowledged on {known.at[:10]}. {advice}"
        return CompactedTag(
            tag.name,
            choice.step,
            compact_report.AMBIGUOUS,
            f"{choice.reason}. {advice}",
            exit_code=SourceError.exit_code,
        )

    def remove_unfinished(self) -> None:
        """Remove unfinished files of interrupted runs; no other run may be active."""
        with target_errors(self.directory):
            for path in paths_like(self.directory, f"{names.OWN_PREFIX}.*{_ENDING}"):
                remove_file(path)

    def _path(self, tag: str) -> Path:
        return self.directory / f"{names.flat(tag)}{_ENDING}"

    def _read(self, tag: str) -> _Acknowledgement | None:
        path = self._path(tag)
        try:
            with source_errors(path):
                if not exists(path):
                    return None
                require_regular(path, self.directory)
                document: Any = strict_json.parse(read_document(path))
            known = _parse(document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = f"{path}: not as streamshard writes it ({error}); remove it"
            raise CorruptFileError(message) from error
        return known


def _parse(document: dict[str, Any]) -> _Acknowledgement:
    if document.pop("format") != _FORMAT:
        raise ValueError("of another version")
    return strict_json.make(_Acknowledgement, document)

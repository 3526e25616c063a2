"""Repeats the choice with the run directory as it is now, before a tag is moved or removed."""

import time
from dataclasses import dataclass
from pathlib import Path

from streamshard.errors import CorruptFileError
from streamshard.operations.compact import tag_choice
from streamshard.operations.compact.run_directory import look_at
from streamshard.operations.compact.tag_choice import Choice, Rules, Run, choose, refusal


@dataclass(frozen=True, slots=True)
class Again:
    """Looks at a run directory again; tags that look unchanged are not opened again."""

    run_dir: Path
    rules: Rules
    now_ns: int
    """Time at which the run began."""
    before: Run
    """Description of the run directory when the run began."""

    def still_free(self, choice: Choice) -> str:
        """Repeat the choice for a tag that is about to be moved."""
        run = look_at(self.run_dir, self.before, self.rules.tags)
        reason = refusal(run)
        if reason is None:
            now_ns = max(self.now_ns, time.time_ns())
            again = {c.tag.name: c for c in choose(run, self.rules, now_ns)}
            now = again.get(choice.tag.name)
            if now is None or now.tag.looks != choice.tag.looks:
                reason = "changed while it was watched"
            elif now.verdict != tag_choice.CANDIDATE:
                reason = now.reason
        if reason is not None:
            message = f"{self.run_dir / choice.tag.name}: may not be removed any more: {reason}"
            raise CorruptFileError(message)
        return choice.reason

    def still_unwanted(self, tag: str) -> str:
        """Repeat the choice for a tag in the trash."""
        reason = self.kept_in_trash(tag)
        if reason is not None:
            message = f"{self.run_dir}: {tag} in its trash may not be removed any more: {reason}"
            raise CorruptFileError(message)
        return "no rule would keep it"

    def kept_in_trash(self, tag: str) -> str | None:
        """Say what would protect a tag in the trash if it were brought back, if anything."""
        run = look_at(self.run_dir, self.before, self.rules.tags)
        reason = refusal(run) or self._not_read(run)
        held = next((held for held in run.trashed if held.name == tag), None)
        if reason is not None or held is None:
            reason = reason or "its trash cannot be read"
            raise CorruptFileError(f"{self.run_dir}: {reason}; {tag} stays in the trash")
        return tag_choice.protection_in_trash(held, run, self.rules)

    def _not_read(self, run: Run) -> str | None:
        """Return the problem of a tag that could be opened when the run began, and now cannot.

        Without that tag, the rules would keep other tags in its place.
        """
        whole = {tag.name for tag in self.before.tags if tag.problem is None}
        return next((tag.problem for tag in run.tags if tag.problem and tag.name in whole), None)

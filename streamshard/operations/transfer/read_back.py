"""Reads the written files back from disk, and compares them with the source."""

from collections.abc import Callable, Sequence
from pathlib import Path

from streamshard.engine.run.phases import COMPARING, VERIFYING
from streamshard.errors import NotAsWrittenError, SourceError
from streamshard.io.files import target_errors
from streamshard.io.page_cache import drop_cached
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.layout.sample import EVERYTHING
from streamshard.operations.checks.problems import Findings
from streamshard.operations.checks.structure import look_at
from streamshard.operations.compare.comparison import compare
from streamshard.operations.compare.matching import pair_up
from streamshard.operations.compare.pairing import Pair
from streamshard.operations.source.degree_change import other_degrees
from streamshard.operations.source.source import Request, Source
from streamshard.operations.transfer.report import Progress
from streamshard.sizes import some_of


def require_no_differences(
    place: Path, source: Source, differences: Callable[[], list[str]]
) -> None:
    """Require that written files are what the source holds.

    `place`: directory of the files, which are synced to the disk already. The system's page cache
    of them is dropped first.
    `differences`: reads the files, and describes what is wrong with them.
    """
    with target_errors(place):
        drop_cached(place)
    try:
        wrong = differences()
    except SourceError as error:
        wrong = [str(error)]
    if wrong:
        raise NotAsWrittenError(
            f"{place}: read back, it is not what {source.path} holds. {some_of(wrong, 1)}. "
            "It was not put into its place"
        )


def differences(
    written: Request, source: Source, memory: MemoryPlan, progress: Progress
) -> list[str]:
    """Check the checksums of a written checkpoint, and compare its content with the source."""
    findings = Findings()
    looked = look_at(written, findings, EVERYTHING)
    progress.start(looked.nbytes, VERIFYING)
    looked.read(memory, progress.advance)
    if findings.problems:
        return [problem.message for problem in findings.problems]
    opened = written.open()
    copies: Sequence[Pair] = ()
    if source.checkpoint.layers:
        opened, copies = other_degrees().with_layers(opened)
    pairing = pair_up(opened, source, converted=True)
    found = [compare(opened, source, pairing.pairs, memory, progress, phase=COMPARING)]
    # A module that several layers share is in the source once, and in each of their files.
    if copies:
        found.append(compare(opened, opened, copies, memory, progress, phase=COMPARING))
    problems = [problem.message for each in found for problem in each.findings.problems]
    differences = [*pairing.differences, *(d for each in found for d in each.differences)]
    return [*problems, *(difference.message for difference in differences)]

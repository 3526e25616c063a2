"""Reads a written checkpoint back from disk, and compares it with the source."""

from collections.abc import Sequence

from streamshard import registry
from streamshard.checks.problems import Findings
from streamshard.compare.comparison import Pair, compare
from streamshard.compare.matching import pair_up
from streamshard.engine.run.phases import COMPARING, VERIFYING, Progress
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.source.source import Request, Source
from streamshard.source.structure import check_structure


def differences(
    written: Request, source: Source, memory: MemoryPlan, progress: Progress
) -> list[str]:
    """Check the checksums of a written checkpoint, and compare its content with the source."""
    findings = Findings()
    checked = check_structure(written, findings)
    progress.start(checked.nbytes, VERIFYING)
    checked.read(memory, progress.advance)
    if findings.problems:
        return [problem.message for problem in findings.problems]
    opened = written.open()
    copies: Sequence[Pair] = ()
    if source.checkpoint.layers:
        opened, copies = registry.load(registry.WITH_LAYER_PAIRS)(opened)
    pairing = pair_up(opened, source, converted=True)
    comparisons = [compare(opened, source, pairing.pairs, memory, progress, phase=COMPARING)]
    # A module that several layers share is in the source once, and in each of their files.
    if copies:
        comparisons.append(compare(opened, opened, copies, memory, progress, phase=COMPARING))
    problems = [problem.message for each in comparisons for problem in each.findings.problems]
    differences = [*pairing.differences, *(d for each in comparisons for d in each.differences)]
    return [*problems, *(difference.message for difference in differences)]

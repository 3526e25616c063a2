"""Other degrees as verbs ask for them; see `operations/source/degree_change.py`."""

from collections.abc import Sequence
from typing import Final

from streamshard.degrees.other_degrees import at_degrees
from streamshard.degrees.recut_source import tells_cut
from streamshard.degrees.spread_experts import spread_experts
from streamshard.degrees.whole_source import in_equal_parts, whole
from streamshard.formats.deepspeed.model_parallel.cut_rules import read_rules
from streamshard.operations.source.degree_change import DegreeChange, JobDegrees, OtherDegrees
from streamshard.operations.source.source import Source
from streamshard.options import Path_


class _ModelParallelism(OtherDegrees):
    def change(self, source: Source, wanted: JobDegrees) -> DegreeChange | None:
        made = at_degrees(source, wanted)
        return made or spread_experts(source, wanted.expert_parallel, wanted.world_size)

    def join(
        self, source: Source, cut_rules_file: Path_ | None = None, *, average: bool = False
    ) -> DegreeChange | None:
        return whole(source, read_rules(cut_rules_file), average=average)

    def join_unequal(
        self, one: Source, other: Source
    ) -> tuple[Source, Source, Sequence[DegreeChange]]:
        return in_equal_parts(one, other)

    def tells_cut(self, source: Source) -> bool:
        return tells_cut(source)


OTHER_DEGREES: Final = _ModelParallelism()

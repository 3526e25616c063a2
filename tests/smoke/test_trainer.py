"""A checkpoint of HF Trainer, resumed on another number of ranks by a Trainer."""

from pathlib import Path

from tests.oracle import test_frameworks as frameworks
from tests.oracle.frameworks.journey import Journey, Move

MOVE = Move("hf", 2, 2, 3)


def test_a_trainer_resumes_on_more_ranks(tmp_path: Path) -> None:
    journey = Journey(tmp_path)
    journey.run([MOVE])
    frameworks.test_the_engine_holds_what_was_saved(MOVE, journey)
    frameworks.test_what_belongs_to_no_rank_comes_along(MOVE, journey)
    frameworks.test_the_trainer_goes_on(MOVE, journey)

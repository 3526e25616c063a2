"""A checkpoint of HF Trainer, resumed on another number of ranks by a Trainer."""

from pathlib import Path


def test_a_trainer_resumes_on_more_ranks(tmp_path: Path) -> None:
    # Not at the top: each process that shares the tests would import transformers.
    from tests.oracle import test_frameworks as frameworks
    from tests.oracle.frameworks.journey import Journey, Move

    move, journey = Move("hf", 2, 2, 3), Journey(tmp_path)
    journey.run([move])
    frameworks.test_the_engine_holds_what_was_saved(move, journey)
    frameworks.test_what_belongs_to_no_rank_comes_along(move, journey)
    frameworks.test_the_trainer_goes_on(move, journey)

"""What engines can do with experts that are whole on tensor-parallel ranks, and what is refused."""

from pathlib import Path

import pytest

import streamshard
from streamshard.errors import IncompleteError, UnsupportedError
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.topology.experts import ExpertParallel
from tests.oracle.truth import Truth

RANKS = 4


def _case(degree: int) -> Case:
    counts = 2 * degree, 2 * degree
    topology = ExpertParallel((degree, degree), counts=counts, tensor=2, whole_experts=True)
    return Case(f"whole-experts-{degree}", 2, "bf16", topology=topology)


def test_what_is_advised_works_where_tensor_ranks_have_other_experts(tmp_path: Path) -> None:
    for degree in (2, 4):
        case, run = _case(degree), tmp_path / f"run-{degree}"
        saved, resumed = run.with_suffix(".pt"), run.with_suffix(".again.pt")
        jobs = [Train(case, run, saved), Resume(case, run, resumed)]
        require_success(run_jobs(RANKS, jobs, tmp_path / "ranks"))
        assert differences(Truth.load(saved), Truth.load(resumed)) == []
        with pytest.raises(UnsupportedError, match=r"are on 4 ranks.* Resume on the ranks that"):
            streamshard.repartition(run, tmp_path / "out", world_size=2, expert_parallel=1)


@pytest.mark.parametrize(
    ("degree", "ranks", "complaint", "refusal"),
    [
        (
            1,
            RANKS,
            "checkpoint count 1 is different from saved mp_world_size 2",
            r"DeepSpeed saves neither .* No job can resume then",
        ),
        (3, 6, "layer_0_expert_0_mp_rank_01_model_states.pt", "are on 6 ranks"),
    ],
)
def test_an_engine_cannot_load_what_it_saved_where_parts_lack_files(
    tmp_path: Path, degree: int, ranks: int, complaint: str, refusal: str
) -> None:
    """The tensor parallel degree, 2, does not divide the expert parallel size."""
    case, run = _case(degree), tmp_path / "run"
    # Its state cannot be gathered: partitions of experts are spread over the parts of the model.
    jobs = [Train(case, run, None), Resume(case, run, tmp_path / "again.pt")]
    trained, resumed = run_jobs(ranks, jobs, tmp_path / "ranks")
    require_success([trained])
    assert complaint in str(resumed.error)
    with pytest.raises((IncompleteError, UnsupportedError), match=refusal):
        streamshard.inspect(run)

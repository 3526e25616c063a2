"""Configurations that make a mesh of sequences: one of the copies of each partition is saved."""

import json
from pathlib import Path

import pytest

import streamshard
from streamshard.errors import SourceError, UsageError
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.topology.sequence import SequenceMesh
from tests.oracle.truth import Truth

# In such a mesh several of DeepSpeed's ranks write one file at a time, which is now and then torn.
pytestmark = pytest.mark.campaign

FROM, TO = 4, 2


def _case(stage: int, ranks: int) -> Case:
    return Case(f"mesh{ranks}-z{stage}", stage, "fp32", topology=SequenceMesh(ranks // 2))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves of stages 2 and 3 at 4 ranks; that of stage 3 has no truth, for it is not whole."""
    made = tmp_path_factory.mktemp("meshes")
    trains = [
        Train(_case(2, FROM), made / "z2", made / "z2.pt"),
        Train(_case(3, FROM), made / "z3", None),
    ]
    require_success(run_jobs(FROM, trains, made / "ranks"))
    return made


def test_half_the_replicas_resume(root: Path) -> None:
    out, config = root / "out", root / "config.json"
    config.write_text(json.dumps(_case(2, TO).ds_config()))
    streamshard.repartition(root / "z2", out, world_size=TO, ds_config_file=config, verify=True)
    loads = [
        Resume(_case(2, TO), out, root / "out.pt"),
        Resume(_case(2, TO), root / "z2", root / "live.pt", reshards=True),
    ]
    require_success(run_jobs(TO, loads, root / "ranks"))
    saved = Truth.load(root / "z2.pt")
    assert differences(saved, Truth.load(root / "out.pt")) == []
    assert differences(saved, Truth.load(root / "live.pt")) == []


def test_stage_3_is_refused_at_both_ends(root: Path, tmp_path: Path) -> None:
    """DeepSpeed cuts its state among 4 ranks here, and saves 2 of the parts."""
    assert len(list((root / "z3").glob("*/*optim_states.pt"))) == FROM // 2
    with pytest.raises(SourceError, match=r"saves the parts of 2. The others are lost|is damaged"):
        streamshard.repartition(root / "z3", tmp_path / "out", world_size=FROM)
    with pytest.raises(UsageError, match=r"at ZeRO stage 3.* stage 1 or 2"):
        streamshard.repartition(root / "z2", tmp_path / "out", world_size=FROM, zero_stage=3)

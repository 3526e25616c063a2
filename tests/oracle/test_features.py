"""What DeepSpeed's rarer features save resumes on other ranks, or is refused by name."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import streamshard
from streamshard.errors import SourceError, UnsupportedError, UsageError
from tests.oracle.cases import BF16, Resharding
from tests.oracle.compare import close, differences
from tests.oracle.conftest import FURTHER_STEPS, Places, carry
from tests.oracle.features import cases, zero
from tests.oracle.files import digests, file_differences
from tests.oracle.jobs import Consolidate, Resume, after_path
from tests.oracle.models import Case
from tests.oracle.odd_engines import Odd, gathers_without_coalescing
from tests.oracle.odd_engines import run as run_odd
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth
from tests.oracle.values import value_differences

CASES = cases(Path())
TOLERANCE = 0.5
"""As in the test of plain data parallelism: the noise of reductions in bf16."""
WITHOUT_OPTIMIZER = {
    "unopened": (("load_optimizer_states", False),),
    "module-only": (("load_optimizer_states", False), ("load_module_only", True)),
}
"""Ways to load the weights of stage 3; `load_module_only` by itself loads none of them."""


@pytest.fixture(scope="module")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Every case trained, taken to its target by both roads, resumed and saved again."""
    places = Places(tmp_path_factory.mktemp("features"))
    with pytest.MonkeyPatch.context() as patch:
        # As DeepSpeed's launcher sets them on one machine; its checkpoint writers look at them.
        patch.setenv("CROSS_RANK", "0")
        patch.setenv("CROSS_SIZE", "1")
        return carry(cases(places.root / "clusters"), places)


@pytest.fixture(params=CASES, ids=lambda one: one.name)
def one(request: pytest.FixtureRequest, featured: Places) -> Resharding:
    """One resharding that was converted and resumed without an error."""
    resharding: Resharding = request.param
    if resharding.name in featured.errors:
        pytest.fail(featured.errors[resharding.name], pytrace=False)
    return resharding


def test_both_roads_write_the_same_bytes(one: Resharding, featured: Places) -> None:
    assert digests(featured.out(one)) == digests(featured.out_of_store(one))


def test_the_resumed_engine_holds_what_was_saved(one: Resharding, featured: Places) -> None:
    saved = Truth.load(featured.truth_path(featured.source(one.case, one.source)))
    resumed = Truth.load(featured.truth_path(featured.out(one)))
    assert differences(saved, resumed) == []


def test_deepspeed_would_have_written_the_same_files(one: Resharding, featured: Places) -> None:
    """With the states of the sampler and of token dropping, which engines load from them."""
    tag = (featured.out(one) / "latest").read_text()
    assert file_differences(featured.out(one) / tag, featured.resaved(one) / tag) == []


def test_an_engine_that_loads_directly_holds_the_same(one: Resharding, featured: Places) -> None:
    """As after a conversion and a plain load; saved again, too."""
    converted, loaded = featured.resaved(one), featured.loaded(one)
    of_out = Truth.load(featured.truth_path(featured.out(one)))
    assert differences(of_out, Truth.load(featured.truth_path(loaded))) == []
    tag = (featured.out(one) / "latest").read_text()
    assert file_differences(converted / tag, loaded / tag) == []


def test_training_goes_on_as_if_uninterrupted(one: Resharding, featured: Places) -> None:
    saved_path = featured.truth_path(featured.source(one.case, one.source))
    saved, uninterrupted = Truth.load(saved_path), Truth.load(after_path(saved_path))
    resumed = Truth.load(after_path(featured.truth_path(featured.out(one))))
    assert resumed.counters["global_steps"] == saved.counters["global_steps"] + FURTHER_STEPS
    assert close(uninterrupted, resumed, start=saved, tolerance=TOLERANCE) == []


@pytest.mark.parametrize("key", ["data_sampler", "random_ltd"])
def test_the_states_of_data_efficiency_come_along(key: str, featured: Places) -> None:
    found = 0
    for one in CASES:
        source, out = featured.source(one.case, one.source), featured.out(one)
        before, after = (
            torch.load(min(run_dir.glob("*/*model_states.pt")), weights_only=False)[key]
            for run_dir in (source, out)
        )
        assert list(value_differences(before, after, one.name)) == []
        found += before is not None
    assert found == 2


@pytest.fixture(scope="module")
def weights_loaded(featured: Places) -> Path:
    """Engines of stage 3 that loaded what we wrote without the optimizer's state."""
    root = featured.root / "weights"
    root.mkdir()
    [one] = (one for one in CASES if one.resuming == BF16[2])
    jobs = [
        Resume(one.resuming, featured.out(one), root / f"{name}.pt", load_options=options)
        for name, options in WITHOUT_OPTIMIZER.items()
    ]
    require_success(run_jobs(2, jobs, root / "ranks"))
    return root


@pytest.mark.parametrize("name", WITHOUT_OPTIMIZER)
def test_stage_3_loads_the_weights_alone(name: str, weights_loaded: Path, featured: Places) -> None:
    [one] = (one for one in CASES if one.resuming == BF16[2])
    saved = Truth.load(featured.truth_path(featured.source(one.case, one.source)))
    loaded = Truth.load(weights_loaded / f"{name}.pt")
    for field in ("weights", "frozen", "buffers"):
        found = value_differences(getattr(saved, field), getattr(loaded, field), field)
        assert list(found) == []
    assert loaded.states.keys() == {"fp32"}


def test_a_run_of_which_no_save_was_committed_is_named(featured: Places, tmp_path: Path) -> None:
    """A decoupled writer writes `latest` at the next step: not at all after the last save."""
    [one] = (one for one in CASES if "decoupled" in one.case.name)
    run_dir = featured.source(one.case, one.source)
    tag = (run_dir / "latest").read_text()
    shutil.copytree(run_dir / tag, tmp_path / tag)
    with pytest.raises(SourceError, match=r"no 'latest' file .* Give the one in it: ") as refused:
        streamshard.inspect(tmp_path)
    given = str(refused.value).rpartition("Give the one in it: ")[2]
    assert streamshard.inspect(given).world_size == 4


@pytest.fixture(scope="module")
def mics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 4 ranks saved with MiCS, in shards of 2 and of 4, and the weights of the former."""
    home = os.environ.get("OLD_DEEPSPEEDS")
    if home is None:
        pytest.skip("OLD_DEEPSPEEDS names no place of 0.16.9: `nox -s oracle` installs it")
    root = tmp_path_factory.mktemp("mics")
    jobs = [
        Odd(
            Case(f"z3-mics-{size}", 3, "bf16", zero(mics_shard_size=size)),
            root / str(size),
            stand_in=gathers_without_coalescing,
        )
        for size in (2, 4)
    ]
    at = Path(home) / "deepspeed-0.16.9"
    require_success(run_jobs(4, jobs, root / "ranks", run_odd, deepspeed_at=at))
    require_success(run_jobs(1, [Consolidate(root / "2", root / "weights.pt")], root / "ranks"))
    return root


def test_mics_is_refused_by_name(mics: Path, tmp_path: Path) -> None:
    message = r"MiCS \(mics_shard_size 2\) on 4 ranks.*zero_to_fp32.py writes the weights"
    with pytest.raises(UnsupportedError, match=message):
        streamshard.repartition(mics / "2", tmp_path / "out", world_size=3)
    weights = torch.load(mics / "weights.pt", weights_only=False)
    assert weights["embed.weight"].shape == (37, 13)
    # Among all ranks it is plain stage 3, and what resumes may not have less.
    with pytest.raises(UsageError, match=r"has mics_shard_size 4.*leave it out"):
        streamshard.repartition(mics / "4", tmp_path / "out", world_size=3)
    assert streamshard.verify(mics / "4").problems == ()

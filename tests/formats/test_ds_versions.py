"""Rules that changed between DeepSpeed's versions follow the version of the job."""

from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.errors import UsageError
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.deepspeed.ds_versions import Version
from tests.cli.conftest import streamshard as run_cli
from tests.fabricated import edit, load, write
from tests.job import EXPERTS, TAG, Job

ROUND_ROBIN = {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}
OFFLOADED = {
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "float32"},
}


def setting(config: dict[str, Any], name: str, version: Version | None, stage: int = 1) -> object:
    """Return one setting of the layout that a version makes of a config."""
    layout = ds_config.zero_layout(config, stage=stage, world_size=2, version=version)
    return getattr(layout, name)


def test_round_robin_is_heeded_at_stage_1_since_0_13() -> None:
    old = [setting(ROUND_ROBIN, "round_robin", version) for version in ((0, 9, 5), (0, 12, 6))]
    new = [setting(ROUND_ROBIN, "round_robin", version) for version in ((0, 13, 0), None)]
    assert (old, new) == ([False] * 2, [True] * 2)
    assert setting(ROUND_ROBIN, "round_robin", (0, 9, 5), stage=2) is True


def test_offload_turns_the_bf16_optimizer_off_since_0_10_1() -> None:
    found = [setting(OFFLOADED, "bf16_optimizer", v) for v in ((0, 10, 0), (0, 10, 1), None)]
    assert found == [True, False, False]


def test_data_before_experts_is_known_since_0_12_4() -> None:
    config = {"use_data_before_expert_parallelism": True}
    found = [setting(config, "data_before_experts", v) for v in ((0, 12, 3), (0, 12, 4), None)]
    assert found == [False, True, True]


def test_alignment_is_known_since_0_19_7() -> None:
    config = {"zero_optimization": {"stage": 2, "parameter_alignment": True}}
    found = [setting(config, "parameter_alignment", v, 2) for v in ((0, 19, 6), (0, 19, 7), None)]
    assert found == [False, True, True]


def test_two_sizes_make_a_mesh_since_0_15() -> None:
    config = {"data_parallel_size": 2, "sequence_parallel_size": 2}
    found = [ds_config.sequence_mesh(config, v) for v in ((0, 14, 5), (0, 15, 0), None)]
    assert found == [None, (2, 2), (2, 2)]


def stored(run_dir: Path) -> list[list[str]]:
    """Return the order in which the parameters of each group are stored."""
    held = load(run_dir / TAG / "mp_rank_00_model_states.pt")
    return [list(unit) for unit in held["param_shapes"]]


def test_a_source_is_read_in_the_order_that_its_files_prove(tmp_path: Path) -> None:
    plain = write(Job(stage=2), tmp_path / "plain")
    shuffled = write(Job(stage=2, round_robin=True), tmp_path / "shuffled")
    assert stored(plain) != stored(shuffled)
    for run_dir, config in ((plain, True), (shuffled, False)):
        for path in (run_dir / TAG).glob("*.pt"):
            say_round_robin(path, on=config)
            edit(path, forget_version)
    assert streamshard.verify(plain, against=shuffled).is_good


def forget_version(held: dict[str, Any]) -> None:
    """Leave out which version saved a file: where it is known, its config is not doubted."""
    for part in (held, held.get("optimizer_state_dict", {})):
        part.pop("ds_version", None)


def say_round_robin(path: Path, *, on: bool) -> None:
    """Change the config that a file keeps: the order in the file stays as it is."""
    edit(path, lambda held: held["ds_config"]["zero_optimization"].update(round_robin_gradients=on))


def test_experts_of_an_old_bf16_optimizer_are_refused(tmp_path: Path) -> None:
    job = Job(stage=1, world_size=4, experts=EXPERTS, expert_parallel=2)
    run_dir = write(job, tmp_path / "run")
    config = tmp_path / "ds.json"
    config.write_text(
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, '
        '"data_types": {"grad_accum_dtype": "fp32"}}'
    )
    options: dict[str, Any] = {"world_size": 4, "ds_config_file": config}
    with pytest.raises(UsageError, match="cuts experts among all ranks"):
        streamshard.repartition(run_dir, tmp_path / "out", **options, ds_version="0.14.0")


def test_the_command_line_takes_a_version(tmp_path: Path) -> None:
    run_dir = write(Job(stage=1, round_robin=True), tmp_path / "run")
    resize = ["repartition", run_dir, tmp_path / "out", "--world-size", 2, "--ds-version"]
    done = run_cli(*resize, "twelve")
    assert (done.code, done.out) == (2, "")
    assert "--ds-version 'twelve': give a release of DeepSpeed" in done.err
    done = run_cli(*resize, "0.12.6")
    assert done.code == 0
    assert "round_robin_gradients off" in done.out + done.err

"""The job that resumes: configs with which it would not load what is written are refused."""

import json
from pathlib import Path

import pytest

import streamshard
from streamshard.errors import StreamshardError, UsageError
from tests.fabricated import write
from tests.job import Job
from tests.test_unsupported import NVME, STAGE_3, Content, config, edit_all, write_config, zero

OFFLOAD = {"device": "cpu"}
OBJECTIONS = [
    ({"offload_optimizer": NVME}, "has offload_optimizer.device nvme", "set it to cpu or none"),
    ({"offload_optimizer": {**OFFLOAD, "ratio": 0.4}}, "ratio 0.4", "set it to 1"),
    ({"offload_optimizer": {**OFFLOAD, "super_offload": True}}, "super_offload", "set it to false"),
    ({"zenflow": {}}, "has zenflow", "leave it out"),
    ({"mics_shard_size": 2}, "has mics_shard_size 2", "leave it out"),
    ({"zero_quantized_nontrainable_weights": True}, "zero_quantized", "set it to false"),
]


@pytest.mark.parametrize(("settings", "what", "remedy"), OBJECTIONS, ids=lambda value: str(value))
def test_a_job_that_would_not_load_the_files_is_told(
    settings: Content, what: str, remedy: str, tmp_path: Path
) -> None:
    run = write(STAGE_3, tmp_path / "run")
    path = write_config(tmp_path, run, **settings)
    with pytest.raises(UsageError) as refusal:
        streamshard.repartition(run, tmp_path / "out", world_size=4, ds_config_file=path)
    assert refusal.value.exit_code == 2
    assert "the config given with ds_config_file=" in str(refusal.value)
    assert what in str(refusal.value)
    assert remedy in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"offload_optimizer": {"device": "cpu", "ratio": 1.0, "super_offload": False}},
        {"offload_optimizer": {"device": "none"}, "offload_param": NVME},
        {"mics_shard_size": 4, "zenflow": None, "zero_hpz_partition_size": 2},
    ],
    ids=str,
)
def test_settings_that_do_not_matter_are_let_pass(settings: Content, tmp_path: Path) -> None:
    run = write(STAGE_3, tmp_path / "run")
    path = write_config(tmp_path, run, **settings)
    streamshard.repartition(run, tmp_path / "out", world_size=4, ds_config_file=path)


def test_stage_2_swaps_nothing_to_nvme(tmp_path: Path) -> None:
    """DeepSpeed takes it for offload to the CPU there, and quantises no frozen weights."""
    run = write(Job(stage=2), tmp_path / "run")
    settings = {"offload_optimizer": NVME, "zero_quantized_nontrainable_weights": True}
    edit_all(run, "*.pt", zero(**settings))
    streamshard.repartition(run, tmp_path / "out", world_size=3)


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        ({}, {"tensor_parallel": {"autotp_size": 2}}, "autotp_size 2, .* saved with 1"),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, "autotp_size 1, .* saved with 2"),
        ({}, {"expert_parallel": {"enabled": True}}, "AutoEP on"),
        ({}, {"data_parallel_size": 2, "sequence_parallel_size": 2}, "leave data_parallel_size"),
        (
            {"data_parallel_size": 3, "sequence_parallel_size": 2},
            {},
            "set data_parallel_size 4 and sequence_parallel_size 2",
        ),
        (
            {"data_parallel_size": 3, "sequence_parallel_size": 2},
            {"data_parallel_size": 8, "sequence_parallel_size": 1},
            "set data_parallel_size 4 and sequence_parallel_size 2",
        ),
    ],
    ids=str,
)
def test_another_degree_of_parallelism_is_refused(
    saved: Content, given: Content, message: str, tmp_path: Path
) -> None:
    parts = 2 if "tensor_parallel" in saved else 1
    run = write(Job(stage=2, world_size=3, parts=parts), tmp_path / "run")
    path = write_config(tmp_path, run)
    path.write_text(json.dumps(json.loads(path.read_text()) | given))
    edit_all(run, "*.pt", config(**saved))
    with pytest.raises(UsageError, match=f"the config given with ds_config_file= .*{message}"):
        streamshard.repartition(run, tmp_path / "out", world_size=8, ds_config_file=path)
    assert not (tmp_path / "out").exists()


def test_stage_3_on_a_mesh_of_sequences_is_refused(tmp_path: Path) -> None:
    """Such a job cuts its state among all ranks, and saves the parts of some."""
    run = write(Job(stage=2), tmp_path / "run")
    mesh = {"data_parallel_size": 2, "sequence_parallel_size": 2}
    edit_all(run, "*.pt", config(**mesh))
    with pytest.raises(UsageError, match=r"data_parallel_size .*at ZeRO stage 3.* stage 1 or 2"):
        streamshard.repartition(run, tmp_path / "out", world_size=4, zero_stage=3)
    assert not (tmp_path / "out").exists()


def test_a_config_that_loads_universal_checkpoints_is_noted(tmp_path: Path) -> None:
    run = write(Job(), tmp_path / "run")
    edit_all(run, "*.pt", config(checkpoint={"load_universal": True}))
    report = streamshard.repartition(run, tmp_path / "out", world_size=3)
    assert any("checkpoint.load_universal" in note for note in report.notes)


@pytest.mark.parametrize(
    "section",
    [{"ratio": 1.5}, {"ratio": "much"}, {"super_offload": "perhaps"}],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused(section: Content, tmp_path: Path) -> None:
    run = write(STAGE_3, tmp_path / "run")
    path = write_config(tmp_path, run, offload_optimizer=section)
    with pytest.raises(StreamshardError, match=r"DeepSpeed config: .*which is no"):
        streamshard.repartition(run, tmp_path / "out", world_size=4, ds_config_file=path)

"""What the job that resumes is told of its batch, its data, and of configs that would not load."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.errors import StreamshardError, UsageError
from tests.checkpoints.test_unsupported import NVME, STAGE_3, Content, config, write_config, zero
from tests.fabricated import edit_all, load, save, write
from tests.job import TAG, Job

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
NOT_TOLD = "the checkpoint's config does not say"


def advice(
    place: Path, saved: Content, *, world_size: int, given: Content | None = None, degrees: int = 0
) -> str:
    """Say what is advised to a job of 4 ranks that goes on with `world_size`.

    `saved` is its config beside ZeRO's, `degrees` the tensor parallel degree that the
    model-parallel unit tells, `given` what the config of the job that resumes adds.
    """
    run = write(Job(stage=2, world_size=4), place / "run")
    config_file = None
    for path in sorted((run / TAG).glob("*.pt")):
        content = load(path)
        config = {k: v for k, v in content["ds_config"].items() if k not in BATCH} | saved
        content["ds_config"] = config
        if "module" in content and degrees:
            content["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": degrees}
        save(content, path)
    if given is not None:
        config_file = place / "ds.json"
        config_file.write_text(json.dumps(config | given))
    plan = streamshard.plan_repartition(
        run, place / "out", world_size=world_size, ds_config_file=config_file
    )
    return plan.report.notes[-1]


def settings(text: str) -> list[int]:
    return [int(found[1]) for key in BATCH if (found := re.search(rf'"{key}": (\d+)', text))]


def sizes(total: int | None, micro: int | None, accumulation: int | None) -> Content:
    """Spell those that are given in a config."""
    given = zip(BATCH, (total, micro, accumulation), strict=True)
    return {key: size for key, size in given if size is not None}


def sequences(data_parallel: int, ranks: int) -> Content:
    """Have each sequence cut among some ranks."""
    return {"data_parallel_size": data_parallel, "sequence_parallel_size": ranks}


SEQUENCE_2 = {"sequence_parallel_size": 2}
MESH = sequences(4, 2)


@pytest.mark.parametrize(
    ("saved", "degrees", "shared"),
    [
        (sizes(64, 8, 2), 0, 1),  # 8 x 2 x 4 ranks
        (sizes(64, 8, 4), 0, 2),  # 8 x 4 x 2: the ranks are twice that
        (sizes(64, 8, 8), 0, 4),
        (sizes(64, 8, None) | SEQUENCE_2, 0, 2),
        (sizes(64, 8, None), 2, 2),
        (sizes(None, 8, 4) | SEQUENCE_2, 0, 2),
    ],
    ids=str,
)
def test_ranks_that_share_a_sequence_count_once(
    saved: Content, degrees: int, shared: int, tmp_path: Path
) -> None:
    text = advice(tmp_path, saved, world_size=8, degrees=degrees)
    total, micro, accumulation = settings(text)
    assert total == 64
    assert micro * accumulation * (8 // shared) == total
    assert (f"{shared} for each sequence" in text) == (shared > 1)
    assert NOT_TOLD not in text


@pytest.mark.parametrize("saved", [sizes(64, 8, None), sizes(64, None, 2), sizes(None, 16, None)])
def test_what_nothing_tells_is_said(saved: Content, tmp_path: Path) -> None:
    text = advice(tmp_path, saved, world_size=2)
    total, micro, accumulation = settings(text)
    assert micro * accumulation * 2 == total == 64
    assert NOT_TOLD in text


LACKING = "lacks the global batch size"
SAID: list[tuple[Content, int, str, list[int] | None]] = [
    (sizes(None, None, 4), 2, LACKING, []),
    (sizes(64, 5, 3), 2, LACKING, []),
    (sizes(64, 32, 32), 2, LACKING, []),
    (sizes(72, 8, 3), 2, "do not fit 4 ranks", []),
    (sizes(64, 8, 4), 5, "Every sequence is cut among 2 ranks, which do not divide 5", []),
    (sizes(64, 8, 2), 1, "on 1 rank, set", [64, 8, 8]),
    (sizes(16, 4, 1), 3, "2 or 4 ranks would keep it. The nearest global batches are 15 and", None),
    (sizes(16, 4, 1), 17, "16 ranks would keep it. The nearest global batch is 17.", None),
    (sizes(28, 7, 1), 3, "2 or 4 ranks would keep it", None),
]


@pytest.mark.parametrize(("saved", "world_size", "text", "advised"), SAID)
def test_what_cannot_be_kept_or_is_not_told_is_said(
    saved: Content, world_size: int, text: str, advised: list[int] | None, tmp_path: Path
) -> None:
    found = advice(tmp_path, saved, world_size=world_size)
    assert text in found
    assert advised in (None, settings(found))


def test_what_was_written_knows_its_replicas(tmp_path: Path) -> None:
    """It can be resharded again: the config in it names the new count of data-parallel ranks."""
    advice(tmp_path, MESH, world_size=8)
    streamshard.repartition(tmp_path / "run", tmp_path / "out", world_size=4)
    assert streamshard.inspect(tmp_path / "out").world_size == 4
    streamshard.repartition(tmp_path / "out", tmp_path / "back", world_size=8)
    assert len(list((tmp_path / "back" / TAG).glob("*_optim_states.pt"))) == 4


def test_the_samples_are_counted(tmp_path: Path) -> None:
    """By the step at the state's top, not by those in its log; Trainer counts in `tests/oracle`."""
    run = write(Job(stage=2, world_size=4), tmp_path / "run")
    log = [{"epoch": 9.0, "global_step": 999_999, "step": 1}]
    state = {"epoch": 2.5, "global_step": 10, "log_history": log, "max_steps": 100}
    (run / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")
    notes = streamshard.repartition(run, tmp_path / "out", world_size=5).notes
    (text,) = [note for note in notes if note.startswith("Trainer skips the data")]
    assert "at step 10, so 10 x 24 = 240 samples were seen, in 2.50 epochs." in text
    assert "global batch of 20, Trainer skips 200 samples: about 40 samples are seen twice" in text
    assert "global batch of 25, Trainer skips 250 samples: about 10 samples are left out" in text
    assert "global batch of 30, Trainer skips 300 samples: about 60 samples are left out" in text


@pytest.mark.parametrize(
    "state", ["", "{}", "[1]", '{"global_step": 10}', '{\n  "global_step": "x"\n}']
)
def test_a_step_that_is_not_told_is_not_guessed(state: str, tmp_path: Path) -> None:
    run = write(Job(stage=2, world_size=4), tmp_path / "run")
    (run / "trainer_state.json").write_text(state)
    report = streamshard.repartition(run, tmp_path / "out", world_size=5)
    assert any("trainer_state.json does not contain the step" in text for text in report.notes)


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
    message = f"the config given with ds_config_file=.*{what}.*{remedy}"
    with pytest.raises(UsageError, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=4, ds_config_file=path)


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
        ({}, sequences(2, 2), "leave data_parallel_size"),
        (sequences(3, 2), {}, "set data_parallel_size 4 and sequence_parallel_size 2"),
        (sequences(3, 2), sequences(8, 1), "set data_parallel_size 4 and sequence_parallel_size 2"),
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
    edit_all(run, "*.pt", config(**sequences(2, 2)))
    with pytest.raises(UsageError, match=r"data_parallel_size .*at ZeRO stage 3.* stage 1 or 2"):
        streamshard.repartition(run, tmp_path / "out", world_size=4, zero_stage=3)
    assert not (tmp_path / "out").exists()


def test_a_config_that_loads_universal_checkpoints_is_noted(tmp_path: Path) -> None:
    run = write(Job(), tmp_path / "run")
    edit_all(run, "*.pt", config(checkpoint={"load_universal": True}))
    report = streamshard.repartition(run, tmp_path / "out", world_size=3)
    assert any("checkpoint.load_universal" in note for note in report.notes)


def test_a_key_of_a_newer_version_asks_for_that_version(tmp_path: Path) -> None:
    """Left out silently, it would make files that the job refuses."""
    run = write(Job(stage=2), tmp_path / "run")
    edit_all(run, "*.pt", lambda content: content.update(ds_version="0.16.9"))
    path = write_config(tmp_path, run, parameter_alignment=True)
    given: dict[str, Any] = {"world_size": 3, "ds_config_file": path}
    with pytest.raises(
        UsageError, match=r"parameter_alignment on.* give facts=FILE, .* ds_version = "
    ):
        streamshard.repartition(run, tmp_path / "out", **given)
    report = streamshard.repartition(
        run, tmp_path / "out", facts={"target": {"ds_version": "0.19.8"}}, **given
    )
    assert any("parameter_alignment on" in note for note in report.notes)


@pytest.mark.parametrize(("stage", "is_noted"), [(1, True), (2, True), (3, False)])
def test_a_config_that_rounds_master_weights_is_noted(
    stage: int, is_noted: bool, tmp_path: Path
) -> None:
    run = write(Job(stage=stage), tmp_path / "run")
    edit_all(run, "*.pt", zero(load_from_fp32_weights=False))
    report = streamshard.repartition(run, tmp_path / "out", world_size=3)
    assert any("load_from_fp32_weights off" in note for note in report.notes) == is_noted


def test_a_config_with_which_no_master_weights_are_loaded_is_refused(tmp_path: Path) -> None:
    run = write(Job(stage=1), tmp_path / "run")
    path = write_config(tmp_path, run, load_from_fp32_weights=False)
    given = json.loads(path.read_text()) | {"data_types": {"grad_accum_dtype": "fp32"}}
    path.write_text(json.dumps(given))
    with pytest.raises(UsageError, match=r"BF16_Optimizer keeps the master weights.*set it to tr"):
        streamshard.repartition(run, tmp_path / "out", world_size=3, ds_config_file=path)


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


def test_what_stage_1_takes_for_frozen_is_said_where_stage_3_would_not_load_it(
    tmp_path: Path,
) -> None:
    run = write(Job(stage=1, world_size=2), tmp_path / "run")
    whole = write(Job(stage=1, world_size=2, frozen=()), tmp_path / "whole")
    for source, stage, is_said in ((run, 3, True), (run, 2, False), (whole, 3, False)):
        plan = streamshard.plan_repartition(source, tmp_path / "o", world_size=3, zero_stage=stage)
        said = [text for text in plan.report.notes if "taken for frozen" in text]
        assert bool(said) == is_said
        assert all("old.weight" in text for text in said)

"""The batch settings that keep the global batch, also where sequences are cut among ranks.

DeepSpeed asks that train_batch_size = micro batch x accumulation x ranks, where the ranks that
share a sequence count as one (`DeepSpeedConfig._batch_assertion`).
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import streamshard
from tests.fabricated import load, save, write
from tests.job import TAG, Job

Content = dict[str, Any]
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
    """Read the three sizes that are advised."""
    return [int(found[1]) for key in BATCH if (found := re.search(rf'"{key}": (\d+)', text))]


def sizes(total: int | None, micro: int | None, accumulation: int | None) -> Content:
    """Spell those that are given in a config."""
    given = zip(BATCH, (total, micro, accumulation), strict=True)
    return {key: size for key, size in given if size is not None}


SEQUENCE_2 = {"sequence_parallel_size": 2}
MESH = {"data_parallel_size": 4, "sequence_parallel_size": 2}


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
@pytest.mark.parametrize("world_size", [4, 8])
def test_ranks_that_share_a_sequence_count_once(
    saved: Content, degrees: int, shared: int, world_size: int, tmp_path: Path
) -> None:
    text = advice(tmp_path, saved, world_size=world_size, degrees=degrees)
    total, micro, accumulation = settings(text)
    assert total == 64
    assert micro * accumulation * (world_size // shared) == total
    assert (f"{shared} for each sequence" in text) == (shared > 1)
    assert NOT_TOLD not in text


@pytest.mark.parametrize("saved", [sizes(64, 8, None), sizes(64, None, 2), sizes(None, 16, None)])
def test_what_nothing_tells_is_said(saved: Content, tmp_path: Path) -> None:
    text = advice(tmp_path, saved, world_size=2)
    total, micro, accumulation = settings(text)
    assert micro * accumulation * 2 == total == 64
    assert NOT_TOLD in text


@pytest.mark.parametrize("saved", [sizes(None, None, 4), sizes(64, 5, 3), sizes(64, 32, 32)])
def test_sizes_that_tell_nothing_are_not_made_up(saved: Content, tmp_path: Path) -> None:
    text = advice(tmp_path, saved, world_size=2)
    assert "lacks the global batch size" in text
    assert settings(text) == []


def test_sizes_of_another_world_are_not_believed(tmp_path: Path) -> None:
    text = advice(tmp_path, sizes(72, 8, 3), world_size=2)
    assert "do not fit 4 ranks" in text
    assert settings(text) == []


def test_the_job_that_resumes_may_cut_sequences_in_another_way(tmp_path: Path) -> None:
    given = sizes(64, 8, 4) | {"sequence_parallel_size": 4}
    text = advice(tmp_path, sizes(64, 8, 4), world_size=8, given=given)
    assert settings(text) == [64, 8, 4]  # by 2, which is 8 ranks of which 4 share a sequence
    assert "8 ranks, 4 for each sequence" in text


def test_ranks_that_do_not_divide_among_sequences(tmp_path: Path) -> None:
    text = advice(tmp_path, sizes(64, 8, 4), world_size=5)
    assert "Every sequence is cut among 2 ranks, which do not divide 5" in text
    assert settings(text) == []


def test_a_batch_that_cannot_be_kept(tmp_path: Path) -> None:
    text = advice(tmp_path, sizes(64, 8, 4), world_size=6)
    assert "The global batch of 64 cannot be kept on 6 ranks, 2 for each sequence" in text
    assert "it is not a multiple of 3. The nearest global batches are 63 and 66" in text
    assert settings(text) == [63, 7, 3]
    assert settings(text.partition("For 66,")[2]) == [66, 2, 11]


@pytest.mark.parametrize(
    ("saved", "world_size", "others"),
    [
        (sizes(16, 4, 1), 3, "2 or 4 ranks would keep it. The nearest global batches are 15 and"),
        (sizes(16, 4, 1), 17, "16 ranks would keep it. The nearest global batch is 17."),
        (sizes(28, 7, 1), 3, "2 or 4 ranks would keep it"),
    ],
)
def test_the_next_world_sizes_that_keep_the_batch_are_named(
    saved: Content, world_size: int, others: str, tmp_path: Path
) -> None:
    assert others in advice(tmp_path, saved, world_size=world_size)


def test_one_rank_is_no_ranks(tmp_path: Path) -> None:
    assert "on 1 rank, set" in advice(tmp_path, sizes(64, 8, 2), world_size=1)


def test_replicas_of_partitions_are_no_data_parallel_ranks(tmp_path: Path) -> None:
    """Both sizes in the config: the files are cut among the data-parallel ranks alone."""
    text = advice(tmp_path, sizes(64, 8, 2) | MESH, world_size=4)
    assert settings(text) == [64, 8, 4]
    assert "on 2 data-parallel ranks" in text
    assert '"data_parallel_size": 2' in text


def test_what_was_written_knows_its_replicas(tmp_path: Path) -> None:
    """It can be resharded again: the config in it names the new count of data-parallel ranks."""
    advice(tmp_path, MESH, world_size=8)
    streamshard.repartition(tmp_path / "run", tmp_path / "out", world_size=4)
    assert streamshard.inspect(tmp_path / "out").world_size == 4
    streamshard.repartition(tmp_path / "out", tmp_path / "back", world_size=8)
    assert len(list((tmp_path / "back" / TAG).glob("*_optim_states.pt"))) == 4


@pytest.mark.parametrize("version", ["2.6.6", None])
def test_lightning_s_trainer_and_fabric_have_other_words(
    version: str | None, tmp_path: Path
) -> None:
    """Fabric keeps nothing of its own; it takes accumulation from the config, the Trainer never."""
    run = write(Job(stage=2, world_size=4), tmp_path / "run")
    (run / TAG).rename(run / "checkpoint")
    (run / "latest").write_text("checkpoint")
    if version is not None:
        for path in (run / "checkpoint").glob("*model_states.pt"):
            save(load(path) | {"pytorch-lightning_version": version}, path)
    notes = streamshard.repartition(run, tmp_path / "out", world_size=2).notes
    (text,) = [note for note in notes if "DataLoader(..., batch_size=2)" in note]
    assert ("Trainer(accumulate_grad_batches=6)" in text) == (version is not None)
    assert ('"gradient_accumulation_steps": 6' in text) == (version is None)

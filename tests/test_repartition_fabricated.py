"""Fabricated checkpoints, repartitioned, against the same job fabricated for the other world.

Real engines are asked the same in `tests/oracle`; this asks it often, in seconds.
"""

import enum
import json
import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamshard
from tests.fabricated import client_state, edit, load, write
from tests.job import TAG, Job, ds_config

SIZES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), min_size=1, max_size=5)


def differences(found: Any, wanted: Any, path: str = "") -> list[str]:  # noqa: ANN401
    """List where two loaded files differ, tensors bit by bit."""
    if type(found) is not type(wanted):
        return [f"{path}: {type(found)} for {type(wanted)}"]
    if isinstance(found, torch.Tensor):
        same = (
            (found.dtype, found.shape, found.requires_grad, vars(found))
            == (wanted.dtype, wanted.shape, wanted.requires_grad, vars(wanted))
            and bits(found) == bits(wanted)
        )  # fmt: skip
        return [] if same else [f"{path}: {found} for {wanted}"]
    if isinstance(found, Mapping):
        if list(found) != list(wanted):
            return [f"{path}: keys {list(found)} for {list(wanted)}"]
        pairs = [(found[key], wanted[key], f"{path}/{key}") for key in found]
    elif isinstance(found, list | tuple):
        if len(found) != len(wanted):
            return [f"{path}: {len(found)} items for {len(wanted)}"]
        both = zip(found, wanted, strict=True)
        pairs = [(one, other, f"{path}/{i}") for i, (one, other) in enumerate(both)]
    elif isinstance(found, enum.Enum) or not hasattr(found, "__dict__"):
        return [] if found == wanted else [f"{path}: {found!r} for {wanted!r}"]
    else:
        pairs = [(vars(found), vars(wanted), path)]
    return [line for pair in pairs for line in differences(*pair)]


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return np.asarray(flat.numpy()).tobytes() if tensor.numel() else b""


def check(job: Job, world_size: int, directory: Path, *, dtype: torch.dtype | None = None) -> None:
    """Repartition a job's files and compare with what the other world would have saved.

    With a dtype, the other world also trains in another precision.
    """
    write(job, directory / "run")
    target = replace(job, world_size=world_size, garbage=False, dtype=dtype or job.dtype)
    wanted, config = write(target, directory / "wanted"), None
    if dtype is not None:
        config = directory / "ds.json"
        config.write_text(json.dumps(ds_config(target)))
    streamshard.repartition(
        directory / "run", directory / "found", world_size=world_size, ds_config_file=config
    )
    names = [sorted(p.name for p in (directory / d / TAG).iterdir()) for d in ("found", "wanted")]
    assert names[0] == names[1]
    for name in names[0]:
        found = differences(load(directory / "found" / TAG / name), load(wanted / TAG / name), name)
        assert found == []
    assert (directory / "found" / "latest").read_text() == TAG
    script = directory / "found" / "zero_to_fp32.py"
    assert script.stat().st_mode & 0o777 == 0o755
    assert script.read_bytes() == (directory / "run" / "zero_to_fp32.py").read_bytes()


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_are_those_of_the_other_world(tmp_path: Path, stage: int, world_size: int) -> None:
    job = Job(stage=stage, world_size=3, client_state=client_state(), sub_group_size=20)
    check(job, world_size, tmp_path)


def names_in(run: Path) -> set[str]:
    """List the names that the pickles of a checkpoint would have imported."""
    found: set[str] = set()
    for path in sorted((run / TAG).glob("*.pt")):
        with zipfile.ZipFile(path) as archive:
            pickled = archive.read(f"{path.stem}/data.pkl")
        operations = pickletools.genops(pickled)
        found |= {str(arg) for operation, arg, _ in operations if operation.name == "GLOBAL"}
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_name_is_asked_for_that_the_source_does_not_ask_for(tmp_path: Path, stage: int) -> None:
    run = write(Job(stage=stage, client_state=client_state()), tmp_path / "run")
    streamshard.repartition(run, tmp_path / "out", world_size=3)
    assert names_in(tmp_path / "out") <= names_in(run)
    assert "collections OrderedDict" in names_in(run)


@pytest.mark.parametrize("alignment", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_robin_and_alignment_of_any_dtype(
    tmp_path: Path, dtype: torch.dtype, alignment: bool
) -> None:
    params = tuple((f"p{number}", (number + 2, 3)) for number in range(7))  # more than ranks
    job = Job(world_size=4, groups=(params,), tied={}, round_robin=True)
    check(replace(job, alignment=alignment, dtype=dtype), 3, tmp_path)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_another_precision_weights_are_those_of_the_masters(
    tmp_path: Path, stage: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    job = Job(stage=stage, dtype=dtypes[0], frozen=())  # of frozen weights there are no masters
    check(job, 3, tmp_path, dtype=dtypes[1])


@pytest.mark.parametrize("stage", [1, 3])
def test_the_size_is_known_beforehand(tmp_path: Path, stage: int) -> None:
    """Also where ranks have two digits, which makes names longer, and so the files."""
    write(Job(stage=stage, world_size=3), tmp_path / "run")
    plan = streamshard.plan_repartition(tmp_path / "run", tmp_path / "out", world_size=12)
    plan.run()
    sizes = [path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert (plan.report.files, plan.report.bytes_written) == (len(sizes), sum(sizes))


@settings(max_examples=25, deadline=None)
@given(SIZES, st.data())
def test_any_job(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], data: st.DataObject
) -> None:
    params = [(f"p{number}", tuple(shape)) for number, shape in enumerate(sizes)]
    cut = data.draw(st.integers(0, len(params) - 1))
    stage = data.draw(st.integers(1, 3))
    job = Job(
        stage=stage,
        world_size=data.draw(st.integers(1, 6)),
        groups=tuple(tuple(part) for part in (params[:cut], params[cut:]) if part),
        tied={},
        round_robin=stage < 3 and data.draw(st.booleans()),
        alignment=stage < 3 and data.draw(st.booleans()),
        sub_group_size=data.draw(st.sampled_from([1, 4, 9, 10**9])),
        muon=data.draw(st.sampled_from([(), (0,), (1,), (0, 1)])),
        offload=data.draw(st.booleans()),
    )
    check(job, data.draw(st.integers(1, 6)), tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("other", ["old.weight", "embed.weight"])
def test_weights_of_one_storage_stay_so_though_no_tie_is_recorded(
    tmp_path: Path, other: str
) -> None:
    run = write(Job(), tmp_path / "run")
    file = Path(TAG) / "mp_rank_00_model_states.pt"
    edit(run / file, lambda held: held["module"].update(twin=held["module"][other]))
    streamshard.repartition(run, tmp_path / "out", world_size=3)
    module = load(tmp_path / "out" / file)["module"]
    assert module["twin"].data_ptr() == module[other].data_ptr()

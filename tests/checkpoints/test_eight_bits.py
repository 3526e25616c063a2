"""States of 8 bits, as engines with bitsandbytes saved them: see `tests/oracle/eight_bits.py`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import streamshard
from streamshard.cli.text.inspect_text import inspection_text
from streamshard.cli.text.report_text import resize_fact, target_text
from streamshard.errors import DisagreementError, SourceError, UnsupportedError
from tests.fabricated import edit, load, save, wrapped
from tests.oracle.eight_bits import ALIKE, ASKEW, CUTS, differences, place, unpacked

States = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("eight-bits"))


@pytest.mark.parametrize(("source", "target"), [*zip(CUTS, (*CUTS[1:], CUTS[0]), strict=True)])
def test_what_is_cut_for_other_ranks_is_what_their_engine_saved(
    source: tuple[int, int], target: tuple[int, int], runs: Path, tmp_path: Path
) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    streamshard.repartition(
        place(runs, source), out, world_size=target[1], zero_stage=target[0], verify=True
    )
    if any({source, target} <= alike for alike in ALIKE):
        assert differences(out, place(runs, target)) == []
    streamshard.repartition(out, back, world_size=source[1], zero_stage=source[0])
    assert differences(back, place(runs, source)) == []


def test_a_store_gives_back_what_was_saved(runs: Path, tmp_path: Path) -> None:
    store, run = tmp_path / "store.zarr", place(runs, (3, 2))
    report = streamshard.convert(run, store, verify=True)
    assert resize_fact(report)[1].endswith("-> any that divides no block of 256 elements")
    assert streamshard.verify(store, against=run).is_good
    streamshard.repartition(store, tmp_path / "out")
    assert differences(tmp_path / "out", run) == []


def test_each_parameter_has_the_scales_of_its_blocks(runs: Path) -> None:
    run = place(runs, (2, 2))
    with streamshard.open(run) as ckpt:
        states = ckpt["down.weight"].tensors
        assert (states["state1"].shape, states["absmax1"].shape) == ((32, 96), (12,))
        found = states["absmax1"][...]
    shown = inspection_text(streamshard.inspect(run, params=["down.weight"]), verbose=False)
    assert re.search(r"^1 +blocks 0 to 12 .* - +- +- +[\d,]+ +[\d,]+ +-$", shown, re.MULTILINE)
    assert re.search(r"^1 +0 to 3,072 ", shown, re.MULTILINE)
    scales = torch.cat([quantised(one)["absmax1"] for one in optimizers(run)])
    assert np.array_equal(found, scales[24:])


def test_what_would_divide_a_block_is_refused_with_what_would_not(
    runs: Path, tmp_path: Path
) -> None:
    run = place(runs, (2, 2))
    told = rf"{run}: .* block of 256, but each of 8 ranks has 1,152 elements of group 0\. "
    with pytest.raises(UnsupportedError, match=told) as error:
        streamshard.repartition(run, tmp_path / "out", world_size=8)
    fitting = [n for n in range(1, 37) if 9216 % (256 * n) == 0]
    listed = ", ".join(map(str, fitting))
    assert f"At ZeRO stage 2 it can be cut for {listed} data-parallel ranks. Or" in str(error.value)
    for ranks in fitting[-2:]:
        streamshard.repartition(run, tmp_path / f"{ranks}", world_size=ranks)
    told = r"each of 8 ranks has 384 elements of 'down.weight'\. "
    with pytest.raises(UnsupportedError, match=told):
        streamshard.repartition(run, tmp_path / "out", world_size=8, zero_stage=3)


@pytest.mark.parametrize("form", ["universal", "dcp"])
def test_forms_that_hold_no_blocks_are_refused(form: str, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="only files of ZeRO and stores hold"):
        streamshard.export(place(runs, (2, 2)), tmp_path / "out", format=form)


@pytest.mark.parametrize("cut", ASKEW)
def test_where_the_source_divides_blocks_the_weights_are_read(
    cut: tuple[int, int], runs: Path, tmp_path: Path
) -> None:
    run = place(runs, cut)
    store = tmp_path / "store.zarr"
    report = streamshard.convert(run, store, verify=True)
    assert resize_fact(report) == ("world size", f"8 -> 8, ZeRO stage {cut[0]}")
    assert target_text(report) == f"{store} (Zarr store)"
    told = "States that cannot be cut for other ranks were compared as each rank has them."
    assert told in streamshard.diff(run, store).notes
    for source in (run, store):
        with pytest.raises(UnsupportedError, match="quantised again, with a loss"):
            streamshard.repartition(source, tmp_path / "out", world_size=2)
    streamshard.repartition(store, tmp_path / "same", verify=True)
    assert differences(tmp_path / "same", run) == []
    for file in run.glob("*/*optim_states.pt"):
        kept = tmp_path / "same" / file.relative_to(run)
        assert kept.read_bytes() == file.read_bytes()
    edit(sorted((tmp_path / "same").glob("*/*optim_states.pt"))[-1], with_another_code)
    assert not streamshard.verify(tmp_path / "same", against=run).is_good
    verified = streamshard.verify(run)
    assert verified.is_good
    reason = "Not all of the optimizer's state can be cut for other ranks: "
    assert [note for note in verified.notes if note.startswith(reason)]
    streamshard.export(run, tmp_path / "model")
    saved = optimizers(run)
    masters = [
        one.get("fp32_flat_groups") or one["single_partition_of_fp32_groups"] for one in saved
    ]
    with streamshard.open(run) as ckpt:
        assert {*ckpt["up.weight"].tensors} <= {"fp32", "module"}
        norm = ckpt["norm.weight"].tensors
        wanted = torch.cat([own[1].detach() for own in masters])
        assert np.array_equal(norm["fp32"][...], wanted)
        wanted = torch.cat([quantised(one, group=1)["state1"] for one in saved])
        assert np.array_equal(norm["state1"][...], wanted)


def test_sub_groups_that_are_not_all_in_8_bits_do_not_hide_the_weights(
    runs: Path, tmp_path: Path
) -> None:
    """An optimizer keeps sub-groups below its `min_8bit_size` in 32 bits."""
    run = tmp_path / "run"
    config = tmp_path / "ds.json"
    zero = {"stage": 3, "sub_group_size": 3000}
    config.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}))
    streamshard.repartition(place(runs, (2, 2)), run, world_size=2, ds_config_file=config)

    def in_32_bits(held: dict[str, Any]) -> None:
        state = wrapped(held["optimizer_state_dict"])
        assert state["param_groups"][0]["params"] == [0, 1]
        numel = len(state["state"][1]["state1"])
        state["state"][1] = {"state1": torch.zeros(numel), "state2": torch.ones(numel)}

    for file in run.glob("*/*optim_states.pt"):
        edit(file, in_32_bits)
    streamshard.export(run, tmp_path / "model")
    with pytest.raises(UnsupportedError, match=rf"{run}.*: some sub-groups .* are in 8 bits, and"):
        streamshard.repartition(run, tmp_path / "out", world_size=4)


def with_another_code(held: dict[str, Any]) -> None:
    quantised(held["optimizer_state_dict"])["state1"][-1] ^= 1


def optimizers(run: Path) -> list[dict[str, Any]]:
    return [load(file)["optimizer_state_dict"] for file in sorted(run.glob("*/*optim_states.pt"))]


def quantised(optimizer: dict[str, Any], group: int = 0) -> States:
    found: States = wrapped(optimizer)["state"][group]["__bnb_optimizer_quant_state__"]
    return found


def shorter(states: States) -> None:
    states["absmax1"] = states["absmax1"][:-1].clone()


def in_16_bits(states: States) -> None:
    states["absmax1"] = states["absmax1"].bfloat16()


def without_table(states: States) -> None:
    del states["qmap2"]


def short_table(states: States) -> None:
    states["qmap2"] = states["qmap2"][:16].clone()


def signed(states: States) -> None:
    states["state1"] = states["state1"].view(torch.int8)


def other_table(states: States) -> None:
    states["qmap1"] = states["qmap1"] * 2


@pytest.mark.parametrize(
    ("change", "is_everywhere", "kind", "message"),
    [
        (shorter, False, UnsupportedError, r"'absmax1' of group 0 has shape \(17,\) for 4608"),
        (in_16_bits, True, UnsupportedError, "'absmax1' of group 0 has shape"),
        (without_table, True, UnsupportedError, "'state2' of group 0 holds codes of uint8"),
        (short_table, True, UnsupportedError, r"'qmap2' of group 0 has shape \(16,\)"),
        (signed, True, UnsupportedError, "'state1' of group 0 has shape"),
        (other_table, False, DisagreementError, "'qmap1' of group 0"),
    ],
)
def test_states_of_another_form_are_refused(
    change: Callable[[States], None],
    is_everywhere: bool,
    kind: type[SourceError],
    message: str,
    tmp_path: Path,
) -> None:
    run = place(unpacked(tmp_path / "kept"), (2, 2))
    for file in sorted(run.glob("*/*optim_states.pt"))[0 if is_everywhere else 1 :]:
        edit(file, lambda held: change(quantised(held["optimizer_state_dict"])))
    with pytest.raises(kind, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=4)


def test_dumps_are_cut_as_files_are(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for rank, optimizer in enumerate(optimizers(place(runs, (2, 2)))):
        save(optimizer, tmp_path / "saved" / f"optimizer.{rank}.pt")
    source, target = (f"{tmp_path / name}/optimizer.{{rank}}.pt" for name in ("saved", "out"))
    streamshard.repartition(source, target, world_size=4)
    for rank, wanted in enumerate(optimizers(place(runs, (2, 4)))):
        found = wrapped(load(tmp_path / "out" / f"optimizer.{rank}.pt"))["state"][0]
        for key, value in quantised(wanted).items():
            assert torch.equal(found[key], value)

"""How parameters are cut, as lists of patterns tell it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import merge_tp_slices
from torch import Tensor

import streamshard
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    StreamshardError,
    UnsupportedError,
    UsageError,
)
from streamshard.formats.deepspeed.model_parallel.cuts_in_files import Categories
from streamshard.formats.deepspeed.model_parallel.stated_cuts import NamePatterns
from streamshard.layout.model_cut import ModelCut
from tests.comparing import compare
from tests.fabricated import write
from tests.fabricated_parts import TensorJob, edit_parts, with_degree
from tests.job import TAG

Info = dict[str, Any]
NAME = "language_model.encoder.layers.11.mlp.weight"
LAYERS = r"language_model.encoder.layers.\d+."
"""As Megatron-DeepSpeed begins its patterns."""
MLP = f"{LAYERS}mlp"
REPLICATED = "tp_replicated_parameter_patterns"
ROWS = "parameter_with_row_parallelism_patterns"
HALVES = "parameter_with_2_sub_params_cat_dim_0"
WIDTHS = "sub_param_shard_widths"
UNSUPPORTED = "autotp_unsupported_parameter_patterns"
VERSION = "universal_checkpoint_version"
EQUAL = {0: (4, 2), 1: (4, 2)}


def subs(shape: tuple[Any, ...], dimension: int) -> Info:
    entry = {"patterns": [MLP], "shape": shape, "partition_dim": dimension}
    return {"parameter_with_sub_params": [entry]}


def widths(*of_subs: list[int]) -> Info:
    return {VERSION: 0.4, WIDTHS: {MLP: list(of_subs)}}


CUTS: dict[str, tuple[Info, list[tuple[int, ...]]]] = {
    "replicated": ({REPLICATED: [f"{MLP}.weight"]}, [(3, 2)] * 3),
    "default": ({REPLICATED: ["other"]}, [(3, 2), (1, 2), (4, 2)]),
    "rows": ({ROWS: [MLP]}, [(3, 2), (3, 1), (3, 4)]),
    "halves": ({HALVES: [MLP]}, [(4, 2), (2, 2)]),
    "widths": (subs(((5, 3), 2), 0) | widths([3, 2], [1, 2]), [(4, 2), (4, 2)]),
    "widths in a view": (
        subs(((5, 3), -1), 0) | widths([3, 2], [1, 2]),
        [(4, 2, 3), (4, 2, 3)],
    ),
    "widths of columns": (
        subs((-1, (3, 3)), 1) | widths([1, 1, 1], [2, 0, 1]),
        [(2, 3), (2, 1), (2, 2)],
    ),
    "an early count": (subs((3, -1), 0), [(6, 2), (6, 2)]),
    "early sizes": (subs(((4, 2), 3), 0), [(3, 3), (3, 3)]),
}


@pytest.mark.parametrize("name", CUTS)
def test_parts_are_put_together_as_deepspeed_does(tmp_path: Path, name: str) -> None:
    info, shapes = CUTS[name]
    shards = [torch.rand(shape) for shape in shapes]
    if name == "replicated":
        shards = shards[:1] * len(shards)
    for rank, shard in enumerate(shards):
        place = tmp_path / "slices" / NAME / str(rank)
        place.mkdir(parents=True)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save(shard.flatten(), place / f"{state}.00")
    (tmp_path / "merged" / NAME).mkdir(parents=True)
    both = str(tmp_path / "merged"), str(tmp_path / "slices")
    merge_tp_slices(info, *both, len(shards), (NAME, list(map(torch.Size, shapes))))
    wanted = torch.load(tmp_path / "merged" / NAME / "fp32.pt", weights_only=False)["param"]

    cut = Categories(info).cut(NAME, dict(enumerate(shapes)), len(shapes))
    assert torch.equal(put_together(cut, shards).flatten(), wanted.flatten())


def put_together(cut: ModelCut, shards: list[Tensor]) -> Tensor:
    whole = torch.full(cut.shape, torch.nan)
    columns = cut.rank.tolist(), cut.whole.tolist(), cut.local.tolist(), cut.sizes.tolist()
    for rank, at, own, sizes in zip(*columns, strict=True):
        shape = cut.shards[rank]
        assert shape is not None
        whole[box(at, sizes)] = shards[rank].view(shape)[box(own, sizes)]
    return whole


def box(corner: list[int], sizes: list[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(corner, sizes, strict=True))


def test_a_vocabulary_keeps_its_padding() -> None:
    """DeepSpeed cuts it off and adds zeros: its rows are trained with all others."""
    info = {
        "vocabulary_parameter_patterns": [NAME],
        "original_vocab_size": 5,
        REPLICATED: ["other"],
    }
    assert Categories(info).cut(NAME, EQUAL, 2).shape == (8, 2)


OTHER = {0: (4, 2), 1: (2, 2)}
NOT_SO = "is [4, 2] and [2, 2] on its ranks, which is not how 'universal_checkpoint_info' has it"
TWICE = {REPLICATED: [MLP, f"{MLP}.weight"]}
NO_SHAPE = {"parameter_with_sub_params": [{"patterns": [NAME], "partition_dim": 0}]}
SUBS = subs(((5, 3), 2), 0)
NO_WIDTHS = "does not have its widths on 2 ranks"
Refusal = tuple[Info, Mapping[int, tuple[int, ...]], type[StreamshardError], str]
REFUSED: dict[str, Refusal] = {
    "averaged": ({"parameter_to_average_patterns": [NAME]}, OTHER, DisagreementError, NOT_SO),
    "unsupported": (
        {UNSUPPORTED: {MLP: "odd"}},
        EQUAL,
        UnsupportedError,
        "cannot be re-cut: 'odd'",
    ),
    "version": (
        {VERSION: 0.5},
        EQUAL,
        UnsupportedError,
        "0.5, not 0.4 or earlier; use a newer str",
    ),
    "two patterns": (TWICE, EQUAL, DisagreementError, "is matched by several patterns"),
    "another shape": ({REPLICATED: [NAME]}, OTHER, DisagreementError, NOT_SO),
    "both": ({}, {0: (4, 2), 1: (4, 3)}, DisagreementError, "[4, 2] and [4, 3]"),
    "rows": ({ROWS: [NAME]}, {0: (4,), 1: (4,)}, DisagreementError, "(cut along dimension 1)"),
    "odd halves": (
        {HALVES: [NAME]},
        {0: (3, 2), 1: (3, 2)},
        DisagreementError,
        "(parts of 4 in a dimension of 6)",
    ),
    "a rank without it": ({}, {1: (4, 2)}, UnsupportedError, "is on 1 of the 2"),
    "no widths": (subs((3, -1), 0) | {VERSION: 0.4}, EQUAL, DisagreementError, NO_WIDTHS),
    "of 3 ranks": (SUBS | widths([3, 1, 1], [1, 1, 1]), EQUAL, DisagreementError, NO_WIDTHS),
    "widths below 0": (SUBS | widths([6, -1], [1, 2]), EQUAL, CorruptFileError, "are not sizes"),
    "an early uneven one": (SUBS, EQUAL, DisagreementError, "of [5, 3] on 2 ranks, in unequal par"),
    "another view": (subs(((4, 4), 3), 0), EQUAL, CorruptFileError, "has 16 elements, and not the"),
    "no shape": (NO_SHAPE, EQUAL, CorruptFileError, "no shape and dimension of one"),
    "a list of widths": ({WIDTHS: [[1, 2]]}, EQUAL, CorruptFileError, f"'{WIDTHS}' is"),
    "a list of reasons": ({UNSUPPORTED: ["a"]}, EQUAL, CorruptFileError, "not a dict by patterns"),
    "sizes that are none": (subs(("a", -1), 0), EQUAL, CorruptFileError, "are not sizes"),
    "no list": ({REPLICATED: "all"}, EQUAL, CorruptFileError, "is 'all', not a list of patterns"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_lists_do_not_tell_is_refused(name: str) -> None:
    info, shapes, kind, message = REFUSED[name]
    with pytest.raises(kind, match=re.escape(message)):
        Categories(info).cut(NAME, shapes, 2)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "a{1,9}", "x|y", "^", r"\d+.\d+.\w*.*", "[a-z", "a**", "\\", r"\1", "a" * 600],
)
def test_a_pattern_that_may_run_for_ever_is_not_run(pattern: str) -> None:
    with pytest.raises(UnsupportedError, match="is not a pattern of names that is run here"):
        NamePatterns({pattern: 1})


def test_patterns_match_from_the_beginning_as_those_of_deepspeed() -> None:
    found = NamePatterns({r"^a\.b$": 1, r"\d+.norm": 2, "[xyz]?q": 3})
    names = ["a.b", "axb", "a.b.c", "12.norm.weight", "0xnorm", "a.12.norm", "xq", "wq"]
    assert [found.find(name) for name in names] == [1, None, None, 2, 2, None, 3, None]
    with pytest.raises(UnsupportedError, match="a name of 600 characters"):
        found.find("a" * 600)


LISTED = TensorJob(parts=2, world_size=3, in_lists=True).told()
RULES_OF_LISTED = r"""
embed\.weight: split 0
block\.0\.attn.weight: split 1
block\.0\.mlp: split 2
block\.0\.bias: split 0
embed\.bias: replicated
block\.1\.bias: replicated
old.*: replicated
"""


def test_a_tensor_that_no_list_has_may_not_be_the_same_on_all_ranks(tmp_path: Path) -> None:
    run, out = write(LISTED, tmp_path / "run"), tmp_path / "out"
    unlisted = f"^{re.escape('block.1.bias')}$"
    edit_parts(run, lambda held: held["universal_checkpoint_info"][REPLICATED].remove(unlisted))
    message = r"'block\.1\.bias' is the same on all ranks, and no list says"
    with pytest.raises(UnsupportedError, match=message):
        streamshard.repartition(run, out, world_size=2, tensor_parallel=1)
    with pytest.raises(UnsupportedError, match=message):
        streamshard.export(run, out)
    # What the message advises.
    rules = tmp_path / "cut.rules"
    rules.write_text(RULES_OF_LISTED)
    streamshard.repartition(
        run, out, world_size=2, tensor_parallel=1, facts={"source": {"cut_rules": rules}}
    )
    whole = write(with_degree(LISTED, 1, 2), tmp_path / "whole")
    compare(out / TAG, whole / TAG)
    # A reference finds out that it is a copy.
    with pytest.raises(DisagreementError, match=r"'block\.1\.bias' is not the same tensor as in"):
        streamshard.repartition(run, tmp_path / "none", world_size=2, tensor_parallel=1, like=whole)


def test_a_part_may_be_the_same_on_all_ranks_where_a_reference_says_that_it_is_one(
    tmp_path: Path,
) -> None:
    cuts = {**LISTED.cuts, "block.1.bias": (0, (4,))}
    groups = tuple(
        tuple((name, (4,) if name == "block.1.bias" else shape) for name, shape in group)
        for group in LISTED.groups
    )
    job = replace(LISTED, cuts=cuts, groups=groups, client_state={}, constant="block.1.bias").told()
    run, out = write(job, tmp_path / "run"), tmp_path / "out"
    whole = write(with_degree(job, 1, 2), tmp_path / "whole")
    with pytest.raises(UnsupportedError, match="is the same on all ranks"):
        streamshard.export(run, tmp_path / "exported")
    streamshard.repartition(run, out, world_size=2, tensor_parallel=1, like=whole)
    compare(out / TAG, whole / TAG)
    streamshard.export(out, tmp_path / "exported")


def test_equal_parts_too_are_cut_as_the_job_cuts_them(tmp_path: Path) -> None:
    """Which rule AutoTP takes for widths depends on names that files do not keep."""
    run = write(with_degree(LISTED, 4, 2), tmp_path / "run")
    with pytest.raises(UsageError, match=r"tensor_parallel=2 .* like=RUN as well"):
        streamshard.repartition(run, tmp_path / "out", world_size=8, tensor_parallel=2)


# Parameters that files list as ones to be averaged ------------------------------------------------


def average_what_is_replicated(content: dict[str, Any]) -> None:
    told = content["universal_checkpoint_info"]
    averaged = [p for p in told[REPLICATED] if "bias" in p and "old" not in p]
    told["parameter_to_average_patterns"] = averaged
    told[REPLICATED] = [p for p in told[REPLICATED] if p not in averaged]


def test_copies_to_be_averaged_that_differ_are_refused(tmp_path: Path) -> None:
    job = replace(LISTED, changed=("fp32", "block.1.bias", 1), changed_by=1000)
    run, store, out = write(job, tmp_path / "run"), tmp_path / "run.zarr", tmp_path / "out"
    edit_parts(run, average_what_is_replicated)
    streamshard.convert(run, store, codec="zstd")
    message = r"of block\.1\.bias: 1 of 2 elements differ.*list it as one whose mean counts"
    for source in (run, store):
        with pytest.raises(DisagreementError, match=message):
            streamshard.repartition(source, out, tensor_parallel=1, world_size=2)
        with pytest.raises(DisagreementError, match=message):
            streamshard.export(source, out)
    assert not out.exists()


def test_copies_that_are_equal_need_no_mean(tmp_path: Path) -> None:
    """NaNs with a payload and negative zeros stay as they are."""
    run, out = write(LISTED, tmp_path / "run"), tmp_path / "out"
    wanted = write(with_degree(LISTED, 1, 2), tmp_path / "wanted")
    edit_parts(run, average_what_is_replicated)
    streamshard.repartition(run, out, tensor_parallel=1, world_size=2)
    compare(out / TAG, wanted / TAG)

"""How parameters are cut: by a file of rules."""

import re
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.errors import DisagreementError, StreamshardError, UnsupportedError, UsageError
from streamshard.formats.deepspeed.model_parallel.stated_cuts import CutRules
from tests.comparing import compare
from tests.documents import blocks, page
from tests.fabricated import write
from tests.fabricated_parts import TensorJob, edit_parts, with_degree
from tests.job import TAG, Job

RULES = r"""
# Each as the job's own code cuts it.
embed\.weight: split 0
block\.\d+\.attn.weight: split 1
block.0.mlp: sub 2 [4, 8]

block.0.bias: split 0
embed\.bias:replicated
block.1.bias: replicated
old.*: replicated
"""
TWO = TensorJob(
    parts=2,
    world_size=3,
    groups=(
        (("embed.weight", (11, 4)), ("block.0.attn.weight", (6, 9)), ("block.0.mlp", (3, 2, 12))),
        (("embed.bias", (1,)), ("block.0.bias", (7,)), ("block.1.bias", (2,))),
    ),
    cuts={
        "embed.weight": (0, (11,)),
        "block.0.attn.weight": (1, (9,)),
        "block.0.mlp": (2, (4, 8)),
        "block.0.bias": (0, (7,)),
    },
).told()


def cuts(rules: Path) -> dict[str, Any]:
    return {"source": {"cut_rules": rules}}


def untold(run: Path) -> Path:
    """Take away what model files tell of the cut."""
    edit_parts(run, lambda held: held.pop("universal_checkpoint_info", None))
    return run


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "cut.rules"
    path.write_text(RULES)
    return path


@pytest.mark.parametrize("degree", [1, 4])
def test_a_job_that_cuts_its_layers_itself_changes_its_degree(
    tmp_path: Path, rules: Path, degree: int
) -> None:
    run = untold(write(TWO, tmp_path / "run"))
    wanted = untold(write(with_degree(TWO, degree, 1), tmp_path / "wanted"))
    options: dict[str, Any] = {"facts": cuts(rules), "world_size": degree}
    if degree > 1:
        with pytest.raises(UsageError, match="say here like=RUN as well"):
            streamshard.repartition(run, tmp_path / "out", tensor_parallel=degree, **options)
        options["like"] = wanted
    streamshard.repartition(run, tmp_path / "out", tensor_parallel=degree, verify=True, **options)
    compare(tmp_path / "out" / TAG, wanted / TAG)
    options |= {"like": run, "world_size": 6}
    streamshard.repartition(tmp_path / "out", tmp_path / "back", tensor_parallel=2, **options)
    compare(tmp_path / "back" / TAG, run / TAG)


def test_rules_put_whole_tensors_together(tmp_path: Path, rules: Path) -> None:
    run = untold(write(TWO, tmp_path / "run"))
    whole = write(with_degree(TWO, 1, 3), tmp_path / "whole")
    with pytest.raises(
        UnsupportedError,
        match=r"give facts=FILE, a file with the lines \[source\] and cut_rules = ",
    ):
        streamshard.export(run, tmp_path / "none")
    streamshard.export(run, tmp_path / "a", facts=cuts(rules))
    streamshard.export(whole, tmp_path / "b")
    found, wanted = ((tmp_path / out / "model.safetensors").read_bytes() for out in "ab")
    assert found == wanted


def test_rules_take_the_place_of_what_files_tell(tmp_path: Path, rules: Path) -> None:
    run, wrong = write(TWO, tmp_path / "run"), tmp_path / "wrong"
    wrong.write_text(RULES.replace("attn.weight: split 1", "attn.weight: replicated"))
    with pytest.raises(DisagreementError, match=r"which is not how .*wrong has it"):
        streamshard.export(run, tmp_path / "out", facts=cuts(wrong))
    streamshard.export(run, tmp_path / "out", facts=cuts(rules))


def test_rules_in_the_page_are_rules() -> None:
    (shown,) = (block for block in blocks(page("parallelism"), "text") if "replicated" in block)
    rules = CutRules(shown, "cut.rules")
    for name, shape, whole in (
        ("layers.0.norm.weight", (8,), (8,)),
        ("embed.weight", (16, 8), (32, 8)),
        ("layers.0.attn.qkv.weight", (3072, 8), (6144, 8)),
        ("layers.10.attn.dense.weight", (8, 4), (8, 8)),
    ):
        assert rules.cut(name, {0: shape, 1: shape}, 2).shape == whole


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("embed: whole", "line 2: 'embed: whole' is no rule"),
        ("embed", "line 2: 'embed' is no rule"),
        (": split 0", "line 2: ': split 0' is no rule"),
        ("embed: split", "is no rule"),
        ("embed: sub 0 []", "is no rule"),
        ("embed: sub 0 4, 8", "is no rule"),
        ("(a|b)+: split 0", "is not a pattern of names that is run here"),
    ],
)
def test_lines_that_are_no_rules_are_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        CutRules(f"# rules\n{line}\n", "cut.rules")


BOTH = {0: (2,), 1: (2,)}


@pytest.mark.parametrize(
    ("rule", "shards", "kind", "message"),
    [
        ("other: split 0", BOTH, UsageError, "cut.rules: no rule is for 'a'"),
        ("a: split 1", BOTH, DisagreementError, "(cut along dimension 1)"),
        ("a: sub 0 [3, 1]", BOTH, DisagreementError, "[3, 1] on 2 ranks, in unequal"),
        ("a: sub 0 [4]", {0: (3,), 1: (3,)}, DisagreementError, "(parts of 4 in a dimension of 6)"),
        ("a: replicated", {0: (3,), 1: (2,)}, DisagreementError, "is [3] and [2] on its ranks"),
        ("a: split 0", {1: (3,)}, UnsupportedError, "is on 1 of the 2 tensor-parallel ranks"),
        ("a: split 0\na.*: split 0\n.: split 0", BOTH, UsageError, "match 'a': 'a' and 'a.*'; lea"),
        ("^a$: split 0\n\\S: split 0", BOTH, UsageError, r"match 'a': '^a$' and '\S'; leave one"),
        ("^a$: split 0\n^a$: split 1", BOTH, UsageError, "'a' is matched by two patterns; leave"),
    ],
)
def test_rules_that_do_not_fit_are_refused(
    rule: str, shards: dict[int, tuple[int, ...]], kind: type[StreamshardError], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        CutRules(rule, "cut.rules").cut("a", shards, 2)


def test_rules_that_nothing_is_cut_by_are_refused(tmp_path: Path, rules: Path) -> None:
    run, out = write(TWO, tmp_path / "run"), tmp_path / "out"
    single = write(Job(), tmp_path / "single")
    message = "source.cut_rules given with facts=: no tensor is cut otherwise, or put together"
    for degree in (None, 2):
        with pytest.raises(UsageError, match=message):
            streamshard.repartition(
                run,
                out,
                world_size=2,
                facts=cuts(rules),
                tensor_parallel=degree,
            )
    with pytest.raises(UsageError, match=message):
        streamshard.export(single, out, facts=cuts(rules))
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            streamshard.export(run, out, facts=cuts(path))
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is no text in UTF-8"):
        streamshard.export(run, out, facts=cuts(tmp_path / "binary"))

"""A stranger's checkpoint: nothing of it runs, and nothing in it takes memory or time at will."""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from streamshard.formats.deepspeed.names import FLAT_GROUPS
from tests.cli.conftest import streamshard, tree
from tests.cli.hostile import (
    MIB,
    MODEL,
    OPTIMIZER,
    Content,
    Payload,
    in_itself,
    laughs,
    levels,
    optimizer_files,
    with_pickle,
)
from tests.fabricated import edit, load, write
from tests.job import EXPERTS, TAG, Job

# Payloads -----------------------------------------------------------------------------------------


def test_payloads_are_carried_and_never_run(run: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    edit(run / MODEL, lambda content: content.update(notes=Payload(marker)))
    for path in optimizer_files(run):
        edit(path, lambda c: c["optimizer_state_dict"].update(extra={"deep": [Payload(marker)]}))
    store = tmp_path / "x.zarr"
    for verb, *arguments in (
        ("inspect", run),
        ("inspect", run, "--json"),
        ("convert", run, store),
        ("inspect", store),
        ("repartition", run, tmp_path / "out", "--world-size", 3),
        ("repartition", store, tmp_path / "again", "--world-size", 3),
    ):
        done = streamshard(str(verb), *arguments)
        assert done.code == 0, done.err
        assert "DANGER: the training state calls posix.system" in " ".join(done.out.split())
    for source in (run, store):
        done = streamshard("verify", source)
        assert done.code == 0, done.err
        assert "DANGER: the training state calls" in " ".join(done.out.split())
    assert streamshard("verify", run, "--against", store).code == 0
    assert not marker.exists()
    assert tree(tmp_path / "out") == tree(tmp_path / "again")
    load(tmp_path / "out" / MODEL)
    assert marker.exists()  # it was a payload all the time


# Bombs --------------------------------------------------------------------------------------------


def state_of(content: Content) -> Content:
    state: Content = content["optimizer_state_dict"]
    return state


def groups_of(content: Content) -> list[Content]:
    groups: list[Content] = state_of(content)["base_optimizer_state"]["param_groups"]
    return groups


def states_of(content: Content) -> Content:
    states: Content = state_of(content)["base_optimizer_state"]["state"][0]
    return states


def many_states(content: Content) -> None:
    states = states_of(content)
    states.update({f"state{n}": states["exp_avg"] for n in range(10_000)})


def many_units(content: Content) -> None:
    unit = OrderedDict((f"layer{n}", torch.Size([3])) for n in range(3000))
    content["param_shapes"] = [unit] * 3000


def many_slices(content: Content) -> None:
    (first, *_) = state_of(content)["param_slice_mappings"]
    one = next(iter(first.values()))
    large = OrderedDict((f"layer{n}", one) for n in range(3000))
    state_of(content)["param_slice_mappings"] = [large] * 3000


def a_slice_of_halves(content: Content) -> None:
    (first, *_) = state_of(content)["param_slice_mappings"]
    next(iter(first.values())).numel = 1.5


def many_members(content: Content) -> None:
    groups = groups_of(content)
    groups[0]["params"] = list(range(10_000))
    groups[1:] = [groups[0]] * 10_000


def tied_to_a_number(content: Content) -> None:
    content["module"]["extra"] = 7
    content["shared_params"] = {"head.weight": "extra"}


HUGE = torch.Size([1 << 40, 1 << 40])
SMALL = torch.Size([3])


class Kept:
    """Holds what every entry of a file shares."""

    def __init__(self, value: list[object]) -> None:
        self.value = value


KEPT = Kept([*range(20_000)])


@dataclass(frozen=True)
class Bomb:
    """Something in a file that would go off in a reader that trusts it."""

    name: str
    file: str
    do: Callable[[Content], object]
    says: str = "holds containers"


BOMBS = [
    Bomb("hyper-parameters", OPTIMIZER, lambda c: groups_of(c)[0].update(betas=laughs())),
    Bomb("a ring", OPTIMIZER, lambda c: groups_of(c)[0].update(x=in_itself())),
    Bomb("states", OPTIMIZER, many_states, "states of one group"),
    Bomb("members", OPTIMIZER, many_members),
    Bomb("slices", OPTIMIZER, many_slices),
    Bomb("partition count", OPTIMIZER, lambda c: state_of(c).update(partition_count=laughs())),
    Bomb("paddings", OPTIMIZER, lambda c: state_of(c).update(group_paddings=laughs())),
    Bomb("stage", OPTIMIZER, lambda c: state_of(c).update(zero_stage=laughs())),
    Bomb("masters", OPTIMIZER, lambda c: state_of(c).update({FLAT_GROUPS: laughs()})),
    Bomb("shapes", MODEL, many_units),
    Bomb("a shape", MODEL, lambda c: c["param_shapes"][0].update({"embed.weight": laughs()})),
    Bomb("buffers", MODEL, lambda c: c.update(buffer_names=laughs())),
    Bomb("config", MODEL, lambda c: c["ds_config"].update(zero_optimization=laughs())),
    Bomb("module", MODEL, lambda c: c["module"].update({"embed.weight": laughs()})),
    Bomb("tied names", MODEL, lambda c: c.update(shared_params={"a": laughs()})),
    Bomb("world size", MODEL, lambda c: c.update(dp_world_size=laughs()), "a list of 2 ranks"),
    Bomb("a huge shape", MODEL, lambda c: c["param_shapes"][0].update(x=HUGE), "is not a shape"),
    Bomb("no name", MODEL, lambda c: c["param_shapes"][0].update({7: SMALL}), "not a name"),
    Bomb("tied to what is not a tensor", MODEL, tied_to_a_number, "not a tensor of its own"),
    Bomb("a slice", OPTIMIZER, a_slice_of_halves, "1.5 long"),
    Bomb("elastic", OPTIMIZER, lambda c: state_of(c).update(base_optimizer_state=laughs())),
]  # fmt: skip


def require_refused(run: Path, says: str, most_bytes: int = 150 * MIB) -> None:
    """Require a short message and little memory; what is there is shown, and called not whole."""
    done = streamshard("inspect", run)
    assert done.code == 3, done.err
    assert not done.out or ", NOT WHOLE\n" in done.out
    assert len(done.out) < 2_000
    assert says in done.err
    assert str(run) in done.err
    assert len(done.err) < 700
    assert done.own_bytes < most_bytes


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.name)
def test_bombs_do_not_go_off(bomb: Bomb, run: Path) -> None:
    for path in optimizer_files(run) if bomb.file == OPTIMIZER else [run / bomb.file]:
        edit(path, bomb.do)
    require_refused(run, bomb.says)


NESTED = {
    "itself": (in_itself(), "holds containers"),
    "laughs": (laughs(), "holds containers"),
    "a long number": (10**5000, "an integer of 16,610 bits"),
    "levels": (levels(300), "holds containers"),
}


@pytest.mark.parametrize("name", NESTED)
def test_what_all_ranks_carry_is_compared_once(name: str, run: Path, tmp_path: Path) -> None:
    nested, says = NESTED[name]
    for path in optimizer_files(run):
        edit(path, lambda c: state_of(c).update(extra=nested))
    done = streamshard("repartition", run, tmp_path / "out", "--world-size", 3)
    assert (done.code, says in done.err, len(done.err) < 700) == (3, True, True)


def test_a_value_that_is_too_large_is_not_taken_along(run: Path, tmp_path: Path) -> None:
    for path in optimizer_files(run):
        edit(path, lambda c: states_of(c).update(exp_avg=KEPT))
    shown = streamshard("inspect", run)
    assert (shown.code, len(shown.out) < 3_000) == (0, True)
    assert "is not a plain value" in shown.out
    done = streamshard("repartition", run, tmp_path / "out", "--world-size", 3)
    assert (done.code, len(done.err) < 700) == (3, True)
    assert "is not a plain value" in done.err
    assert max(shown.own_bytes, done.own_bytes) < 150 * MIB


def test_what_is_told_of_another_way_to_train_is_quoted_shortly(tmp_path: Path) -> None:
    run = write(Job(stage=3), tmp_path / "run")

    def mics(content: Content) -> None:
        content["ds_config"]["zero_optimization"]["mics_shard_size"] = 2
        content.update({"dp_world_size": laughs()} if "module" in content else {})

    for path in (run / TAG).iterdir():
        edit(path, mics)
    require_refused(run, "2 of a list of 2 ranks saved: trained with MiCS")


def test_what_is_told_where_no_rank_saved_its_part_is_not_spelled_out(run: Path) -> None:
    for path in optimizer_files(run):
        path.unlink()

    def bf16(content: Content) -> None:
        content["ds_config"] = {"bf16": {"enabled": True}}
        content["ds_version"] = laughs()

    edit(run / MODEL, bf16)
    require_refused(run, "no *_optim_states.pt file")


def test_numbers_of_a_config_that_no_float_can_be(run: Path, tmp_path: Path) -> None:
    other = write(Job(stage=3), tmp_path / "other")
    for path in (other / TAG).glob("*optim_states.pt"):
        edit(path, lambda c: c["ds_config"].update(gradient_clipping=10**400))
    done = streamshard("repartition", other, tmp_path / "o", "--world-size", 3, "--zero-stage", 2)
    assert (done.code, "gradient_clipping" in done.err) == (2, True)
    ratio = {"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 10**400}}}
    for path in optimizer_files(run):
        edit(path, lambda c: c["ds_config"].update(ratio))
    require_refused(run, "which is not a part of 1")


def test_files_of_experts_are_held_to_the_same(tmp_path: Path) -> None:
    job = Job(world_size=4, experts=EXPERTS, expert_parallel=2)
    run = write(replace(job), tmp_path / "run")
    (expert, *_) = sorted((run / TAG).glob("layer_*_expert_*_model_states.pt"))
    whole = expert.read_bytes()
    assert streamshard("inspect", run).code == 0
    with_pickle(expert, b"}" * (MIB // 4))
    require_refused(run, expert.name)
    with zipfile.ZipFile(expert, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}, 2))
    require_refused(run, "is compressed")
    expert.write_bytes(whole + b"\0")
    require_refused(run, expert.name)


PICKLES = {
    "tuples in each other": b")" + b"\x85" * 4_000_000 + b".",
    "an extension": b"\x82\x01.",
    "the memo's last place": b"}r\xff\xff\xff\xff.",
    "no end": b"}" * (MIB // 4),
    "no dict": pickle.dumps(["a"], 2),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_that_no_checkpoint_holds(name: str, run: Path) -> None:
    with_pickle(run / OPTIMIZER, PICKLES[name])
    require_refused(run, OPTIMIZER, 10 * MIB + 100 * len(PICKLES[name]))


def test_deep_nesting_that_is_only_carried_is_refused_when_it_is_compared(run: Path) -> None:
    (run / OPTIMIZER).unlink()
    path = run / OPTIMIZER.replace("rank_1", "rank_0")
    with zipfile.ZipFile(path) as archive:
        pickled = next(archive.read(n) for n in archive.namelist() if n.endswith("data.pkl"))
    deep = b"X\x04\x00\x00\x00deep" + b"]" * 100_000 + b"a" * 99_999 + b"s."
    with_pickle(path, pickled.removesuffix(b".") + deep)
    assert streamshard("inspect", run).code == 3


def test_a_batch_that_nobody_has_is_not_divided_up(run: Path) -> None:
    for path in optimizer_files(run):
        config = {"train_batch_size": 10**15 * 3, "train_micro_batch_size_per_gpu": 10**15 - 1}
        edit(path, lambda content: content["ds_config"].update(config))  # noqa: B023
    done = streamshard("repartition", run, run.parent / "out", "--world-size", 3, "-n")
    assert (done.code, "lacks the global batch size" in done.out) == (0, True)

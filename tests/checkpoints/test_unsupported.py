"""What cannot be resharded is refused by name, before anything is written.

Each kind is a fabricated checkpoint that differs from a good one in what a real engine left behind
when it was tried; the engines that run on CPU are asked in `tests/oracle/test_features.py`. The
good ones are read in `test_world_sizes`.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import streamshard
from streamshard.errors import DisagreementError, UnsupportedError, UsageError
from tests.comparing import compare
from tests.fabricated import DUMPS, edit_all, load, wrapped, write, write_dumps
from tests.job import EXPERTS, TAG, Job

Content = dict[str, Any]
Edit = Callable[[Content], object]

STAGE_3 = Job(stage=3, sub_group_size=30)
SAVED_BY_2 = "Resume on the ranks that saved it"


def zero(**settings: object) -> Edit:
    return lambda content: content["ds_config"]["zero_optimization"].update(settings)


def config(**settings: object) -> Edit:
    return lambda content: content["ds_config"].update(settings)


def write_config(place: Path, run_dir: Path, **zero_settings: object) -> Path:
    """Write the config of a job like the one that saved, with other ZeRO settings."""
    kept = load(next((run_dir / TAG).glob("*_optim_states.pt")))["ds_config"]
    kept["zero_optimization"] |= zero_settings
    path = place / "ds.json"
    path.write_text(json.dumps(kept))
    return path


def without_states(*units: int) -> Edit:
    """Leave out the states that an optimizer of its own has."""

    def edit(content: Content) -> None:
        for unit in units:
            del wrapped(content["optimizer_state_dict"])["state"][unit]

    return edit


def join_groups(content: Content) -> None:
    """Have one param group for all flat groups, as a fresh engine has with torch's Adagrad."""
    optimizer = wrapped(content["optimizer_state_dict"])
    first, second = optimizer["param_groups"]
    params = [*first["params"], *second["params"]]
    optimizer["param_groups"] = [{**first, "params": params, "lr_decay": 0.0}]


def as_elastic(content: Content) -> None:
    """Have a list of the groups' states, without hyper-parameters."""
    state = content["optimizer_state_dict"]
    state["base_optimizer_state"] = list(state["base_optimizer_state"]["state"].values())


def swap_out(unit: int) -> Edit:
    """Empty what NVMe offload swaps out."""

    def edit(content: Content) -> None:
        content["optimizer_state_dict"]["fp32_flat_groups"][unit] = torch.empty(0)
        for key in ("exp_avg", "exp_avg_sq"):
            wrapped(content["optimizer_state_dict"])["state"][unit][key] = torch.empty(0)

    return edit


def swap_files(run_dir: Path) -> None:
    """Write what NVMe offload writes beside the shards."""
    for rank in range(2):
        place = run_dir / TAG / "offloaded_tensors" / f"rank{rank:02d}"
        place.mkdir(parents=True)
        for name in ("0_1", "exp_avg-0_1", "exp_avg_sq-0_1"):
            (place / f"{name}.tensor.swp").write_bytes(bytes(1024))


def auto_expert_groups(content: Content) -> None:
    """Tell how sub-groups are cut, as AutoEP does in stage 3."""
    group = {"sub_group": 0, "partition_count": 2, "families": ["autoep_expert"]}
    content["optimizer_state_dict"]["ds_zero_partition_groups"] = [group]


def with_muon(content: Content) -> None:
    """Have a param group that Muon trains."""
    groups = content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
    groups[0]["use_muon"] = True


def rename_experts(content: Content) -> None:
    """Name the experts of all ranks alike, as AutoEP's fused ones are."""
    state = content.get("optimizer_state_dict", {})
    *_, named = state.get("param_slice_mappings") or content.get("param_shapes") or [{}]
    for name in list(named):
        named[name.replace("deepspeed_experts", "experts")] = named.pop(name)


def tell_more(content: Content) -> None:
    """Say more of a slice than a reader knows, as a later version might."""
    (first, *_) = content["optimizer_state_dict"]["param_slice_mappings"][-1].values()
    first.offset = 3


@dataclass(frozen=True)
class Kind:
    """Something that is refused, what is said of it, and how its files differ from others."""

    job: Job
    says: tuple[str, ...]
    optimizer: Edit | None = None
    """Changes every optimizer file."""
    model: Edit | None = None
    both: Edit | None = None
    beside: Callable[[Path], object] = lambda run_dir: None
    """Makes other files."""

    def write(self, run_dir: Path) -> Path:
        write(self.job, run_dir)
        changes = [("*_optim_states.pt", self.optimizer), ("*rank_*_model_states.pt", self.model)]
        for pattern, change in changes:
            for edit in filter(None, (change, self.both)):
                edit_all(run_dir, pattern, edit)
        self.beside(run_dir)
        return run_dir


MESH = config(data_parallel_size=2, sequence_parallel_size=2)
NVME = {"device": "nvme", "nvme_path": "/local_nvme"}
ON_EXPERTS = Job(world_size=4, experts=EXPERTS, expert_parallel=2)
KINDS = {
    "adagrad": Kind(
        Job(stage=2), ("one param group for 2 flat groups", "joins those of torch's Adagrad"),
        join_groups,
    ),
    "elastic": Kind(
        Job(stage=2), ("trained with elastic_checkpoint", "elastic_checkpoint off", "save again"),
        as_elastic, both=zero(elastic_checkpoint=True),
    ),
    "nvme": Kind(
        STAGE_3, ("offloaded_tensors/rank00/0_1.tensor.swp", "swapped out to NVMe", SAVED_BY_2),
        swap_out(0), both=zero(offload_optimizer=NVME), beside=swap_files,
    ),
    "nvme-without-its-swap-files": Kind(
        STAGE_3, ("mp_rank_00_optim_states.pt: fp32_flat_groups[1] is empty", "swapped out to NV"),
        swap_out(1), both=zero(offload_optimizer=NVME),
    ),
    "twin-flow": Kind(
        STAGE_3, ("of sub-groups [0]: trained with offload_optimizer.ratio below", "train until"),
        without_states(0), both=zero(offload_optimizer={"device": "cpu", "ratio": 0.6}),
    ),
    "super-offload": Kind(
        STAGE_3, ("no optimizer state of sub-groups [0, 1, 2]: ", "super_offload", "train until"),
        without_states(0, 1, 2),
        both=zero(offload_optimizer={"device": "cpu", "super_offload": True}),
    ),
    "zenflow-at-stage-3": Kind(
        Job(stage=3), ("with ZenFlow", "transposes matrices", "engine.save_16bit_model()"),
        both=zero(zenflow={"topk_ratio": 0.1}),
    ),
    "mesh-of-sequences": Kind(
        STAGE_3,
        ("2 of 4 ranks saved: trained with data_parallel_size and sequence_parallel_size at ZeRO",),
        both=MESH,
    ),
    "autoep-with-autotp": Kind(
        ON_EXPERTS, ("'folding' says so: trained with AutoEP", "or with AutoTP", "ds_to_universal"),
        model=lambda content: content.update(ds_autoep_layers=[{}], folding={"tp_size": 2}),
    ),
    "autoep-with-muon": Kind(
        ON_EXPERTS, ("00_model_states.pt: 'use_muon' says so: trained with AutoEP", "or Muon"),
        with_muon, model=lambda content: content.update(ds_autoep_layers=[{}]),
    ),
    "autoep-of-0.19.2": Kind(
        ON_EXPERTS, ("'autoep_layers' says so: trained with AutoEP", "ds_to_universal"),
        model=lambda content: content.update(autoep_layers=[{"ep_size": 2}]),
    ),
    "autoep-stage-3": Kind(
        STAGE_3, ("'ds_zero_partition_groups' says so: trained with AutoEP",), auto_expert_groups,
    ),
    "fragments-that-tell-more": Kind(
        Job(stage=2), ("a fragment of 'embed.bias' has 'numel', 'start', 'offset'",), tell_more,
    ),
    "experts-without-numbers": Kind(
        ON_EXPERTS, ("is of experts without numbers: trained with AutoEP",), both=rename_experts,
    ),
    "optimizer-twice": Kind(
        Job(stage=1),
        ("next to the ranks' own files: trained with a bf16 pipeline", "Train with stage 1"),
        lambda content: content["optimizer_state_dict"].pop("zero_stage"),
        model=lambda content: content.update(optimizer={"clip_grad": 1.0}, module=None),
        both=zero(stage=0),
    ),
}  # fmt: skip


VERBS: dict[str, Callable[[Path, Path], object]] = {
    "inspect": lambda run, out: streamshard.inspect(run),
    "convert": streamshard.convert,
    "repartition": lambda run, out: streamshard.repartition(run, out, world_size=4),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_kind_is_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    run = kind.write(tmp_path / "run")
    for verb in VERBS.values():
        with pytest.raises(UnsupportedError) as refusal:
            verb(run, tmp_path / "out")
        assert [text for text in kind.says if text not in str(refusal.value)] == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


DUMPED = {
    "elastic": ("trained with elastic_checkpoint",),
    "nvme": ("fp32_flat_groups[0] is empty", "swapped out to NVMe"),
    "twin-flow": ("no optimizer state of sub-groups [0]: trained with", "super_offload"),
    "autoep-stage-3": ("'ds_zero_partition_groups' says so",),
    "experts-without-numbers": ("experts without numbers",),
}


@pytest.mark.parametrize("name", DUMPED)
def test_raw_dumps_are_refused_for_what_they_show(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    template = write_dumps(kind.write(tmp_path / "run"), tmp_path / "dumps")
    like = write(kind.job, tmp_path / "like") if kind.job.stage == 3 else None
    with pytest.raises(UnsupportedError) as refusal:
        streamshard.repartition(template, tmp_path / "out" / DUMPS, world_size=4, like=like)
    assert [text for text in DUMPED[name] if text not in str(refusal.value)] == []
    assert not (tmp_path / "out").exists()


# What looks like it and is whole ------------------------------------------------------------------


def before_the_first_step(content: Content) -> None:
    """Have neither a state nor a count of steps."""
    if "module" in content:
        content.update(global_steps=3, skipped_steps=3)
    else:
        wrapped(content["optimizer_state_dict"])["state"].clear()


def test_before_0_15_the_sizes_of_a_mesh_say_nothing(tmp_path: Path) -> None:
    run = write(STAGE_3, tmp_path / "run")
    for edit in (MESH, lambda content: content.update(ds_version="0.14.5")):
        edit_all(run, "*.pt", edit)
    streamshard.repartition(run, tmp_path / "out", world_size=4)


def test_no_state_is_missed_that_was_never_made(tmp_path: Path) -> None:
    offload = {"device": "cpu", "ratio": 0.3, "super_offload": True}
    run = write(STAGE_3, tmp_path / "run")
    edit_all(run, "*.pt", zero(offload_optimizer=offload))
    edit_all(run, "*.pt", before_the_first_step)
    assert streamshard.inspect(run).groups[0].states == {}


def test_nvme_offload_that_swapped_nothing_is_resharded(tmp_path: Path) -> None:
    """Sub-groups too small for it stay in the files; the directories beside them are empty then."""
    run = write(STAGE_3, tmp_path / "run")
    edit_all(run, "*.pt", zero(offload_optimizer=NVME))
    (run / TAG / "offloaded_tensors" / "rank00").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"kept in the checkpoint has .*nvme.*ds_config_file="):
        streamshard.repartition(run, tmp_path / "out", world_size=3)
    wanted = write(replace(STAGE_3, world_size=3, garbage=False), tmp_path / "wanted")
    config_file = write_config(tmp_path, wanted)
    streamshard.repartition(run, tmp_path / "out", world_size=3, ds_config_file=config_file)
    compare(tmp_path / "out" / TAG, wanted / TAG)


def test_a_missing_rank_is_not_taken_for_mics(tmp_path: Path) -> None:
    run = write(replace(STAGE_3, world_size=4), tmp_path / "run")
    for lost, there in ((2, "are 2 optimizer files;"), (1, "is 1 optimizer file;")):
        for path in (run / TAG).glob(f"*zero_pp_rank_[{lost}-3]_*"):
            path.unlink()
        with pytest.raises(DisagreementError, match=f"saved by 4 ranks, but there {there}"):
            streamshard.inspect(run)


def test_names_of_the_fast_writer_are_explained_and_the_advice_works(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    files = sorted((run / TAG).glob("*.pt"))
    for path in files:
        path.rename(f"{path}-0.1")
    with pytest.raises(UnsupportedError, match="fast checkpoint writer") as refusal:
        streamshard.inspect(run)
    _, _, advice = str(refusal.value).partition("in that directory: ")
    subprocess.run(["bash", "-c", advice], cwd=run / TAG, check=True)
    assert sorted((run / TAG).glob("*.pt")) == files
    assert streamshard.inspect(run).world_size == Job(stage=2).world_size


def test_a_part_that_the_fast_writer_wrote_is_refused(tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    for path in (run / TAG).glob("*.pt"):
        path.rename(f"{path}-1.4")
    with pytest.raises(UnsupportedError, match=r'parts are not supported.*"type": "python"'):
        streamshard.inspect(run)


def test_frozen_weights_of_experts_go_to_stage_1_alone(tmp_path: Path) -> None:
    """They are in the experts' own files; stage 2 lists those of the first rank too."""
    job, name = ON_EXPERTS, f"{EXPERTS[0][0]}_scale"
    plain, run = (write(job, tmp_path / place / "run") for place in ("plain", "frozen"))

    def freeze(held: Content) -> None:
        held["frozen_param_shapes"][name] = torch.Size([2])
        held["frozen_param_fragments"][name] = torch.ones(2)

    edit_all(run, "mp_rank*model_states.pt", freeze)
    with pytest.raises(UnsupportedError, match=rf"'{name}' is a frozen weight of an expert"):
        streamshard.repartition(run, tmp_path / "out", world_size=2)
    for source in (plain, run):
        streamshard.repartition(source, source.with_name("out"), world_size=2, zero_stage=1)
    compare(tmp_path / "frozen" / "out" / TAG, tmp_path / "plain" / "out" / TAG)


def test_what_stage_3_lists_nowhere_is_read_only_if_it_is_proved_to_be_held_twice(
    tmp_path: Path,
) -> None:
    plain = Job(stage=3)
    for name, placeholder, reason in (
        ("proved", lambda module: module["embed.weight"].detach(), ""),
        ("loose", lambda module: torch.empty(0, dtype=plain.dtype), "is in no file"),
        ("unclear", lambda module: module["block.0.mlp"].detach(), "is in no file"),
    ):
        run = write(plain, tmp_path / name)

        def change(
            model: dict[str, Any], name: str = name, made: Callable[..., Tensor] = placeholder
        ) -> None:
            module = model["module"]
            if name == "unclear":  # several parameters share the storage, so nothing is proved
                module["embed.weight"] = module["block.0.mlp"].detach()
            module["head.weight"] = made(module)
            model["shared_params"] = {}

        edit_all(run, "*_model_states.pt", change)
        if reason:
            with pytest.raises(UnsupportedError, match=f"'head.weight' {reason}"):
                streamshard.inspect(run)
            continue
        streamshard.repartition(run, tmp_path / "out", world_size=3, verify=True)
        with streamshard.open(tmp_path / "out") as found:
            assert found["head.weight"].tied_to == "embed.weight"

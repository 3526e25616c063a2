"""Plans that are saved and run later, or refused."""

import errno
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard import registry
from streamshard.engine.run import phases
from streamshard.errors import (
    SourceError,
    StreamshardError,
    TargetError,
    TargetExistsError,
    UsageError,
)
from streamshard.operations.apply import PLANNERS
from streamshard.operations.transfer import plan_file
from streamshard.operations.transfer.report import Silent
from streamshard.verb_options import OPTIONS
from tests.cli.conftest import tree
from tests.fabricated import client_state, write
from tests.job import TAG, Job

Content = dict[str, Any]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a checkpoint in the directory that relative paths begin at."""
    monkeypatch.chdir(tmp_path)
    write(Job(stage=2, world_size=4, client_state=client_state()), Path("run"))
    write(Job(stage=3, step=5), Path("older"))


def plan_repartition(**options: Any) -> Any:  # noqa: ANN401
    return streamshard.plan_repartition("run", "out", **{"world_size": 3, **options})


PLANS: dict[str, Callable[[], Any]] = {
    "repartition": lambda: plan_repartition(verify=True, workers=1),
    "convert": lambda: streamshard.plan_convert("run", "out", codec="zstd", chunk_size=64),
    "export": lambda: streamshard.plan_export(
        "run", "out", dtype="bf16", exclude=["old.*"], keep_dtype=("embed.*",), max_shard_size=100
    ),
    "merge": lambda: streamshard.plan_merge(["run", "older"], "out", weights=[0.75, 0.25]),
}


@pytest.mark.parametrize("verb", PLANS)
def test_a_saved_plan_does_what_the_command_does(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS[verb]()
    before = tree(tmp_path)
    plan.save("plan.json")
    assert {**before, "plan.json": Path("plan.json").read_bytes()} == tree(tmp_path)
    plan.run()
    wanted = tree(Path("out"))
    Path("out").rename("wanted")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = streamshard.load_plan("../plan.json").run()
    assert tree(tmp_path / "out") == wanted
    assert (done.verb, done.bytes_written) == (verb, plan.report.bytes_written)
    assert done.is_verified == plan.report.is_verified


def test_a_plan_of_a_version_with_fewer_options_is_taken() -> None:
    wanted = plan_repartition()
    wanted.save("plan.json")
    plan = json.loads(Path("plan.json").read_text())
    plan["options"] = {"world_size": 3}
    Path("plan.json").write_text(json.dumps(plan))
    assert streamshard.load_plan("plan.json").identity.header == wanted.identity.header


@pytest.mark.parametrize("verb", PLANS)
def test_the_options_are_those_of_the_verb(verb: str) -> None:
    parameters = inspect.signature(registry.load(PLANNERS[verb])).parameters.values()
    names = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    names -= {"if_needed"}  # a plan is what is to be written
    PLANS[verb]().save("plan.json")
    saved = json.loads(Path("plan.json").read_text())["options"]
    assert plan_file.saved_options(OPTIONS[verb]).keys() == names == saved.keys()


class Cut(Silent):
    """Ends a run when it is to be put into its place."""

    def enter(self, phase: str) -> None:
        if phase == phases.COMMITTING:
            raise KeyboardInterrupt


@pytest.mark.parametrize("verb", PLANS)
def test_cut_off_either_way_it_is_gone_on_with_either_way(verb: str, tmp_path: Path) -> None:
    PLANS[verb]().save("plan.json")

    def saved() -> Any:  # noqa: ANN401
        return streamshard.load_plan(tmp_path / "plan.json")

    wanted = None
    for first, second in ((saved, PLANS[verb]), (PLANS[verb], saved)):
        with pytest.raises(KeyboardInterrupt):
            first().run(Cut())
        assert not Path("out").exists()
        done = second().run()
        assert done.kept_bytes > 0
        wanted = wanted or tree(Path("out"))
        assert tree(Path("out")) == wanted
        Path("out").rename(f"out-{second is saved}")


def test_it_keeps_to_its_tag_when_the_job_saves_another() -> None:
    plan_repartition().save("plan.json")
    write(Job(stage=2, world_size=4), Path("later"), tag="global_step9")
    (Path("later") / "global_step9").rename("run/global_step9")
    (Path("run") / "latest").write_text("global_step9")
    assert streamshard.load_plan("plan.json").report.tag == TAG


def test_a_tag_directory_is_a_source_like_any(tmp_path: Path) -> None:
    plan = streamshard.plan_repartition(f"run/{TAG}", "out", world_size=3)
    plan.save("plan.json")
    assert streamshard.load_plan("plan.json").report.bytes_written == plan.report.bytes_written


def touched(path: Path) -> None:
    """Give a file another time of change, and leave it as it is."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def again(path: Path) -> None:
    """Give a file another inode, and leave all else as it is."""
    stat, data = path.stat(), path.read_bytes()
    other = path.with_name("other")
    other.write_bytes(data)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


OPTIM = f"run/{TAG}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize("change", [touched, again])
def test_a_source_that_has_changed_is_refused_and_named(change: Callable[[Path], None]) -> None:
    plan_repartition().save("plan.json")
    change(Path(OPTIM))
    message = rf"^plan\.json: .*{OPTIM} has changed since\. Make a new plan"
    with pytest.raises(SourceError, match=message):
        streamshard.load_plan("plan.json")
    assert not Path("out").exists()


def test_a_file_that_was_added_is_told() -> None:
    plan_repartition().save("plan.json")
    Path("run/notes.txt").write_text("new")
    with pytest.raises(SourceError, match=r"6 files, where .*run has 7 now"):
        streamshard.load_plan("plan.json")


def test_a_config_that_has_changed_is_told() -> None:
    config = {"train_batch_size": 24, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    Path("ds.json").write_text(json.dumps(config))
    plan_repartition(ds_config_file="ds.json").save("plan.json")
    Path("ds.json").write_text(json.dumps({**config, "zero_optimization": {"stage": 1}}))
    with pytest.raises(UsageError, match=r"plan\.json: .*zero_stage=2.*zero_stage=1"):
        streamshard.load_plan("plan.json")


def test_what_a_run_may_use_can_be_said_anew() -> None:
    plan_repartition(workers=2, memory_limit=1 << 30).save("plan.json")
    plan = streamshard.load_plan("plan.json", workers=1, memory_limit=100 << 20)
    assert isinstance(plan.memory.workers, int)
    assert (plan.memory.workers, plan.report.limit_bytes) == (1, 100 << 20)


@pytest.mark.parametrize("place", ["run/plan.json", f"run/{TAG}/plan.json", "out/plan.json"])
def test_a_plan_does_not_change_what_it_is_about(place: str) -> None:
    Path("out").mkdir()
    with pytest.raises(UsageError, match="choose another place"):
        plan_repartition(overwrite=True).save(place)
    assert not Path(place).exists()


def test_a_place_that_cannot_be_written_is_named() -> None:
    with pytest.raises(TargetError, match=r"^nowhere/plan\.json: there is no directory nowhere"):
        plan_repartition().save("nowhere/plan.json")


@pytest.mark.parametrize("content", [b"what somebody wrote", b"{}", None])
def test_nothing_but_a_plan_is_replaced(content: bytes | None, tmp_path: Path) -> None:
    place = Path("notes.txt")
    place.mkdir() if content is None else place.write_bytes(content)
    before = tree(tmp_path)
    with pytest.raises(TargetExistsError, match=r"^notes\.txt: exists, and is not a plan"):
        plan_repartition().save("notes.txt")
    assert tree(tmp_path) == before
    plan_repartition().save("plan.json")
    plan_repartition(world_size=2).save("plan.json")
    assert json.loads(Path("plan.json").read_text())["options"]["world_size"] == 2


def test_a_plan_that_cannot_be_written_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_repartition()
    before = set(Path.cwd().iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", _refuse)
        with pytest.raises(TargetError, match="cannot be written"):
            plan.save("plan.json")
    assert set(Path.cwd().iterdir()) == before


def _refuse(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_plan_says_how_to_replace_what_is_there() -> None:
    plan = plan_repartition()
    plan.save("plan.json")
    plan.run()
    with pytest.raises(TargetExistsError) as caught:
        streamshard.load_plan("plan.json")
    (note,) = caught.value.__notes__
    assert "Make a new plan with plan.save(), and with overwrite=True" in note


def _without(key: str) -> Callable[[Content], None]:
    return lambda plan: plan.pop(key)


def _with(*path: str, value: object) -> Callable[[Content], None]:
    def change(plan: Content) -> None:
        for key in path[:-1]:
            plan = plan[key]
        plan[path[-1]] = value

    return change


DAMAGE: dict[str, tuple[Callable[[Content], None], str]] = {
    "no kind": (_without("kind"), "not a plan of streamshard's"),
    "another version": (_with("version", value=2), "a plan of version 2, this is 1"),
    "no verb": (_without("verb"), "None is not a verb"),
    "a verb without plans": (_with("verb", value="compact"), "'compact' is not a verb"),
    "a verb that is a list": (_with("verb", value=["repartition"]), "is not a verb"),
    "another verb": (_with("verb", value="convert"), "'ds_config_file' is not known|not known"),
    "no source": (_without("source"), "'source' is missing"),
    "a relative source": (_with("source", value="run"), "'source' cannot be"),
    "a target that ends early": (_with("target", value="/a\0b"), "'target' cannot be"),
    "an unknown key": (_with("extra", value=1), "'extra' is not known"),
    "an unknown option": (_with("options", "chunk_size", value=1), "'chunk_size' is not known"),
    "options in a list": (_with("options", value=[]), "'options' cannot be"),
    "a number that is none": (_with("options", "world_size", value="3"), "'world_size' cannot"),
    "a flag that is a number": (_with("options", "verify", value=1), "'verify' cannot"),
    "an endless number": (_with("options", "workers", value=1 << 70), "'workers' cannot"),
    "a relative config": (_with("options", "ds_config_file", value="a"), "'ds_config_file' cannot"),
    "no purpose": (_with("purpose", value=3), "'purpose' cannot"),
    "a purpose of numbers": (_with("purpose", "options", value={"a": 1}), "'purpose' cannot"),
    "files that are no base64": (_with("purpose", "files", value="%%"), "'purpose' cannot"),
    "files of half a digest": (_with("purpose", "files", value="AAAA"), "'purpose' cannot"),
    "a count below 0": (_with("files", value=-1), "'files' cannot"),
    "other sizes": (_with("sizes", value="0"), "would write .* bytes into 6 files, or others"),
    "another option": (_with("options", "world_size", value=2), "world_size=3.*world_size=2"),
    "another journal": (_with("purpose", "format", value=9), "another version of streamshard"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_plan_that_is_not_as_it_was_written_is_refused(damage: str) -> None:
    change, message = DAMAGE[damage]
    plan_repartition().save("plan.json")
    plan = json.loads(Path("plan.json").read_text())
    change(plan)
    Path("plan.json").write_text(json.dumps(plan))
    with pytest.raises(UsageError, match=rf"^plan\.json: .*(?:{message})"):
        streamshard.load_plan("plan.json")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"[]", b'{"kind": 1, "kind": 2}', b"[" * 100_000, b"NaN"]
)
def test_a_file_that_is_no_plan_is_refused(data: bytes) -> None:
    Path("plan.json").write_bytes(data)
    with pytest.raises(UsageError, match=r"^plan\.json: not a plan of streamshard's"):
        streamshard.load_plan("plan.json")


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with Path("plan.json").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(UsageError, match="more than 67,108,864 bytes"):
        streamshard.load_plan("plan.json")
    with pytest.raises(StreamshardError, match="No such file"):
        streamshard.load_plan("nothing.json")

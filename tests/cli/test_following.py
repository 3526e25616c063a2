"""Whoever types what the README and the pages show, block by block, is served.

Buckets, clusters and other parallel degrees have tests of their own, and so have cron's lines.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import streamshard
from docs.site.recording import COMMANDS, PICTURE
from streamshard.cli.parser import arguments_of
from tests.checkpoints.test_fsdp_ranks import in_rank
from tests.cli.conftest import in_process
from tests.compact.runs import age, make_run, tag_of
from tests.documents import PAGES, README, TEXTS, blocks
from tests.fabricated import DUMPS, edit, write, write_dumps
from tests.job import TAG, Job

TYPED = re.compile(r"(?:\$ |CKPT=\$\()?(streamshard .*?)(?:\) \|\| exit| > .*?)?(?: +#.*)?")
ELSEWHERE = re.compile(
    r"://| /|--dask|--(?:tensor|pipeline|expert)-parallel|--facts"
    r"|fsdp.*--ds-config|streamshard serve"
)
JOB = Job(
    world_size=8,
    groups=((("layers.0.weight", (90, 8)), ("layers.0.norm.weight", (7,))),),
    frozen=(),
    tied={},
)
STEPS = (1000, 1200, 2000, 3000, 4000, 5000)
FINDS_DIFFERENCES = 6
LACKS_RULES = 2


@pytest.fixture(scope="module", autouse=True)
def _run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make once the run that most pages speak of; it is copied where it is read."""
    RUN.append(make_run(tmp_path_factory.mktemp("of") / "run", JOB, STEPS))
    for step in STEPS:
        record_step(RUN[0] / tag_of(step), step)
    yield
    RUN.clear()


RUN: list[Path] = []


def runs(path: Path) -> None:
    shutil.copytree(RUN[0], path)


def record_step(tag: Path, step: int) -> None:
    """Let each save be of another step, as a job's saves are."""
    for path in tag.glob("*_model_states.pt"):
        edit(path, lambda model: model.update(global_steps=step))
    age(tag, 30)


def trainer_output(path: Path) -> None:
    for step in (500, 1000, 1500, 2000):
        write(JOB, path / f"checkpoint-{step}", tag_of(step))
        record_step(path / f"checkpoint-{step}" / tag_of(step), step)
        age(path / f"checkpoint-{step}", 30 - step / 1000)


def dumps(path: Path) -> None:
    run = write(replace(JOB, world_size=4), path.parent.with_name("of"), TAG)
    path.parent.rmdir()
    write_dumps(run, path.parent)


def archive(path: Path) -> None:
    prepare(Path("runs/7b"))
    streamshard.compact("runs/7b", path.parent, keep_last=3)


def trainer_archive(path: Path) -> None:
    prepare(Path("output"))
    streamshard.compact("output", path.parent, keep_last=3)
    shutil.rmtree(f"output/{path.stem}")


def of_a_run(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        prepare(Path("runs/7b"))
        make(path)

    return made


def universal(path: Path) -> None:
    """Make what DeepSpeed's converter makes of a tag."""
    if not any(path.parent.iterdir()):
        path.parent.rmdir()
    prepare(path.parent)
    streamshard.export("runs/7b", "universal", format="universal")
    (tag,) = (one for one in Path("universal").iterdir() if one.is_dir())
    tag.rename(path)


def verl(path: Path) -> None:
    path.mkdir()
    in_rank(0, partial(_save_rank, path), 1)


def _save_rank(path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    weight = distribute_tensor(torch.ones(90, 8), mesh, [Shard(0)], src_data_rank=None)
    torch.save({"layers.0.weight": weight}, path / "model_world_size_1_rank_0.pt")


def lora(path: Path) -> None:
    at = "base_model.model.layer"
    trained = tuple((f"{at}.lora_{side}.default.weight", (3, 8)) for side in "AB")
    write(replace(JOB, groups=(trained,)), path)
    (path / "adapter_config.json").write_text("{}")


def start(path: Path) -> None:
    """Save a job with more tokens before its first step."""
    (name, (rows, width)), *rest = JOB.groups[0]
    write(replace(JOB, groups=(((name, (rows + 6, width)), *rest),)), path.with_name("stepped"))
    streamshard.repartition(path.with_name("stepped"), path, world_size=8, fresh_states=True)


MAKERS: tuple[tuple[str, Callable[[Path], object]], ...] = (
    (r"runs/7b/\w+_universal", universal),
    (r"runs/lora", lora),
    (r"runs/7b-start|start|new", start),
    (r"\w+\.rules", lambda path: path.write_text("rows layers.0.weight\n")),
    (r"runs/[\w-]+|old", runs),
    (r"output", trainer_output),
    (rf"ckpt/{re.escape(DUMPS)}", dumps),
    (r"fsdp/step-500", of_a_run(lambda path: streamshard.export("runs/7b", path, format="dcp"))),
    (r"verl/global_step_500/actor", verl),
    (r"models/base", of_a_run(lambda path: streamshard.export("runs/7b", path))),
    (r"archive/7b/\w+\.zarr", archive),
    (r"archive/output/.*\.zarr", trainer_archive),
    (
        r"old/7b\.zarr",
        of_a_run(lambda path: streamshard.convert("runs/7b", path, tag=tag_of(1000))),
    ),
    (r"\S+\.zarr", of_a_run(lambda path: streamshard.convert("runs/7b", path))),
    (r"ds(_config)?\.json", lambda path: path.write_text(DS_CONFIG)),
)
DS_CONFIG = (
    '{"train_batch_size": 48, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},'
    ' "optimizer": {"type": "AdamW", "params": {"torch_adam": true}},'
    ' "zero_optimization": {"stage": 2}}'
)


def prepare(path: Path) -> None:
    """Make what a command reads, unless an earlier one has made it."""
    for parent in (path, *path.parents):
        for pattern, make in MAKERS:
            if re.fullmatch(pattern, str(parent)) and not parent.exists():
                parent.parent.mkdir(parents=True, exist_ok=True)
                make(parent)
                return


def shown(block: str) -> list[list[str]]:
    """List the commands of a block, as the words that a shell makes of them."""
    found = (TYPED.fullmatch(line) for line in block.splitlines())
    commands = [match[1].replace("$N", "6") for match in found if match]
    return [shlex.split(one)[1:] for one in commands if not ELSEWHERE.search(one)]


def followed(page: Path) -> list[list[list[str]]]:
    """List what is typed in turn: the README, a block, or one example of a command's help."""
    found = [shown(block) for block in blocks(TEXTS[page], "")]
    if page == README:
        found = [[command for block in found for command in block]]
    if page.stem == "commands":
        found = [[command] for block in found for command in block]
    return [commands for commands in found if commands]


BLOCKS = [
    pytest.param(commands, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, commands in enumerate(followed(page))
]


def test_every_page_of_a_user_is_followed() -> None:
    found = {str(param.id).rpartition("-")[0] for param in BLOCKS}
    assert found >= {"README", "archive", "checking", "commands", "reading", "resume"}
    assert len(BLOCKS) > 20


@pytest.mark.parametrize("commands", BLOCKS)
def test_what_a_page_shows_does_what_it_says(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("archive").mkdir()  # where archives go is there, as a disk that is mounted
    for words in commands:
        given = arguments_of().parse_args(words)
        for word in words[1:2] + [str(v) for k, v in vars(given).items() if is_read(k, v)]:
            prepare(Path(word))
        done = in_process(*words)
        accepted = {0, FINDS_DIFFERENCES} if words[0] == "diff" else {0}
        accepted = {LACKS_RULES} if words[0] == "graft" and "--rules" not in words else accepted
        assert done.code in accepted, (words, done.err)


def is_read(name: str, value: object) -> bool:
    """Whether an argument names a file that must be there."""
    names = {"right", "like", "against", "ds_config_file", "start", "rules"}
    return isinstance(value, (str, Path)) and name in names


def test_the_recording_shows_what_commands_still_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures are those of the recorded run; what they are called is what is called so today."""
    monkeypatch.chdir(tmp_path)
    write(replace(JOB, stage=3, world_size=4), tmp_path / "runs" / "demo")
    texts = [one for one in ElementTree.parse(PICTURE).iter() if one.tag.endswith("}text")]
    recorded = "\n".join("".join(one.itertext()) for one in texts)
    for command in COMMANDS:
        words, _, most = command.partition(" | head -")
        facts = in_process(*shlex.split(words)[1:]).out.partition("\n\n")[0].splitlines()
        names = [fact.partition("  ")[0] for fact in facts][: int(most or len(facts))]
        told = recorded.partition(f"$ {command}\n")[2].splitlines()[: len(names)]
        assert [fact.partition("  ")[0] for fact in told] == names

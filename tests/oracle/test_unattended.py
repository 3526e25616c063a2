"""A job under elastic `torchrun` loses and gains machines, and goes on at the new size."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import streamshard
from tests.oracle import elastic_training
from tests.oracle.ranks import LAUNCHED, require_success, run_jobs

STEPS, SAVE_EVERY = 24, 3
PHASE_SECONDS = 150.0
"""A hard limit, far above what is measured."""
TOLERANCE = 1e-4
"""Other counts of ranks add the same gradients up in another order."""
ENVIRONMENT = {
    **LAUNCHED,
    # With it torch 2.13 lets no machine join again once the first rendezvous is over: rank 0 gives
    # the address of the store to the first round alone (`DynamicRendezvousHandler`).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
SCRIPT = elastic_training.__file__


@dataclass
class Job:
    """An elastic job: its machines, each one agent of torchrun, and what its ranks have logged."""

    directory: Path
    store_port: int
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    seen: int = 0
    """Count of the log's entries that were waited for."""

    def start_machine(self, node: str) -> None:
        conf = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--nproc-per-node", "1", "--max-restarts", "9", "--local-addr", "127.0.0.1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.store_port}"),
            *("--rdzv-id", "job", "--rdzv-conf", conf),
            *("-m", "streamshard.deepspeed", "--keep-global-batch", SCRIPT),
            *("--dir", str(self.directory), "--steps", str(STEPS)),
            *("--save-every", str(SAVE_EVERY)),
        ]
        with (self.directory / f"{node}.out").open("wb") as out:
            self.agents[node] = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def allow(self, step: int) -> None:
        whole = self.directory / "permission"
        whole.write_text(str(step))
        whole.replace(self.directory / "may-go-to")

    def log(self) -> list[dict[str, Any]]:
        path = self.directory / "log.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1:] == "\n"]

    def wait_for(self, key: str, *, ranks: int, at_least: int = 0) -> None:
        """Wait until a job of this many ranks logs a number; what was seen before is past."""
        deadline = time.monotonic() + PHASE_SECONDS
        while not any(
            entry["ranks"] == ranks and entry.get(key, -1) >= at_least
            for entry in self.log()[self.seen :]
        ):
            if time.monotonic() > deadline:
                pytest.fail(f"no {key} >= {at_least} of {ranks} ranks\n{self.complaint()}")
            time.sleep(0.02)
        self.seen = len(self.log())

    def complaint(self) -> str:
        """Return the log and the end of what every machine printed."""
        outs = sorted(self.directory.glob("*.out"))
        texts = [f"--- {out.name}\n{out.read_text(errors='replace')[-3000:]}" for out in outs]
        return "\n".join([*map(str, self.log()), *texts])

    def finish(self) -> dict[str, int]:
        """Wait for every machine that is left; returns their exit codes."""
        codes = {}
        for node, agent in self.agents.items():
            try:
                codes[node] = agent.wait(PHASE_SECONDS)
            except subprocess.TimeoutExpired:
                pytest.fail(f"{node} does not end\n{self.complaint()}")
        return codes


@contextmanager
def job_in(directory: Path) -> Iterator[Job]:
    """Make the rendezvous' store, which outlives all machines; at the end kill what is left."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job(directory, store.port)
    try:
        yield job
    finally:
        for agent in job.agents.values():
            agent.terminate()  # it ends its rank too
        for agent in job.agents.values():
            try:
                agent.wait(20.0)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        del store


@dataclass(frozen=True)
class Undisturbed:
    """The job on one rank that nothing happens to."""

    losses: Path


def train_alone(job: Undisturbed) -> None:
    """Note the loss of every step."""
    config = {**elastic_training.CONFIG, "gradient_accumulation_steps": 3}
    engine = elastic_training.new_engine(config)
    losses = {step: elastic_training.train(engine, step) for step in range(1, STEPS + 1)}
    job.losses.write_text(json.dumps(losses))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The losses of that job."""
    root = tmp_path_factory.mktemp("undisturbed")
    job = Undisturbed(root / "losses.json")
    require_success(run_jobs(1, [job], root / "ranks", train_alone))
    losses: dict[str, float] = json.loads(job.losses.read_text())
    return losses


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the job that machines leave and join."""
    return tmp_path_factory.mktemp("disturbed")


@pytest.fixture(scope="module")
def disturbed(directory: Path) -> list[dict[str, Any]]:
    """What the ranks log of a job that loses a machine in a save, and gains one."""
    with job_in(directory) as job:
        job.allow(8)
        for node in ("a", "b"):
            job.start_machine(node)
        job.wait_for("step", ranks=2)
        (directory / "dies-in-save-of").write_text("12")
        job.allow(15)
        job.wait_for("died", ranks=2)
        job.wait_for("step", ranks=1, at_least=14)
        job.start_machine("d")
        job.wait_for("start", ranks=2, at_least=12)
        job.allow(STEPS)
        codes = job.finish()
        log = job.log()
        assert sorted(codes.values()) == [-signal.SIGKILL, 0, 0], job.complaint()
    return log


def test_the_job_went_on_at_every_size(disturbed: list[dict[str, Any]]) -> None:
    sizes = iter([entry["ranks"] for entry in disturbed if "step" in entry])
    assert [size for size in (2, 1, 2) if size in sizes] == [2, 1, 2]  # in this order
    assert disturbed[-1]["end"] == STEPS


def test_every_restart_continues_from_the_last_complete_save(
    disturbed: list[dict[str, Any]],
) -> None:
    saved, starts = 0, 0
    for entry in disturbed:
        if "start" in entry:
            assert entry["start"] >= saved
            assert entry["latest"] == (f"global_step{entry['start']}" if entry["start"] else None)
            starts += entry["rank"] == 0
        saved = entry.get("saved", saved)
    assert starts >= 3


def test_a_machine_lost_in_a_save_leaves_latest_as_it_was(disturbed: list[dict[str, Any]]) -> None:
    death = next(entry for entry in disturbed if "died" in entry)
    assert death["latest"] == death["before"] == "global_step9"


@pytest.mark.usefixtures("disturbed")
def test_the_tag_saved_again_holds_no_files_of_the_lost_rank(directory: Path) -> None:
    files = sorted(path.name for path in (directory / "saves" / "global_step12").iterdir())
    assert files == ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert streamshard.verify(directory / "saves", tag="global_step12").problems == ()


def test_every_loss_is_that_of_the_undisturbed_job(
    disturbed: list[dict[str, Any]], undisturbed: dict[str, float]
) -> None:
    seen = [entry for entry in disturbed if "step" in entry]
    assert {entry["step"] for entry in seen} == set(range(1, STEPS + 1))
    for entry in seen:
        expected = undisturbed[str(entry["step"])]
        assert entry["loss"] == pytest.approx(expected, rel=TOLERANCE), entry

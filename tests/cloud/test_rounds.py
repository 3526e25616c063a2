"""Requests that need not wait for one another are under way at the same time."""

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import streamshard as api
from tests.cli.conftest import tree
from tests.cloud.conftest import JOURNAL, RECORD, Bucket
from tests.cloud.proxy import Request
from tests.fabricated import write
from tests.job import Job

WAIT = 60
"""Seconds after which requests that wait for each other are given up."""


class Together:
    """Lets the first request of each kind wait for the first ones of the others."""

    def __init__(self, *kinds: Callable[[Request], bool]) -> None:
        self._waiting = list(kinds)
        self._met = threading.Barrier(len(kinds))
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> None:
        with self._lock:
            kind = next((one for one in self._waiting if one(request)), None)
            if kind is not None:
                self._waiting.remove(kind)
        if kind is not None:
            self._met.wait(WAIT)

    @property
    def is_met(self) -> bool:
        """Whether there was one of each kind, at the same time."""
        return not self._waiting and not self._met.broken


def nth(number: int, kind: Callable[[Request], bool]) -> Callable[[Request], bool]:
    """Tell the n-th request of a kind from the others."""
    numbers = count(1)
    return lambda request: kind(request) and next(numbers) == number


def test_a_source_is_opened_in_few_rounds(bucket: Bucket, tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    source, tag = bucket.put(run, "runs/7b"), (run / "latest").read_text()
    first = Together(
        lambda one: one.is_listing and one.path.endswith("prefix=runs%2F7b%2F"),
        lambda one: one.path.endswith("/runs/7b/latest"),
    )
    headers = Together(
        lambda one: one.method == "GET" and "rank_0_mp_rank_00_optim" in one.path,
        lambda one: one.method == "GET" and "mp_rank_00_model" in one.path,
    )

    def both(request: Request) -> None:
        first(request)
        headers(request)

    bucket.proxy.plan = both
    api.repartition(source, tmp_path / "out", world_size=3)
    assert first.is_met
    assert headers.is_met
    listings = [one.path for one in bucket.proxy.requests if one.is_listing]
    assert len([path for path in listings if tag in path]) == 1
    api.repartition(run, tmp_path / "local", world_size=3)
    assert tree(tmp_path / "out") == tree(tmp_path / "local")


def test_a_target_begins_and_ends_in_few_rounds(bucket: Bucket, tmp_path: Path) -> None:
    """The lock is removed last, and the commit record comes after `latest`."""
    run = write(Job(stage=2), tmp_path / "run")
    ending = Together(
        lambda one: one.method == "POST" and "?delete" in one.path,
        lambda one: one.method == "GET" and one.path.endswith("/.streamshard.lock.out"),
    )
    # Planning looks at the target too; the second request for the lock is to be refused.
    beginning = Together(
        nth(2, lambda one: one.method == "HEAD" and one.path.endswith(f"/out/{RECORD}")),
        nth(2, lambda one: one.method == "PUT" and one.path.endswith("/.streamshard.lock.out")),
    )

    def both(request: Request) -> None:
        beginning(request)
        ending(request)

    bucket.proxy.plan = both
    api.repartition(run, f"{bucket.url}/out", world_size=3)
    assert beginning.is_met
    assert ending.is_met
    asked = bucket.proxy.requests
    puts = [n for n, one in enumerate(asked) if one.method == "PUT"]
    latest, record = puts[-2:]
    assert asked[latest].path.endswith("/out/latest")
    assert asked[record].path.endswith(f"/out/{RECORD}")
    assert max(n for n, one in enumerate(asked) if one.is_listing) < latest
    rest = [one.method for one in asked[record + 1 :]]
    assert (sorted(rest), rest[-1]) == (["GET", "POST", "POST"], "POST")
    assert not {key for key in sorted(bucket.keys()) if JOURNAL in key or ".lock" in key}

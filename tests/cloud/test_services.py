"""What targets, locks and going on need of a service, on a real server of each kind."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from obstore.store import from_url

import streamshard as api
from streamshard.errors import IncompleteError, TargetError, TargetExistsError, TargetLockedError
from streamshard.io.objects import clients
from tests.cloud.conftest import files_of
from tests.cloud.proxy import Fault, FaultProxy, Request
from tests.cloud.services import Azurite, FakeGCS, Moto, SeaweedFS, Service
from tests.cloud.test_kills import LARGE, WAIT, started
from tests.compact.runs import NO_GRACE, STEPS, make_run, tag_of
from tests.engine.test_lock import dead_process
from tests.fabricated import write
from tests.job import LEAN

RECORD = ".streamshard.committed"
JOURNAL = ".streamshard.journal"
numbers = count()
KINDS = (Moto, SeaweedFS, FakeGCS, Azurite)


def on(*kinds: type[Service]) -> pytest.MarkDecorator:
    """Run a test on these services alone."""
    names = [kind.name for kind in kinds]
    return pytest.mark.parametrize("service", kinds, ids=names, indirect=True)


others_than_moto = on(*KINDS[1:])
"""For what other tests try on moto already."""


class Place:
    """A bucket of a service, behind a proxy."""

    def __init__(self, url: str, proxy: FaultProxy) -> None:
        self.url = url
        self.proxy = proxy
        self._store: Any = from_url(url, client_options={"allow_http": True})

    def put(self, key: str, data: bytes, **attributes: str) -> None:
        """Upload an object."""
        self._store.put(key, data, attributes=attributes or None)

    def get(self, prefix: str = "") -> dict[str, bytes]:
        """Return the content of all objects below a prefix, by their relative paths."""
        keys = [meta["path"] for page in self._store.list(prefix or None) for meta in page]
        found = {key: bytes(self._store.get(key).bytes()) for key in keys}
        return {key.removeprefix(f"{prefix}/"): data for key, data in found.items()}

    def remove_all(self) -> None:
        """Remove all objects."""
        self._store.delete(list(self.get()))


@pytest.fixture(scope="module", params=KINDS, ids=[kind.name for kind in KINDS])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    kind: type[Service] = request.param
    if kind is Azurite and Azurite.PROGRAM is None:
        pytest.skip("no azurite-blob on the PATH; it comes by: npm install --global azurite")
    with kind() as made:
        yield made


@pytest.fixture(scope="module")
def proxy(service: Service) -> Iterator[FaultProxy]:
    with service.proxy() as made:
        yield made


@pytest.fixture
def place(
    service: Service,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    for name, value in service.credentials(proxy.url).items():
        monkeypatch.setenv(name, value)
    clients.client_of.cache_clear()
    proxy.reset()
    yield Place(service.make_bucket(f"bucket-{next(numbers)}"), proxy)
    proxy.reset()
    clients.client_of.cache_clear()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = write(LEAN, tmp_path / "run")
    (made / "zero_to_fp32.py").chmod(0o644)  # an object has no permission bits
    return made


def local(run: Path, world_size: int) -> dict[str, bytes]:
    """Return what a run writes to a disk."""
    out = run.with_name(f"local-{world_size}")
    if not out.exists():
        api.repartition(run, out, world_size=world_size)
    return files_of(out)


def content(place: Place) -> dict[str, bytes]:
    """Return what a complete target holds, without its commit record."""
    found = place.get("out")
    assert found.pop(RECORD)
    return found


def test_a_target_is_replaced_when_asked(place: Place, run: Path) -> None:
    target = f"{place.url}/out"
    api.repartition(run, target, world_size=3)
    assert content(place) == local(run, 3)
    for number in (2, 3, 2):
        with pytest.raises(TargetExistsError, match="overwrite=True"):
            api.repartition(run, target, world_size=number)
        api.repartition(run, target, world_size=number, overwrite=True)
        assert content(place) == local(run, number)
    assert len(place.get()) == len(local(run, 2)) + 1


def test_a_record_counts(place: Place, run: Path) -> None:
    """Whatever else lies beside it, such as objects of a journal."""
    target = f"{place.url}/out"
    api.repartition(run, target, world_size=3)
    for name in ("7", "whole", "x"):
        place.put(f"out/{JOURNAL}/{name}", b"left")
    before = place.get()
    assert api.inspect(target).world_size == 3
    with pytest.raises(TargetExistsError, match="overwrite=True"):
        api.repartition(run, target, world_size=2)
    assert place.get() == before
    found = api.repartition(run, target, world_size=3, if_needed=True)
    assert (found.found, place.get()) == ("target", before)
    api.repartition(run, target, world_size=2, overwrite=True)
    assert content(place) == local(run, 2)


def test_a_path_is_free_once_it_is_empty(place: Place, run: Path) -> None:
    """Though the service may go on to list its directories."""
    for name in ("out", "out.partial"):
        api.repartition(run, f"{place.url}/{name}", world_size=3)
    place.remove_all()
    api.repartition(run, f"{place.url}/out", world_size=2)
    assert content(place) == local(run, 2)
    api.repartition(run, f"{place.url}/out", world_size=3, overwrite=True)
    assert content(place) == local(run, 3)


def held(request: Request) -> Fault | None:
    """Hold the upload of an optimizer's file."""
    is_upload = request.method == "PUT" and "optim_states.pt" in unquote(request.path)
    return Fault.HELD if is_upload else None


@others_than_moto
def test_a_killed_run_goes_on(place: Place, run: Path) -> None:
    target = f"{place.url}/out"
    words = ("repartition", str(run), target, "--world-size", "3")
    place.proxy.plan = held
    with place.proxy.settled():
        with started(*words) as process:
            assert place.proxy.holding.wait(WAIT)
            with started(*words) as second:
                _, errors = second.communicate(timeout=WAIT)
            assert second.returncode == TargetLockedError.exit_code
            assert f"process {process.pid} on" in errors
            process.kill()
            process.wait(WAIT)
        place.proxy.reset()
    assert RECORD not in place.get("out")
    assert any("lock" in key for key in place.get())
    with started(*words) as process:
        _, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 0, errors
    assert content(place) == local(run, 3)
    assert len(place.get()) == len(local(run, 3)) + 1


def completes(request: Request) -> bool:
    """Tell whether a request makes parts one object."""
    return "comp=blocklist" in request.path or (
        request.method == "POST" and "uploadId=" in request.path
    )


@on(SeaweedFS, Azurite)
def test_a_run_killed_as_it_completes_an_upload_in_parts_goes_on(
    place: Place, tmp_path: Path
) -> None:
    run = write(LARGE, tmp_path / "run")
    words = ("repartition", str(run), f"{place.url}/out", "--world-size", "1")
    place.proxy.plan = lambda request: Fault.HELD if completes(request) else None
    with place.proxy.settled():
        with started(*words) as process:
            assert place.proxy.holding.wait(WAIT)
            process.kill()
            process.wait(WAIT)
        place.proxy.reset()
    with pytest.raises(IncompleteError, match="unfinished"):
        api.inspect(f"{place.url}/out")
    with started(*words) as process:
        _, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 0, errors
    assert content(place) == local(run, 1)


@on(Moto, FakeGCS)
def test_no_lock_where_conditions_are_ignored(place: Place, run: Path) -> None:
    """Of other services the client signs the condition, so that no proxy can leave it out."""
    target = f"{place.url}/out"
    place.proxy.plan = lambda request: Fault.UNCONDITIONAL
    with pytest.raises(TargetError, match=r"ignores conditions of uploads.*lock=False"):
        api.repartition(run, target, world_size=3)
    assert place.get() == {}
    api.repartition(run, target, world_size=3, lock=False)
    assert content(place) == local(run, 3)


@on(Moto, FakeGCS)
def test_no_lock_is_taken_over_where_the_version_is_ignored(place: Place, run: Path) -> None:
    """Two runs could take it over at once."""
    lock, requests = json.dumps(asdict(dead_process())).encode(), count()
    place.put(".streamshard.lock.out", lock)

    def ignore_all_but_the_first(request: Request) -> Fault | None:
        return Fault.UNCONDITIONAL if request.method == "PUT" and next(requests) else None

    place.proxy.plan = ignore_all_but_the_first
    with pytest.raises(TargetError, match=r"ignores conditions of uploads.*lock=False"):
        api.repartition(run, f"{place.url}/out", world_size=3)
    assert place.get() == {".streamshard.lock.out": lock}
    place.proxy.reset()
    api.repartition(run, f"{place.url}/out", world_size=3)
    assert content(place) == local(run, 3)


@on(Azurite)
def test_directories_of_azure(place: Place, run: Path) -> None:
    """Where there are some, an empty object with this attribute stands for each, for ever."""
    for key in ("out", "out/global_step7", "out.partial"):
        place.put(key, b"", hdi_isfolder="true")
    api.repartition(run, f"{place.url}/out", world_size=3)
    api.repartition(run, f"{place.url}/out", world_size=2, overwrite=True)
    found = place.get("out")
    assert {path: found[path] for path in local(run, 2)} == local(run, 2)
    assert api.inspect(f"{place.url}/out").world_size == 2


@others_than_moto
def test_nights(place: Place, tmp_path: Path) -> None:
    """Tags are archived, and their originals removed, with both sides in the bucket."""
    run = make_run(tmp_path / "run", LEAN)
    for path in run.rglob("*"):
        if path.is_file():
            place.put(f"runs/7b/{path.relative_to(run).as_posix()}", path.read_bytes())
    sides = f"{place.url}/runs/7b", f"{place.url}/archive"
    for _ in range(3):
        found = api.compact(*sides, min_age=NO_GRACE, grace=NO_GRACE, delete=True)
        assert found.exit_code == 0, found
    assert {path.partition("/")[0] for path in place.get("runs/7b")} == {
        "latest", "zero_to_fp32.py", *map(tag_of, STEPS[1:])
    }  # fmt: skip
    assert api.verify(f"{sides[1]}/{tag_of(STEPS[0])}.zarr").problems == ()

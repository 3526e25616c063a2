"""The same bytes come out with and without a cluster, for any number of workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import streamshard
from streamshard.errors import IntegrityError, UsageError
from tests.cli.conftest import tree
from tests.cluster.conftest import names, on
from tests.documents import blocks, page
from tests.fabricated import optimizer_file, write
from tests.job import Job
from tests.verbs.test_spans import CASES
from tests.verify.conftest import flip_data

pytestmark = pytest.mark.usefixtures("many_spans")


def change(path: Path, at: int) -> None:
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


ON_A_CLUSTER = {"stage 3 to 2", "from a compressed store", "compressed store", "merge"}
"""That the spans of all others can be sent is tried without a cluster, in `verbs/test_spans`."""


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What each case writes without a cluster, once."""
    found: dict[str, dict[str, Any]] = {}

    def of(case: str) -> dict[str, Any]:
        if case not in found:
            place = tmp_path_factory.mktemp("near")
            CASES[case](place, place / "out")
            found[case] = tree(place / "out")
        return found[case]

    return of


@pytest.mark.parametrize("case", [case for case in CASES if case in ON_A_CLUSTER])
def test_files_are_the_same(
    case: str,
    clusters: Any,  # noqa: ANN401
    wanted: Callable[[str], dict[str, Any]],
    tmp_path: Path,
) -> None:
    source = CASES[case].source(tmp_path)
    with streamshard.executor(clusters(2)) as chosen:
        CASES[case].write(source, tmp_path / "out")
    assert tree(tmp_path / "out") == wanted(case)
    assert sum(rate.jobs for rate in chosen.rates.values()) > 1
    assert not [name for name in names(tmp_path) if name.startswith((".", "out."))]


def test_a_target_that_is_there_already_is_compared_by_the_workers(
    cluster: Client,
    tmp_path: Path,
) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    streamshard.repartition(run, tmp_path / "out", world_size=3)
    options = {"world_size": 3, "if_needed": True, "verify": True}
    assert on(cluster, "repartition", run, tmp_path / "out", **options).found == "target"
    path = optimizer_file(tmp_path / "out", 2)
    change(path, -2000)
    with pytest.raises(streamshard.StreamshardError, match=r"exists; use overwrite=True") as caught:
        on(cluster, "repartition", run, tmp_path / "out", **options)
    assert path.name in "".join(caught.value.__notes__)


def test_what_the_page_shows_works(
    cluster: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(Job(stage=2), tmp_path / "runs" / "7b")
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks(page("clusters"), "python")
    exec(shown.replace("tcp://scheduler:8786", cluster.scheduler_info()["address"]), {})
    assert not streamshard.verify("7b.zarr").problems


def test_a_store_in_one_file_is_written_by_threads_alone(cluster: Client, tmp_path: Path) -> None:
    run = write(Job(stage=2), tmp_path / "run")
    with (
        streamshard.executor(cluster),
        pytest.raises(UsageError, match="written by threads, not by a cluster"),
    ):
        streamshard.convert(run, tmp_path / "x.zarr.zip")
    assert names(tmp_path) == ["run"]


def test_a_flipped_bit_of_the_source_is_not_carried(cluster: Client, tmp_path: Path) -> None:
    """Each worker sees a part of the record."""
    run = write(Job(stage=2), tmp_path / "run")
    flip_data(optimizer_file(run, 1))
    with pytest.raises(IntegrityError, match="was recorded when they were saved"):
        on(cluster, "repartition", run, tmp_path / "out", world_size=3)
    assert names(tmp_path) == ["run"]

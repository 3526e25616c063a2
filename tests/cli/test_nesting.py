"""Client state that is nested deeply, or holds itself, survives a store as it survives shards."""

from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.errors import UnsupportedError
from tests.cli.conftest import optimizer_file, streamshard
from tests.fabricated import edit, write, write_dumps
from tests.job import Job


def nested(depth: int, kind: type) -> Any:  # noqa: ANN401
    node: Any = "innermost"
    for _ in range(depth):
        node = {"k": node} if kind is dict else kind([node])
    return node


def in_itself(kind: type) -> Any:  # noqa: ANN401
    node: Any = kind()
    if kind is dict:
        node["self"] = node
    else:
        node.append(node)
    return node


def doubled() -> list[Any]:
    node: list[Any] = []
    for _ in range(40):
        node = [node, node]
    return node


STATES = {
    # torch.save itself ends at some 490.
    "lists": nested(450, list),
    "dicts": nested(450, dict),
    "tuples": nested(190, tuple),
    "a dict in itself": in_itself(dict),
    "a list in itself": in_itself(list),
    "twice and twice": doubled(),
}


def files_below(place: Path) -> dict[str, bytes]:
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*.pt")}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_store_keeps_what_shards_keep(tmp_path: Path, stage: int) -> None:
    run = write(Job(stage=stage, client_state=STATES), tmp_path / "run")
    store, direct, back = (tmp_path / name for name in ("x.zarr", "direct", "back"))
    again = tmp_path / "again.zarr"
    for command in (
        ("repartition", run, direct, "--world-size", 3),
        ("convert", run, store),
        ("verify", store, "--against", run),
        ("inspect", store),
        ("diff", store, direct),
        ("repartition", store, back, "--world-size", 3),
        ("convert", store, again),
        ("verify", back, "--against", again),
    ):
        done = streamshard(*command)
        assert done.code == 0, done.err
    assert files_below(direct) == files_below(back) != {}


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    """In dumps the optimizer's own dict stands at the top, in a store it stands deeper."""
    run = write(Job(), tmp_path / "run")
    for rank in range(2):
        path = optimizer_file(run, rank)
        edit(path, lambda root: root["optimizer_state_dict"]["base_optimizer_state"][
            "param_groups"][0].update(mine=nested(97, list)))  # fmt: skip
    template = write_dumps(run, tmp_path / "dumps")
    with pytest.raises(UnsupportedError, match=r"100 deep; 'streamshard repartition'") as raised:
        api.convert(template, tmp_path / "x.zarr")
    assert str(tmp_path / "dumps") in str(raised.value)
    assert not [path for path in tmp_path.iterdir() if "x.zarr" in path.name]
    api.repartition(template, tmp_path / "out" / "{rank}.pt", world_size=3)

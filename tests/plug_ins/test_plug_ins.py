"""Which readers are asked, and what becomes of those of other packages that cannot be trusted."""

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

import streamshard
from streamshard import reader, registry
from streamshard.cli.main import main
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    SourceError,
    StreamshardError,
    UnsupportedError,
    UsageError,
)
from streamshard.reader import (
    Contents,
    FormatReader,
    ParamStates,
    RecordedSum,
    StoredBox,
    StoredTensor,
)
from streamshard.source import plug_ins
from tests.documents import ROOT
from tests.fabricated import write
from tests.job import Job

VALUES = np.arange(12, dtype=np.float32).reshape(4, 3)


class RawReader(FormatReader):
    """Reads one tensor in a file `raw`, as its test says."""

    version = reader.VERSION
    name = "raw"
    title = "a directory with a raw file"
    contents: ClassVar[Callable[[Path], Any]]

    def recognizes(self, directory: Path) -> bool:
        return reader.is_file(directory / "raw")

    def read(self, directory: Path) -> Contents:
        found: Contents = RawReader.contents(directory)
        return found


def contents(directory: Path) -> Contents:
    path = directory / "raw"
    weight, moment = (StoredTensor.whole("float32", (4, 3), path, at) for at in (0, 48))
    group = ParamStates(["w"], {"lr": 0.1}, {"exp_avg": {"w": moment}}, {"step": 3})
    return Contents({"w": weight}, [group], notes=["A note of the reader."])


RAW = RawReader()


@pytest.fixture(autouse=True)
def _readers() -> Iterator[None]:
    RawReader.contents = contents
    plug_ins._installed.cache_clear()
    yield
    plug_ins._installed.cache_clear()


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Let metadata say that a package has a reader."""

    def add(package: str = "raw-reader", value: str = f"{__name__}:RAW") -> None:
        place = tmp_path / package
        place.mkdir()
        info = place / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[streamshard.readers]\nraw = {value}\n")
        monkeypatch.syspath_prepend(place)

    return add


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    place = tmp_path / "saved"
    place.mkdir()
    (place / "raw").write_bytes(VALUES.tobytes() + (VALUES + 100).tobytes())
    return place


def test_our_readers_are_declared_as_those_of_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"][plug_ins._GROUP]
    assert tuple(declared.values()) == registry._READERS


def test_a_reader_of_another_package_is_asked(saved: Path, install: Install) -> None:
    install()
    with streamshard.open(saved) as checkpoint:
        assert checkpoint["w"].fp32.numpy().tobytes() == VALUES.tobytes()
        assert checkpoint["w"].exp_avg.numpy().tobytes() == (VALUES + 100).tobytes()
    found = streamshard.inspect(saved)
    assert (found.kind, found.world_size) == ("raw", 1)
    assert "A note of the reader." in found.notes
    assert main(["verify", str(saved)]) == 0


def test_without_it_nothing_is_known(saved: Path) -> None:
    with pytest.raises(SourceError, match="no 'latest' file and no shards in it"):
        streamshard.inspect(saved)


@pytest.mark.parametrize(("setting", "error"), [("own", SourceError), ("ours", UsageError)])
def test_no_other_reader_is_asked_if_so_set(
    saved: Path,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    error: type[StreamshardError],
) -> None:
    install()
    monkeypatch.setenv("STREAMSHARD_READERS", setting)
    with pytest.raises(error):
        streamshard.inspect(saved)


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_metadata_is_not_read_for_what_ours_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def refuse(**_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(metadata, "entry_points", refuse)
    monkeypatch.setattr(plug_ins, "entry_points", refuse)
    run = write(Job(stage=2), tmp_path / "run")
    (tmp_path / "run" / "latest").unlink()
    for path in (run, next(path for path in run.iterdir() if path.is_dir())):
        assert main([verb, str(path)]) in (0, 3)


def test_ours_are_asked_first(tmp_path: Path, install: Install) -> None:
    install()
    run = write(Job(stage=2), tmp_path / "run")
    (run / "raw").write_bytes(b"")
    assert streamshard.inspect(run).kind == "native"


def test_two_readers_of_one_kind_are_refused(saved: Path, install: Install) -> None:
    install()
    install("another")
    with pytest.raises(UsageError, match="another and raw-reader have a reader of the kind 'raw'"):
        streamshard.inspect(saved)


class SameReader(RawReader):
    name = "same"


SAME = SameReader()


class OwnKindReader(RawReader):
    name = "dcp"


OWN_KIND = OwnKindReader()


class NewerReader(RawReader):
    name = "newer"
    version = reader.VERSION + 1


NEWER = NewerReader()


def test_two_readers_of_one_checkpoint_are_refused(saved: Path, install: Install) -> None:
    install()
    install("another", f"{__name__}:SAME")
    with pytest.raises(
        UsageError, match=r"by the readers of another and raw-reader\. Uninstall one"
    ):
        streamshard.inspect(saved)


def test_a_reader_of_a_kind_of_ours_is_refused(saved: Path, install: Install) -> None:
    install(value=f"{__name__}:OWN_KIND")
    with pytest.raises(UsageError, match="streamshard and raw-reader have a reader of the kind"):
        streamshard.inspect(saved)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:READER", "ModuleNotFoundError"),
        (f"{__name__}:NO_SUCH_NAME", "AttributeError"),
        (f"{__name__}:VALUES", "no instance of streamshard.reader.FormatReader"),
        (f"{__name__}:NEWER", "version 2 of streamshard.reader, this is version 1"),
    ],
)
def test_a_reader_that_cannot_be_used_is_a_note(
    saved: Path,
    tmp_path: Path,
    install: Install,
    capsys: pytest.CaptureFixture[str],
    value: str,
    why: str,
) -> None:
    install("broken", value)
    for verb in ("inspect", "verify"):
        assert main([verb, str(saved)]) in (3, 6)
        shown = capsys.readouterr()
        assert "The reader 'raw' of broken is not used" in shown.err + shown.out
        assert why in shown.err + shown.out
    install()
    plug_ins._installed.cache_clear()
    assert any(why in note for note in streamshard.inspect(saved).notes)


def test_what_its_code_raises_is_an_error_about_the_files(saved: Path, install: Install) -> None:
    install()
    RawReader.contents = lambda _: {"a": 1}["offset"]
    where = r"'raw' of raw-reader failed \(KeyError\('offset'\) in test_plug_ins\.py, line \d+\)"
    with pytest.raises(CorruptFileError, match=where):
        streamshard.inspect(saved)


class FailingReader(RawReader):
    name = "failing"

    def recognizes(self, directory: Path) -> bool:
        raise ZeroDivisionError(directory)


FAILING = FailingReader()


def test_a_reader_that_fails_does_not_stop_the_others(saved: Path, install: Install) -> None:
    install("failing", f"{__name__}:FAILING")
    with pytest.raises(SourceError) as caught:
        streamshard.inspect(saved)
    (note,) = caught.value.__notes__
    assert "reader 'failing' of failing failed (ZeroDivisionError" in note
    install()
    plug_ins._installed.cache_clear()
    notes = streamshard.inspect(saved).notes
    assert len([note for note in notes if "ZeroDivisionError" in note]) == 1


def test_verify_tells_what_the_reader_finds(
    saved: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setattr(RawReader, "problems", lambda *_: ["two of its files disagree"])
    (problem,) = streamshard.verify(saved).problems
    assert problem.message == f"{saved}: two of its files disagree"


def whole(path: Path, **changed: Any) -> StoredTensor:  # noqa: ANN401
    return replace(StoredTensor.whole("float32", (4, 3), path / "raw", 0), **changed)


def weights(**found: StoredTensor) -> Contents:
    return Contents(found)


def piece(at: Path, /, **changed: Any) -> Contents:  # noqa: ANN401
    tensor = whole(at)
    return weights(w=replace(tensor, boxes=[replace(tensor.boxes[0], **changed)]))


def group(path: Path, **changed: Any) -> Contents:  # noqa: ANN401
    found = contents(path)
    return replace(found, groups=[replace(found.groups[0], **changed)])


def state(path: Path, name: str, parameter: str, tensor: StoredTensor | None = None) -> Contents:
    return group(path, states={name: {parameter: tensor or whole(path)}})


def sums(path: Path, *ranges: tuple[int, int, int]) -> Contents:
    return replace(contents(path), sums=[RecordedSum(path / "raw", *one) for one in ranges])


HOSTILE: dict[str, tuple[Callable[[Path], Any], type[SourceError], str]] = {
    "no contents": (lambda _: None, CorruptFileError, "the reader 'raw' of raw-reader failed"),
    "a name": (lambda p: weights(**{"\ud800": whole(p)}), CorruptFileError, "not a name"),
    "a dtype": (lambda p: weights(w=whole(p, dtype="float31")), CorruptFileError, "float31"),
    "a quantised dtype": (lambda p: weights(w=whole(p, dtype="qint8")), CorruptFileError, "qint8"),
    "a shape": (lambda p: weights(w=whole(p, shape=(4, -3))), CorruptFileError, "not a shape"),
    "too large a shape": (
        lambda p: weights(w=whole(p, shape=(1 << 40, 1 << 40))), CorruptFileError, "not a shape",
    ),
    "no piece": (lambda p: weights(w=whole(p, boxes=[])), CorruptFileError, "no box holds"),
    "dimensions": (lambda p: piece(p, start=(0,)), CorruptFileError, "has 1 and 2 dimensions"),
    "a gap": (lambda p: piece(p, shape=(3, 3)), CorruptFileError, "no box holds"),
    "out of the tensor": (lambda p: piece(p, start=(1, 0)), CorruptFileError, "reaches out of"),
    "behind the file's end": (
        lambda p: piece(p, offset=52), CorruptFileError, "takes 48 bytes from 52 on, it has 96",
    ),
    "a negative offset": (lambda p: piece(p, offset=-4), CorruptFileError, "from -4 on"),
    "an offset of text": (lambda p: piece(p, offset="0"), CorruptFileError, "from '0' on"),
    "a missing file": (lambda p: piece(p, path=p / "none"), IncompleteError, "missing"),
    "a file elsewhere": (
        lambda p: piece(p, path=p / ".." / "other"), SourceError, "leads out of",
    ),
    "an option": (lambda p: group(p, options={"x": VALUES}), CorruptFileError, "'x' cannot be"),
    "a rate": (lambda p: group(p, options={"lr": "1"}), CorruptFileError, "'lr' cannot be '1'"),
    "a step": (lambda p: group(p, values={"step": 1.5}), CorruptFileError, "no count of steps"),
    "an early step": (lambda p: group(p, values={"step": -1}), CorruptFileError, "-1, which is no"),
    "a value": (lambda p: group(p, values={"step": "3"}), CorruptFileError, "no number"),
    "a flag as a value": (lambda p: group(p, values={"step": True}), CorruptFileError, "no number"),
    "a state's name": (lambda p: state(p, "fp32", "w"), CorruptFileError, "cannot be the name"),
    "a state twice": (lambda p: state(p, "step", "w"), CorruptFileError, "or is there twice"),
    "a state of another": (lambda p: state(p, "exp_avg", "v"), CorruptFileError, "not in its"),
    "a state's shape": (
        lambda p: state(p, "exp_avg", "w", whole(p, shape=(2, 3), boxes=[
            StoredBox(p / "raw", 0, (0, 0), (2, 3)),
        ])),
        DisagreementError, "its weight is",
    ),
    "a parameter twice": (
        lambda p: group(p, params=["w", "w"]), CorruptFileError, "in 2 param groups",
    ),
    "a parameter that is not there": (
        lambda p: group(p, params=["w", "v"]), SourceError, "which no model in it has",
    ),
    "ranks": (lambda p: replace(contents(p), ranks=-1), CorruptFileError, "no count of ranks"),
    "a sum of nothing": (lambda p: sums(p, (8, 8, 0)), CorruptFileError, "empty"),
    "sums that overlap": (lambda p: sums(p, (0, 8, 0), (4, 9, 0)), CorruptFileError, "share"),
    "a sum behind the end": (lambda p: sums(p, (90, 97, 0)), CorruptFileError, "it has 96"),
    "a sum that is none": (lambda p: sums(p, (0, 9, -1)), CorruptFileError, "no checksum"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_what_it_says_is_checked(saved: Path, install: Install, case: str) -> None:
    install()
    (saved.parent / "other").write_bytes(bytes(96))
    said, error, message = HOSTILE[case]
    RawReader.contents = said
    with pytest.raises(error, match=message):
        streamshard.inspect(saved)


def test_a_recorded_checksum_is_compared(saved: Path, install: Install, tmp_path: Path) -> None:
    install()
    RawReader.contents = lambda path: sums(path, (0, 48, 1))
    (problem,) = streamshard.verify(saved).problems
    assert problem.kind == "damaged"
    assert main(["export", str(saved), str(tmp_path / "out")]) == 6
    assert not (tmp_path / "out").exists()


def test_shapes_may_be_lists_as_json_has_them(saved: Path, install: Install) -> None:
    install()
    listed: Any = [4, 3]
    tensors = {at: StoredTensor.whole("float32", listed, saved / "raw", at) for at in (0, 48)}
    weight, moment = (replace(tensor, shape=listed) for tensor in tensors.values())
    RawReader.contents = lambda path: replace(
        state(path, "exp_avg", "w", moment), weights={"w": weight}
    )
    with streamshard.open(saved) as checkpoint:
        assert checkpoint["w"].exp_avg.numpy().tobytes() == (VALUES + 100).tobytes()


def test_states_that_options_ask_for_are_missing(
    saved: Path, install: Install, tmp_path: Path
) -> None:
    install()
    options = {"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": True, "foreach": None}
    RawReader.contents = partial(group, options=options)
    zero, optimizer = {"stage": 2}, {"type": "AdamW", "params": {"torch_adam": True}}
    config = {"zero_optimization": zero, "optimizer": optimizer}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="max_exp_avg_sq, which amsgrad keeps"):
        streamshard.repartition(
            saved, tmp_path / "out", world_size=2, ds_config_file=tmp_path / "ds.json"
        )


def test_weights_of_16_bits_that_no_group_has_are_not_cast(
    saved: Path, install: Install, tmp_path: Path
) -> None:
    install()
    RawReader.contents = lambda path: weights(w=whole(path, dtype="bfloat16"))
    with pytest.raises(UsageError, match="raw file, which does not tell which master weights"):
        streamshard.export(saved, tmp_path / "out")


def test_what_torch_saved_is_read_without_running_it(tmp_path: Path) -> None:
    import torch

    tree = {"w": torch.arange(6.0).reshape(2, 3), "rest": [1, ("a", torch.tensor(2)), None]}
    torch.save({**tree, "job": Ran()}, tmp_path / "x.pt")
    found = reader.read_torch(tmp_path / "x.pt")
    tensor = found["w"]
    assert (tensor.dtype, tensor.shape) == ("float32", (2, 3))
    data = reader.read_at(tmp_path / "x.pt", tensor.boxes[0].offset, 24)
    assert data == np.arange(6, dtype=np.float32).tobytes()
    assert found["rest"][0] == 1
    assert found["rest"][1][1].dtype == "int64"
    assert RAN == []
    assert "Ran" in repr(found["job"]) or reader.show(found["job"])


def test_what_safetensors_hold_is_where_the_library_says(tmp_path: Path) -> None:
    save_file({"w": VALUES, "v": VALUES[0]}, tmp_path / "x.safetensors")
    found = reader.read_safetensors(tmp_path / "x.safetensors")
    assert {name: tensor.shape for name, tensor in found.items()} == {"w": (4, 3), "v": (3,)}
    (box,) = found["w"].boxes
    assert reader.read_at(box.path, box.offset, VALUES.nbytes) == VALUES.tobytes()


RAN: list[int] = []


class Ran:
    def __reduce__(self) -> tuple[object, ...]:
        return RAN.append, (1,)


def test_ranges_behind_the_end_and_bad_json_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('{"a": 1, "a": 2}')
    with pytest.raises(CorruptFileError, match="holds a key twice"):
        reader.read_json(path)
    for start, nbytes in ((0, 17), (16, 1), (-1, 2), (3, -1)):
        with pytest.raises(CorruptFileError, match="it has 16"):
            reader.read_at(path, start, nbytes)
    assert reader.read_at(path, 15, 1) == b"}"

"""What must not get into a log: passwords in URLs, and line breaks that forge lines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import streamshard
from tests.fabricated import write
from tests.forked import Finished
from tests.job import Job

URLS = (
    "s3://user:SECRET@bucket/x",
    "s3:/user:SECRET@bucket/x",
    "s3://user:SECRET@bucket",
    "s3://user:SECRET@bucket/x?versionId=3",
    "s3://bucket/x?X-Amz-Signature=SECRET",
    "s3://user:SEC/RET@bucket/x",
    "S3://user:SECRET@bucket/x",
    "s3a://user:SECRET@bucket/x",
    "gs://SECRET@bucket/x",
    "https://user:SECRET@localhost/x",
    "https://localhost/x#SECRET",
    "file://user:SECRET@host/x",
)


COMMANDS = (
    ["inspect", "{url}"],
    ["verify", "{url}", "--against", "x"],
    ["repartition", "{url}", "out", "--world-size", "2"],
    ["repartition", ".", "{url}", "--world-size", "2"],
    ["repartition", ".", "out", "--world-size", "2", "--like", "{url}"],
    ["convert", ".", "out", "too", "{url}"],
    ["inspect", "--{url}"],
    ["{url}"],
    ["compact", "{url}", "{url}", "--dry-run"],
    ["apply", "{url}"],
)


@pytest.mark.parametrize("url", URLS)
def test_no_secret_is_printed(
    url: str, in_process: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        done = in_process(*(word.format(url=url) for word in command))
        assert done.code in (2, 3), command
        assert done.err
        for secret in ("SECRET", "SEC/RET", "RET@"):
            assert secret not in done.out + done.err, command


@pytest.mark.parametrize("letter", ["\n", "\r", "\x1b", "\x85"])
def test_a_line_break_in_a_path_makes_no_line(tmp_path: Path, letter: str) -> None:
    forged = "streamshard: forged"
    run = write(Job(stage=2, world_size=2, parts=1), tmp_path / f"a{letter}{forged}")
    out = tmp_path / f"b{letter}{forged}"
    for command in (
        ["inspect", run],
        ["inspect", tmp_path / f"none{letter}{forged}"],
        ["verify", run],
        ["repartition", run, out, "--world-size", "3"],
        ["repartition", run, out, "--world-size", "3"],
        ["diff", run, out],
        ["inspect", run, "--pickles"],
        ["verify", run, "--against", out],
        ["inspect", f"--x{letter}{forged}"],
    ):
        done = streamshard(*command)
        for line in (done.out + done.err).replace("\r", "\n").replace("\x85", "\n").split("\n"):
            assert not line.startswith(forged), command
        assert "\x1b" not in done.out + done.err

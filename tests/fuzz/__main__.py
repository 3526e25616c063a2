"""Fuzz one reader: `python -m tests.fuzz TARGET [libFuzzer's options]`, or `nox -s fuzz`.

What is found is written to the current directory; make it smaller with `-minimize_crash=1`, and
keep it in `tests/fuzz/findings/TARGET`, from where the tests replay it. The corpus grows in
`.fuzz/TARGET`, so that the next run goes on where this one ends.
"""

import importlib
import sys
import tempfile
from hashlib import sha1
from pathlib import Path
from typing import Any

LIMITS = ("-timeout=20", "-rss_limit_mb=2048", "-malloc_limit_mb=512", "-max_len=65536")


def main() -> None:
    """Make the seeds, instrument the package, and hand over to libFuzzer."""
    name, *options = sys.argv[1:]
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["streamshard"]):
        targets = importlib.import_module("tests.fuzz.targets")
    seeds = importlib.import_module("tests.fuzz.seeds")
    corpus = Path(".fuzz", name)
    corpus.mkdir(parents=True, exist_ok=True)
    findings = Path(__file__).parent / "findings" / name
    inputs = [str(place) for place in (corpus, findings) if place.is_dir()]
    with tempfile.TemporaryDirectory() as directory:
        harness = targets.Harness(name, Path(directory))
        for data in seeds.seeds(Path(directory))[name]:
            (corpus / sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
            harness.try_one(data)
        atheris.Setup([sys.argv[0], *LIMITS, *options, *inputs], harness.try_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

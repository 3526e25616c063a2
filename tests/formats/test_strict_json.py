"""JSON that readers may understand in several ways is refused."""

import json

import pytest

from streamshard.formats.strict_json import parse

DOCUMENT = {"a": [1, 2.5, None, True, "\u00e9"], "b": {"a": {}}}


def test_what_is_json_is_read() -> None:
    assert parse(json.dumps(DOCUMENT).encode()) == DOCUMENT
    assert parse(json.dumps(DOCUMENT, ensure_ascii=False).encode()) == DOCUMENT


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "a key twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[" * 100_000, "nested too deeply"),
        (json.dumps(DOCUMENT).encode("utf-32"), "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": 1', "delimiter"),
        (b"", "Expecting value"),
    ],
)
def test_the_rest_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(data)

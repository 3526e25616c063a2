"""The S3 server answers."""

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from tests.cloud.server import S3Server, credentials


def test_server_keeps_an_object_and_refuses_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as server:
        for name, value in credentials(server.url).items():
            monkeypatch.setenv(name, value)
        store = S3Store(server.new_bucket("one"))
        obstore.put(store, "a", b"abc", mode="create")
        assert bytes(obstore.get(store, "a").bytes()) == b"abc"
        with pytest.raises(AlreadyExistsError):
            obstore.put(store, "a", b"abc", mode="create")

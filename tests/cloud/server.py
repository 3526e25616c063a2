"""An S3 server on this machine, for tests of object stores."""

import logging
import threading
from functools import cache, partial
from itertools import count
from typing import Any, Self

import boto3  # type: ignore[import-untyped, unused-ignore]
from botocore.config import Config  # type: ignore[import-untyped, unused-ignore]
from moto.moto_server.werkzeug_app import (  # type: ignore[import-untyped, unused-ignore]
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

from tests.cloud.proxy import POLL_SECONDS, FaultProxy

REGION = "us-east-1"
KEY = "test-key"
SECRET = "test-secret"

_numbers = count()


def credentials(url: str) -> dict[str, str]:
    """Return the environment variables with which a client reaches the server at `url`."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ALLOW_HTTP": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def s3_client(url: str, key: str = KEY, secret: str = SECRET) -> Any:  # noqa: ANN401
    """Return a client of a server, for what is no business of streamshard's."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(retries={"max_attempts": 1}),
    )


class Dispatcher(DomainDispatcherApplication):
    """Lists the directory of all of moto's services once, not for each request."""

    get_backend_for_host = cache(DomainDispatcherApplication.get_backend_for_host)


class S3Server:
    """Runs moto's S3 server in threads of this process. Buckets share moto's global state."""

    name = "moto"

    def __init__(self) -> None:
        # werkzeug writes a line for every request.
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        app, handler = Dispatcher(create_backend_app), MotoRequestHandler
        self._server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=handler)
        serve = partial(self._server.serve_forever, POLL_SECONDS)
        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.port}"
        self.s3 = s3_client(self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def new_bucket(self, prefix: str) -> str:
        """Make an empty bucket and return its name, which no other bucket of this process has.

        Servers share moto's state, and to pytest a `conftest` that is imported by another folder is
        a module of its own, with a count of its own. So the count is here.
        """
        name = f"{prefix}{next(_numbers)}"  # a hyphen is written %2D by the client of gs://
        self.s3.create_bucket(Bucket=name)
        return name

    def make_bucket(self, name: str) -> str:
        """Make a bucket whose name begins so, and return its URL."""
        return f"s3://{self.new_bucket(name)}"

    def credentials(self, url: str) -> dict[str, str]:
        """Return the environment variables with which a client reaches the server at a URL."""
        return credentials(url)

    def proxy(self) -> FaultProxy:
        """Return a proxy in front of the server."""
        return FaultProxy(self.url)

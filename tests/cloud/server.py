"""An S3 server on this machine, for tests of object stores."""

import logging
import threading
from functools import cache
from itertools import count
from types import TracebackType
from typing import Any, Self

import boto3  # type: ignore[import-untyped, unused-ignore]
from moto.moto_server.werkzeug_app import (  # type: ignore[import-untyped, unused-ignore]
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

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


class Dispatcher(DomainDispatcherApplication):
    """Lists the directory of all of moto's services once, not for each request."""

    get_backend_for_host = cache(DomainDispatcherApplication.get_backend_for_host)


class S3Server:
    """Runs moto's S3 server in threads of this process. Buckets share moto's global state."""

    def __init__(self) -> None:
        # werkzeug writes a line for every request.
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        app, handler = Dispatcher(create_backend_app), MotoRequestHandler
        self._server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.port}"

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the server."""
        self.stop()

    def new_bucket(self, prefix: str) -> str:
        """Make an empty bucket and return its name, which no other bucket of this process has.

        Servers share moto's state, and to pytest a `conftest` that is imported by another folder is
        a module of its own, with a count of its own. So the count is here.
        """
        name = f"{prefix}{next(_numbers)}"  # a hyphen is written %2D by the client of gs://
        client: Any = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )
        client.create_bucket(Bucket=name)
        return name

    def stop(self) -> None:
        """Stop the server and wait for its thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

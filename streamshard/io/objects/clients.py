"""Clients of object stores: obstore's, one for each bucket, configured by the environment alone."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamshard.errors import UsageError
from streamshard.io.objects.object_path import ObjectPath
from streamshard.io.retry import try_again

if TYPE_CHECKING:
    from obstore.store import ObjectStore

RETRIES: Final[dict[str, Any]] = {"max_retries": 10, "retry_timeout": timedelta(minutes=3)}
"""How often, and for how long, obstore repeats a request that failed by 429, 5xx or the network."""
_FIRST_TIMEOUT: Final = {"retry_timeout": timedelta(seconds=5)}
"""How long it does so before a service has answered at all: perhaps its address is wrong."""
_answered: Final[set[str]] = set()
"""Buckets about which their service has answered this process."""
_silent: Final[set[str]] = set()
"""Buckets about which it has not answered, though it was asked for half a minute."""
_TIMEOUTS: Final = {"timeout": "120s", "connect_timeout": "15s"}
"""For all of one request, its body included."""

_VARIABLES: Final = {
    "s3": "AWS_REGION, AWS_ENDPOINT_URL and AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME",
}
"""What configures a client, by scheme, for messages."""
_ADDRESSES: Final = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    "gs": ("GOOGLE_BASE_URL", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""What may give the address of another service than the provider's, by scheme."""
_STATUS: Final = re.compile(r"status code: (\d+)")
_CONNECTION: Final = re.compile(r"HTTP|body|connect|timed? ?out|request", re.IGNORECASE)
"""What obstore's texts have in them if a connection failed, and not a call of ours."""
_REASON: Final = re.compile(r"error: ([\w ]{1,60})$", re.MULTILINE)
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_MEANINGS: Final = {
    "AlreadyExistsError": (errno.EEXIST, "exists already"),
    "PreconditionError": (errno.EBUSY, "is another object than before"),
    "InvalidPathError": (errno.EINVAL, "a key has an empty segment, '.' or '..', and is no path"),
}
"""Error of obstore → error number and text."""
_DENIED: Final = (401, 403)
_MISSING: Final = 404


@cache
def client_of(bucket: str) -> "ObjectStore":
    """Return the client of a bucket, such as `s3://checkpoints`.

    Raises
    ------
    UsageError
        obstore is not installed, or the environment does not configure it.
    """
    return _make_client(bucket, RETRIES)


def _make_client(bucket: str, retries: dict[str, Any]) -> "ObjectStore":
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        message = f"{bucket}: needs obstore: pip install 'streamshard[cloud]'"
        raise UsageError(message) from None
    options: dict[str, Any] = {
        "client_options": {**_TIMEOUTS, **_plain_http(bucket)},
        "retry_config": retries,
    }
    if bucket.startswith("s3:"):
        options |= {"checksum_algorithm": "SHA256", **_profile()}
    try:
        return from_url(bucket, **options)
    except (BaseError, ValueError, TypeError) as error:
        message = f"{bucket}: its client cannot be configured ({type(error).__name__})"
        raise UsageError(f"{message}; look at {_variables_of(bucket)}") from None


def _variables_of(bucket: str) -> str:
    return _VARIABLES.get(bucket.partition(":")[0], "the environment variables of that service")


def _plain_http(bucket: str) -> dict[str, bool]:
    """Allow HTTP without TLS where the address, which the user gave, says so."""
    names = _ADDRESSES.get(bucket.partition(":")[0], ())
    addresses = [bucket, *(os.environ.get(name, "") for name in names)]
    # A key of Google's service account may have the address in it.
    is_plain = any(one.startswith("http:") or '"http:' in one for one in addresses)
    return {"allow_http": True} if is_plain else {}


def _profile() -> dict[str, Any]:
    """Take credentials from AWS's own files if the environment holds none, and boto3 is there."""
    places = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")
    files = [os.environ.get(name) for name in places]
    files += [str(Path.home() / ".aws" / name) for name in ("credentials", "config")]
    if "AWS_ACCESS_KEY_ID" in os.environ or not any(f and Path(f).exists() for f in files):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return {}
    return {"credential_provider": Boto3CredentialProvider()}


@contextmanager
def _object_errors(path: ObjectPath) -> Iterator[None]:
    """Turn obstore's errors into system errors that name the object.

    Their texts are left out: a service's answer may repeat the access key, and a URL a signature.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        text = os.strerror(errno.ENOENT)
        raise FileNotFoundError(errno.ENOENT, text, str(path)) from None
    except BaseError as error:
        number, text = _meaning(error)
        raise OSError(number, text, str(path)) from None


def _meaning(error: Exception) -> tuple[int, str]:
    """Return an error number and a text for an error of obstore."""
    text, kind = str(error), type(error).__name__
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    code = _CODE.search(text)
    shown = ", ".join(filter(None, [f"status {status}" if status else "", code[1] if code else ""]))
    if kind in _MEANINGS:
        return _MEANINGS[kind]
    # Of an object among several that are removed together only the code tells.
    is_denied = status in _DENIED or "AccessDenied" in text
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or is_denied:
        return errno.EACCES, f"access denied{f' ({shown})' if shown else ''}"
    if kind == "NotSupportedError" or (code and code[1] == "NotImplemented"):
        return errno.ENOTSUP, f"the service cannot do this ({shown or kind})"
    if status == _MISSING:
        return errno.ENOENT, f"{os.strerror(errno.ENOENT)} ({shown})"
    if status:
        return errno.EIO, f"the service answers with {shown}"
    if "redentials" in text or "metadata" in text:
        return errno.EACCES, "no credentials are found in the environment"
    if _CONNECTION.search(text):
        return errno.ECONNRESET, "the connection failed, or ended too early"
    reason = _REASON.search(text)
    return errno.EPROTO, f"obstore does not do this ({reason[1] if reason else kind})"


def quoted(etag: str | None) -> str:
    """Return an ETag as HTTP writes it; listings of Azure leave its quotes out. Empty for none."""
    if not etag:
        return ""
    return etag if etag.startswith(('"', "W/")) else f'"{etag}"'


def call(
    path: ObjectPath,
    request: Callable[["ObjectStore"], Any],
    *,
    repeats: bool = True,
) -> Any:  # noqa: ANN401
    """Send a request about an object.

    obstore itself repeats a request that the service could not serve. Here it is repeated if the
    connection broke, or the answer ended too early.

    Parameters
    ----------
    repeats
        Whether the request can be repeated; not if its content comes from an iterator.

    Raises
    ------
    OSError
        It failed; the error names the object. FileNotFoundError if there is no such object.
    """

    def once() -> Any:  # noqa: ANN401
        is_first = path.bucket not in _answered
        client = (
            _make_client(path.bucket, RETRIES | _FIRST_TIMEOUT)
            if is_first
            else client_of(path.bucket)
        )
        try:
            with _object_errors(path):
                found = request(client)
        except ConnectionResetError:
            raise
        except OSError as error:
            _answered.add(path.bucket)
            if is_first and repeats and error.errno == errno.EIO:
                return once()  # it answers, if only that it is busy: this may take longer
            raise
        _answered.add(path.bucket)
        return found

    try:
        return try_again(once) if repeats and path.bucket not in _silent else once()
    except ConnectionResetError:
        if path.bucket in _answered:
            raise
        _silent.add(path.bucket)
        text = f"its service does not answer; look at {_variables_of(path.bucket)}"
        raise OSError(errno.ECONNREFUSED, text, str(path)) from None


def together(*questions: Callable[[], Any]) -> list[Any]:
    """Return the answers of some questions that take a request or more each, asked side by side."""
    with ThreadPoolExecutor(len(questions)) as pool:
        # The listings that are kept belong to a context.
        asked = [pool.submit(copy_context().run, question) for question in questions]
        return [future.result() for future in asked]

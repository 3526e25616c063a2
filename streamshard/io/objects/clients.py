"""Clients of object stores: obstore's, one for each bucket, configured by the environment alone."""

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import timedelta
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamshard.errors import UsageError
from streamshard.io.object_path import ObjectPath
from streamshard.io.readable import absent
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
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_BASE_URL and STORAGE_EMULATOR_HOST",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ENDPOINT",
}
"""What configures a client, by scheme, for messages."""
_ADDRESSES: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables that hold the address of a service, by scheme."""
_GOOGLE_EMULATOR: Final = "STORAGE_EMULATOR_HOST"
"""Variable of Google's own libraries, which obstore does not read."""
_GOOGLE_ADDRESS: Final = "GOOGLE_BASE_URL"
_GOOGLE_UNSIGNED: Final = "GOOGLE_SKIP_SIGNATURE"
_YES: Final = frozenset({"1", "true", "on", "yes", "y"})
"""What obstore takes for yes."""
_GOOGLE_KEY: Final = "GOOGLE_SERVICE_ACCOUNT_KEY"
"""Variable that holds the content of such a file."""
_GOOGLE_ACCOUNTS: Final = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
"""Variables that name a file, which may hold an address (`gcs_base_url`)."""
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
_LASTING: Final = (
    (
        re.compile(r"non-partial response|Range request not supported|Content-Range header"),
        errno.ENOTSUP,
        (
            "the service does not answer a request for a range by status 206 and that range; "
            "without ranges nothing can be read from it"
        ),
    ),
    (
        re.compile("redirect without LOCATION"),
        errno.ENXIO,
        "the service redirects to an unknown place, as it does for a bucket of another region",
    ),
)
"""What obstore says of errors without a status that no further try mends → their meaning."""
_DENIED: Final = (401, 403)
_MISSING: Final = 404
_NOT_OFFERED: Final = (405, 501)
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
"""Error codes of S3, Google and Azure."""


@cache
def client_of(bucket: str) -> "ObjectStore":
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
    if bucket.startswith("gs:"):
        options |= _google_emulator()
    try:
        return from_url(bucket, **options)
    except (BaseError, ValueError, TypeError) as error:
        message = f"{bucket}: its client cannot be configured ({type(error).__name__})"
        raise UsageError(f"{message}; look at {_variables_of(bucket)}") from None


def _variables_of(bucket: str) -> str:
    return _VARIABLES.get(bucket.partition(":")[0], "the environment variables of that service")


def _plain_http(bucket: str) -> dict[str, bool]:
    """Allow HTTP without TLS where the address, which the user gave, says so."""
    scheme = bucket.partition(":")[0]
    addresses = [bucket, *(os.environ.get(name, "") for name in _ADDRESSES.get(scheme, ()))]
    if scheme == "gs":
        addresses += [_google_emulator().get("base_url", ""), *_addresses_in_accounts()]
    return {"allow_http": True} if any(one.startswith("http:") for one in addresses) else {}


def _google_emulator() -> dict[str, Any]:
    """Return the options for an emulator that a variable of Google's own libraries names.

    obstore gets a token for writing even if it may skip signatures: of an account in the
    environment, or of this machine's, which is not meant for an emulator.
    """
    address = "" if _GOOGLE_ADDRESS in os.environ else os.environ.get(_GOOGLE_EMULATOR, "")
    if address and "://" not in address:
        address = f"http://{address}"
    if not address and os.environ.get(_GOOGLE_UNSIGNED, "").lower() not in _YES:
        return {}
    nobody = {"token": "", "expires_at": None}
    options = {"skip_signature": True, "credential_provider": lambda: nobody}
    return {**options, "base_url": address.rstrip("/")} if address else options


def _addresses_in_accounts() -> Iterator[str]:
    path = next((os.environ[name] for name in _GOOGLE_ACCOUNTS if name in os.environ), None)
    in_variable = StringIO(os.environ.get(_GOOGLE_KEY, ""))
    for read in (Path(path or os.devnull).read_text, in_variable.read):
        try:
            yield str(json.loads(read())["gcs_base_url"])
        except (OSError, ValueError, LookupError, TypeError):
            continue  # obstore says what is wrong with it


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


def s3_options() -> dict[str, str | None]:
    """Return what boto3 does not itself read of what configures obstore."""
    address = next((os.environ[name] for name in _ADDRESSES["s3"] if os.environ.get(name)), None)
    return {"endpoint_url": address, "region_name": os.environ.get("AWS_REGION")}


@contextmanager
def _object_errors(path: ObjectPath) -> Iterator[None]:
    """Turn obstore's errors into system errors that name the object.

    Their texts are left out: a service's answer may repeat the access key, and a URL a signature.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        text, is_object = str(error), isinstance(error, FileNotFoundError)
        # A listing of nothing is empty, not an error.
        is_bucket = not is_object and _status(text) == _MISSING and "list request" in text
        if is_bucket or _code(text) in _NO_BUCKET:
            raise OSError(errno.ENXIO, "no such bucket", path.bucket) from None
        if is_object:
            raise absent(path) from None
        raise OSError(*_meaning(error), str(path)) from None


def _status(text: str) -> int:
    found = _STATUS.search(text)
    return int(found[1]) if found else 0


def _code(text: str) -> str:
    found = _CODE.search(text)
    return found[1] if found else ""


def _meaning(error: Exception) -> tuple[int, str]:
    text, kind = str(error), type(error).__name__
    status, code = _status(text), _code(text)
    shown = ", ".join(filter(None, [f"status {status}" if status else "", code]))
    if kind in _MEANINGS:
        return _MEANINGS[kind]
    for pattern, number, meaning in () if status else _LASTING:
        if pattern.search(text):
            return number, meaning
    # Of an object among several that are removed together only the code tells.
    is_denied = status in _DENIED or "AccessDenied" in text
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or is_denied:
        return errno.EACCES, f"access denied{f' ({shown})' if shown else ''}"
    if kind == "NotSupportedError" or code == "NotImplemented" or status in _NOT_OFFERED:
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

    `repeats`: whether the request can be repeated; not if its content comes from an iterator.
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
                answer = request(client)
        except ConnectionResetError:
            raise
        except OSError as error:
            _answered.add(path.bucket)
            if is_first and repeats and error.errno == errno.EIO:
                return once()  # it answers, if only that it is busy: this may take longer
            raise
        _answered.add(path.bucket)
        return answer

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
    with suppress(ImportError):  # threads that import it at the same time may find half of it
        import obstore.store  # noqa: F401
    with ThreadPoolExecutor(len(questions)) as pool:
        # The listings that are kept belong to a context.
        asked = [pool.submit(copy_context().run, question) for question in questions]
        return [future.result() for future in asked]

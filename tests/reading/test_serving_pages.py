"""`serve --allow-origin`: pages of one site read a checkpoint in a real browser, and no others."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.cli.main import main
from tests.browser import Browser
from tests.reading.conftest import Made
from tests.reading.test_serving import KEY, Server, serving
from tests.reading.test_zarr_view import content

FETCH = """(async () => {{
    try {{
        const answer = await fetch("{url}{key}", {{headers: {{Range: "bytes=3-6"}}}});
        const data = [...new Uint8Array(await answer.arrayBuffer())];
        return [answer.status, answer.headers.get("Content-Range"), data];
    }} catch (error) {{ return String(error); }}
}})()"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve an empty page; return its origin."""
    root = tmp_path_factory.mktemp("site")
    (root / "index.html").write_text("<!doctype html><title>page</title>")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def source(made: Made) -> Path:
    return made("native-3")


def asked_by_page(browser: Browser, site: str, server: Server) -> Any:  # noqa: ANN401
    """Let a page of the site read a part of a chunk; a text says why it may not."""
    tab = browser.open(f"{site}/index.html")
    asked = {
        "expression": FETCH.format(url=server.url, key=KEY),
        "awaitPromise": True,
        "returnByValue": True,
    }
    return tab.call("Runtime.evaluate", asked)["result"]["value"]


@pytest.fixture(scope="module")
def server(source: Path, site: str) -> Iterator[Server]:
    with serving(source, "--allow-origin", site) as found:
        yield found


def test_a_page_of_the_site_reads(
    browser: Browser, site: str, server: Server, source: Path
) -> None:
    data = content(streamshard.open(source).zarr())[KEY]
    found = asked_by_page(browser, site, server)
    assert found == [206, f"bytes 3-6/{len(data)}", [*data[3:7]]]


def test_a_page_of_another_does_not(browser: Browser, site: str, server: Server) -> None:
    other = site.replace("127.0.0.1", "localhost")
    assert asked_by_page(browser, other, server) == "TypeError: Failed to fetch"
    assert server.ask(f"/{KEY}", Origin=other)[0].getheader("Access-Control-Allow-Origin") is None


def test_a_browser_may_ask_before_a_page_does(server: Server, site: str) -> None:
    for origin, host, status in (
        (site, "localhost", 204),
        ("https://example.com", "localhost", 501),
        (site, "evil.example", 501),
    ):
        answer, data = server.ask(f"/{KEY}", "OPTIONS", Origin=origin, Host=host)
        assert (answer.status, data) == (status, b"")
        allowed = answer.getheader("Access-Control-Allow-Private-Network")
        assert allowed == ("true" if status == 204 else None)
    answer, data = server.ask("/none", Origin=site)
    assert (answer.status, data) == (404, b"")


@pytest.mark.parametrize("origin", ["*", "null", "example.org", "https://example.org/page"])
def test_what_is_no_origin_is_refused(
    source: Path, origin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(source), "--bind", "127.0.0.1:0", "--allow-origin", origin]) == 2
    assert "--allow-origin" in capsys.readouterr().err

"""A real browser, headless: opens pages, presses keys, and tells what it shows and asks for."""

import json
import os
import re
import select
import shutil
import struct
import subprocess
import zlib
from base64 import b64decode
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tests.lacking import lacking

WIDTH, HEIGHT = 960, 900
SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--remote-debugging-pipe"
)
SECONDS = 60
Pixels = NDArray[np.uint8]


def chromium() -> str:
    """Return the place of the browser, without which a test is skipped."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    return found or lacking("chromium", "apt-get install chromium")


class Browser:
    """Chromium, which is spoken to over two pipes."""

    def __init__(self, profile: Path) -> None:
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        command = f'exec "$@" 3<&{theirs} 4>&{answers}'
        switches = [*SWITCHES.split(), f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "-", chromium(), *switches],
            pass_fds=(theirs, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self._rest = b""
        self._count = 0
        self.events: list[dict[str, Any]] = []
        """What the browser told by itself, such as requests and errors."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait()

    def open(self, url: str, *, dark: bool = False) -> "Tab":
        """Open a page in a tab of its own, and wait until it is loaded."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        tab = Tab(self, attached["sessionId"])
        for domain in ("Page", "Network", "Log", "Runtime"):
            tab.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        tab.call("Emulation.setDeviceMetricsOverride", size)
        self.events.clear()
        tab.call("Page.navigate", {"url": url})
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())
        return tab

    def call(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """Ask the browser for something."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], SECONDS)
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, "the browser says nothing more"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found


class Tab:
    """A page that is shown."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def value(self, expression: str) -> Any:  # noqa: ANN401
        """Return what an expression is on the page, as JSON."""
        asked = {"expression": expression, "returnByValue": True}
        found = self.call("Runtime.evaluate", asked)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text that is shown in an element."""
        found: str = self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def press(self, key: str) -> None:
        """Press a key, or type a character."""
        down = {"type": "keyDown", "key": key, **({"text": key} if len(key) == 1 else {})}
        self.call("Input.dispatchKeyEvent", down)
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", "key": key})

    def click(self, x: float, y: float) -> None:
        """Move the pointer to a place, and click."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **button})

    def pixels(self) -> Pixels:
        """Return rows of pixels of three colours."""
        return pixels_of(b64decode(self.call("Page.captureScreenshot")["data"]))

    def require_at_peace(self) -> None:
        """Require that the page asked for nothing but itself, and that nothing went wrong."""
        events = self._browser.events
        asked = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert len(asked) == 1, asked
        bad = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        assert [event for event in events if event["method"] in bad] == []


def document_of(page: Path) -> dict[str, Any]:
    """Return the document that a page draws."""
    pattern = r'<script type="application/json" id="document">(.*?)</script>'
    found = re.search(pattern, page.read_text())
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def pixels_of(png: bytes) -> Pixels:
    """Decode a PNG of 8 bits per colour that is not interlaced."""
    at, data, header = 8, b"", (0, 0, 0, 0)
    while at < len(png):
        length, kind = struct.unpack_from(">I4s", png, at)
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            header = struct.unpack_from(">IIBB", body)
            assert body[8:13] in (b"\x08\x02\0\0\0", b"\x08\x06\0\0\0")
        data += body if kind == b"IDAT" else b""
        at += length + 12
    width, height, _, kind_of_colour = header
    step = 3 if kind_of_colour == 2 else 4
    rows = np.frombuffer(zlib.decompress(data), dtype=np.uint8).reshape(height, -1)
    made = np.zeros((height + 1, step + width * step), dtype=np.uint8)
    for number, row in enumerate(rows):
        undo(int(row[0]), row[1:], made[number], made[number + 1], step)
    return made[1:, step:].reshape(height, width, step)[:, :, :3]


def undo(kind: int, row: Pixels, above: Pixels, made: Pixels, step: int) -> None:
    """Undo the filter of one row; both rows begin with a pixel of zeros."""
    if kind in (0, 2):
        made[step:] = row + (above[step:] if kind == 2 else 0)
        return
    line, up, out = row.tolist(), above.tolist(), [0] * step
    for i, value in enumerate(line):
        a, b, c = out[i], up[i + step], up[i]
        if kind == 1:
            guess = a
        elif kind == 3:
            guess = (a + b) // 2
        else:
            p = a + b - c
            guess = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
        out.append((value + guess) & 255)
    made[:] = out


def colour(text: str) -> tuple[int, ...]:
    """Read a colour as CSS spells it."""
    return tuple(bytes.fromhex(text[1:]))

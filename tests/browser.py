"""A headless Chromium that a test drives by the DevTools protocol over two pipes: no port, no driver package.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")

ANSWER_SECONDS = 60.0
"""How long an answer may take on a busy machine."""


def executable() -> str:
    """The browser's path; without one the test fails: `make test` installs one or says why it cannot."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(f"none of {', '.join(NAMES)}: .ci/browser installs one, which make test runs")
    return found


class Browser:
    """One browser with one page. What its console and its scripts complain of is collected in `complaints`."""

    def __init__(self, folder: Path, width: int = 1200, height: int = 900, flags: Sequence[str] = ()):
        """
        Args:
            folder: for its profile.
            flags: more of Chromium's.
        """
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = [
            *flags,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]
        flags += ["--no-first-run", f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", executable(), *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers, self._buffer, self.complaints = itertools.count(1), b"", []
        self._document, self._loaded = "", False
        """The loader of the page's document, and whether that is complete."""
        page, end = None, time.monotonic() + ANSWER_SECONDS
        while page is None:
            assert time.monotonic() < end, "the browser opens no page"
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next((target["targetId"] for target in targets if target["type"] == "page"), None)
            time.sleep(0 if page else 0.05)
        self._session = None
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """One command and its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, file: Path) -> None:
        """Load a file, until its scripts have run."""
        self.navigate(file.absolute().as_uri())

    def navigate(self, url: str) -> None:
        """Load a page, until its scripts have run."""
        document = self.call("Page.navigate", url=url)["loaderId"]
        while not (self._loaded and self._document == document):  # an earlier one's end may be told only now
            self._next()

    def value(self, expression: str) -> Any:
        """What an expression is worth in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **values: Any) -> None:
        """mouseMoved, mousePressed or mouseReleased at a place of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **values)

    def emulate(self, media: str = "", scheme: str = "light") -> None:
        """print or screen, light or dark."""
        self.call(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def picture(self) -> bytes:
        """The whole page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _next(self) -> dict[str, Any]:
        """The next message; events are noted."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], ANSWER_SECONDS)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser is gone"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        method, values = message.get("method"), message.get("params", {})
        if method == "Page.frameNavigated" and "parentId" not in values["frame"]:
            self._document, self._loaded = values["frame"]["loaderId"], False
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(values["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(values["args"])
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(values["entry"])
        elif method == "Network.requestWillBeSent" and not values["request"]["url"].startswith(("file:", "data:")):
            self.complaints.append(values["request"]["url"])
        return message

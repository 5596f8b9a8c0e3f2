"""A headless Chromium for tests, driven through a pipe by its own protocol: nothing is installed beside it.

with browser() as tab:
    tab.open(path, width=360, height=700, scheme="dark")
    assert not tab.faults and tab.evaluate("document.title") == "..."
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 60.0  # that an answer may take
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=1 --remote-debugging-pipe"
)


class Tab:
    """A page, what it asked for, and what it complained of.

    Attributes:
        faults: requests of anything but its own file, exceptions, and errors on the console.
    """

    def __init__(self, reading: int, writing: int):
        self._reading, self._writing, self._session = reading, writing, ""
        self._ids, self._waiting = itertools.count(1), b""
        self.faults: list[str] = []
        self._loaded = False
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def open(self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Load a file, in a window of this size."""
        self.resize(width, height)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.faults, self._loaded = [], False
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._event(self._message())
        self.settle()

    def resize(self, width: int, height: int) -> None:
        """Make the window this size."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, code: str) -> Any:
        """Return what an expression of JavaScript is, as JSON has it."""
        found = self.ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        self.settle()

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as a PNG."""
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=whole, **(self._whole() if whole else {}))
        path.write_bytes(base64.b64decode(found["data"]))

    def _whole(self) -> dict[str, Any]:
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer to a command of the protocol."""
        number = next(self._ids)
        session = {"sessionId": self._session} if self._session else {}
        text = json.dumps({"id": number, "method": method, "params": params, **session})
        os.write(self._writing, text.encode() + b"\0")
        while (message := self._message()).get("id") != number:
            self._event(message)
        assert "error" not in message, message
        return message["result"]

    def _event(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith(("file:", "data:")):
                self.faults.append(f"asks for {params['request']['url']}")
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.faults.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.faults.append(f"console: {params['args']}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.faults.append(f"log: {params['entry']['text']}")

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._waiting:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            more = os.read(self._reading, 1 << 20)
            assert more, "Chromium has ended"
            self._waiting += more
        text, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(text)


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """Yield a tab of a Chromium of its own, which must be on the path (Debian: `apt-get install chromium`)."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "Chromium is not on the path (Debian: apt-get install chromium)"
    (theirs, ours), (reading, answers) = os.pipe(), os.pipe()

    def as_third_and_fourth() -> None:
        high = [os.dup2(fd, fd + 100) for fd in (theirs, answers)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [program, *FLAGS.split(), f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=as_third_and_fourth,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        try:
            yield Tab(reading, ours)
        finally:
            process.terminate()
            process.wait()
            os.close(ours)
            os.close(reading)

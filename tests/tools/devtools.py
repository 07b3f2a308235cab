"""A tab of headless Chromium, driven through the DevTools protocol."""

import base64
import json
import shutil
import subprocess
import tempfile
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from tests.tools.waiting import wait_until

CHROMIUM = shutil.which("chromium")
_OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
_KEYS = {"Enter": 13, "Backspace": 8, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}


class PageReplacedError(Exception):
    """The page went away while it was asked something."""


class Tab:
    """One page; a context manager."""

    def __init__(self, width: int = 1280, height: int = 800, *options: str, timeout: float = 300.0) -> None:
        self._size, self._options = (width, height), options
        self._timeout = timeout
        self._number = 0

    def __enter__(self) -> "Tab":
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [
            str(CHROMIUM),
            *_OPTIONS,
            *self._options,
            f"--user-data-dir={self._folder.name}",
            "--remote-debugging-port=0",
        ]
        self._process = subprocess.Popen(
            [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        place = Path(self._folder.name, "DevToolsActivePort")
        wait_until(lambda: place.exists() and len(place.read_text().splitlines()) == 2, timeout=self._timeout)
        port = int(place.read_text().splitlines()[0])
        wait_until(lambda: self._address(port) is not None, timeout=self._timeout)
        address = self._address(port)
        assert address is not None
        self._socket = connect(address, max_size=None, open_timeout=self._timeout, ping_timeout=None)
        width, height = self._size
        is_phone = width < 500
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        if is_phone:
            self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        return self

    @staticmethod
    def _address(port: int) -> str | None:
        """Address of the page, or None before it exists."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            return next((each["webSocketDebuggerUrl"] for each in json.load(answer) if each["type"] == "page"), None)

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(self._timeout)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict:
        """Call the protocol and return the result; events are skipped."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(self._timeout))
            if answer.get("id") == self._number:
                if answer.get("error", {}).get("message") == "Inspected target navigated or closed":
                    raise PageReplacedError
                assert "error" not in answer, answer
                return answer["result"]

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, address: str, until: str) -> None:
        """Go to a page and wait until an expression is true."""
        self.call("Page.navigate", url=address)
        self.wait(f"document.readyState == 'complete' && {until}")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true; while a page is being replaced, it is not."""

        def holds() -> bool:
            try:
                return self.value(f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()")
            except PageReplacedError:
                return False

        wait_until(holds, timeout=self._timeout)

    def click(self, selector: str, times: int = 1) -> None:
        """Press the left button in the middle of an element, as often as in a double click if twice.

        What follows the first press may go to a page that has replaced this one, or to none.
        """
        place = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                mouse = {"x": place[0], "y": place[1], "button": "left", "clickCount": count}
                with suppress(PageReplacedError):
                    self.call("Input.dispatchMouseEvent", type=kind, **mouse)

    def key(self, name: str) -> None:
        """Press a key and let it go."""
        code = _KEYS.get(name) or ord(name)
        text = {"text": name} if len(name) == 1 else {}
        with suppress(PageReplacedError):
            self.call("Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=code, **text)
        with suppress(PageReplacedError):
            self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def screenshot(self) -> bytes:
        """What is seen, PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

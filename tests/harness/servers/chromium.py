"""A headless Chromium for tests, controlled through a pipe by its DevTools protocol."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvferry.core.clock import SystemClock

BINARY = Path("/usr/bin/chromium")
_SECONDS = 60.0


class Chromium:
    """A browser with one page. Errors of the page's scripts and of its security policy are in `errors`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol in the page."""
        return self._call(method, session=self._session, **params)

    def look(self, width: int, height: int, *, is_dark: bool) -> None:
        """Set the size of the page in CSS pixels and the preferred colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Navigate to `url`."""
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Return the value of an expression as soon as it is true; fail after a minute."""
        deadline = SystemClock().monotonic() + _SECONDS
        while not (value := self.evaluate(script)):
            assert SystemClock().monotonic() < deadline, f"not true within {_SECONDS} s: {script}"
        return value

    def press(self, key: str, code: int) -> None:
        """Press and release a key; `code` is its virtual key code."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (heard := self._next()).get("id") != self._number:
            self._note(heard)
        assert "error" not in heard, (method, heard)
        return dict(heard["result"])

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            readable, _, _ = select.select([self._read], [], [], _SECONDS)
            assert readable, f"the browser sent no byte for {_SECONDS} s"
            more = os.read(self._read, 1 << 16)
            assert more, "the browser ended"
            self._rest += more
        one, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(one))


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Run a headless browser with a profile of its own; it ends with the `with` block."""
    folder = tempfile.mkdtemp(prefix="kvferry-chromium-")
    down_read, down_write = os.pipe()
    up_read, up_write = os.pipe()
    # The protocol uses descriptors 3 and 4, which only a shell can assign without running code between fork and exec.
    script = f'exec "$0" "$@" 3<&{down_read} 4>&{up_write}'
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        ["bash", "-c", script, str(BINARY), *flags, f"--user-data-dir={folder}"],
        pass_fds=(down_read, up_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(down_read)
    os.close(up_write)
    try:
        browser = Chromium(down_write, up_read)
        yield browser
        browser._call("Browser.close")
        process.wait(30)
    finally:
        os.close(down_write)
        os.close(up_read)
        if process.poll() is None:
            process.kill()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)

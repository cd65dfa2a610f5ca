"""A headless browser for tests, driven over a pipe by the protocol that Chromium's own tools use.

`https://chromedevtools.github.io/devtools-protocol/`; messages end in a zero byte, in on descriptor 3, out on 4.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
"""What the programs are called; the first that is found is used."""

START = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find() -> str | None:
    """Return the path of a browser; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser."""

    def __init__(self, program: str, folder: Path, width: int = 1280, height: int = 900) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = ["--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--user-data-dir={folder}", f"--window-size={width},{height}", "--disable-dev-shm-usage"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # as root, Chromium starts in no other way
        command = [sys.executable, "-c", START, str(theirs_in), str(theirs_out), program, *flags, "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._stream, self._count, self._session = os.fdopen(self._in, "rb"), 0, ""
        self.events: list[dict[str, Any]] = []
        """Everything that the browser told without being asked."""
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]  # type: ignore[no-any-return]
            self.events.append(answer)
            if answer.get("method") == "Page.javascriptDialogOpening":  # or every later call would wait for it
                self._count += 1
                dismissed = {"id": self._count, "method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
                os.write(self._out, json.dumps({**dismissed, "sessionId": self._session}).encode() + b"\0")
                self._count -= 1

    def _receive(self) -> dict[str, Any]:
        found = bytearray()
        while (letter := self._stream.read(1)) != b"\0":
            if not letter:
                raise EOFError(f"the browser ended with {self._process.wait()}")
            found += letter
        return json.loads(found)  # type: ignore[no-any-return]

    def open(self, file: Path, view: str = "") -> None:
        """Open a page and wait until it has drawn itself."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=file.resolve().as_uri() + (f"#{view}" if view else ""))
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def go(self, view: str) -> None:
        """Go to a view of the page."""
        self.run(f"location.hash = {view!r}")
        self.wait(f"document.querySelector('nav a[aria-current]')?.getAttribute('href') === '#{view}'")

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript and give its value."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def place(self, selector: str, index: int = 0) -> tuple[float, float]:
        """Bring an element into sight and give its centre."""
        box = self.run(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{index}]; if (!e) return null;"
            "e.scrollIntoView({block: 'center'}); const b = e.getClientRects()[0];"
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        assert box, f"there is no element {index} of {selector}"
        return box[0], box[1]

    def hover(self, selector: str, index: int = 0) -> None:
        """Move the mouse onto an element."""
        x, y = self.place(selector, index)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 1, y=y)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str, index: int = 0) -> None:
        """Click an element."""
        x, y = self.place(selector, index)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, dark: bool) -> None:
        """Make the system dark or light."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, file: Path) -> None:
        """Write what is seen as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    @property
    def complaints(self) -> list[str]:
        """Errors of the page, messages on its console, and dialogs that it opened."""
        told = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Page.javascriptDialogOpening")
        return [json.dumps(event) for event in self.events if event.get("method") in told]

    @property
    def requests(self) -> list[str]:
        """Addresses that were asked for, the page itself aside."""
        sent = [e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if one.get("type") != "Document"]

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        self._stream.close()

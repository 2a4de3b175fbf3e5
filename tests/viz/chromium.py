"""Chromium without a window, driven through its own debugging pipe: nothing else is needed.

The protocol is JSON, a zero byte after each message: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SECONDS = 100

# Chromium reads commands from the file descriptor 3 and writes to 4
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"Enter": (13, "\r"), "Escape": (27, "")}


class Page:
    """A page that is open, until the `with` block ends.

    `errors` are what its scripts raise or log as errors, `requests` what it asks of a network.
    """

    def __init__(self, path, width=1400, height=900):
        self.errors, self.requests = [], []
        self._ids = itertools.count(1)
        self._rest = b""
        self._session = {}
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._start()
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self._send(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        self._send("Page.navigate", url=Path(path).absolute().as_uri())
        deadline = time.monotonic() + SECONDS
        while not self.ask("document.readyState === 'complete' && !!window.torchremat"):
            assert time.monotonic() < deadline and not self.errors, self.errors
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def ask(self, expression):
        """What a JavaScript expression gives."""
        found = self._send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, where):
        """Click where an expression says: `{x, y}`."""
        at = {key: self.ask(where)[key] for key in ("x", "y")}
        self._send("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def press(self, key):
        """Press a key: a letter, or one of a few with names."""
        code, text = _KEYS.get(key, (ord(key[0].upper()), key))
        facts = {"key": key, "windowsVirtualKeyCode": code}
        self._send("Input.dispatchKeyEvent", type="keyDown", text=text, **facts)
        self._send("Input.dispatchKeyEvent", type="keyUp", **facts)

    def fill(self, selector, text):
        """Write `text` into a field."""
        self.ask(f"document.querySelector({selector!r}).select()")
        self._send("Input.insertText", text=text)

    def picture(self, path):
        """A PNG of the page as it looks now."""
        data = self._send("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))

    # --- the pipe --------------------------------------------------------------------------------

    def _start(self):
        pipes = [*os.pipe(), *os.pipe()]
        theirs_in, self._out, self._in, theirs_out = (
            fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipes
        )
        for end in pipes:
            os.close(end)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += [
            "--no-first-run",
            "--disable-dev-shm-usage",
            f"--user-data-dir={self._folder.name}",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), CHROMIUM, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def _send(self, method, **params):
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer.get("method"), answer.get("params"))

    def _receive(self):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], SECONDS)
            assert ready, "Chromium does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, "Chromium is gone"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, method, params):
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(params["args"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:")):
                self.requests.append(url)

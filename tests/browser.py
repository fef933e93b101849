"""Chromium without a window, through pipes of its DevTools protocol: pages from files, with no network.

with Browser() as browser:
    browser.open(path.as_uri())
    print(browser.complaints(), browser.requests())
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
PATIENCE_S = 120.0
# Chromium reads commands from descriptor 3, and writes answers to 4
_EXEC = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
_OFF = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}


class Browser:
    """One process. Commands wait for their answer; events that come meanwhile are kept."""

    def __init__(self, *, size: tuple[int, int] = (1200, 900)) -> None:
        assert CHROMIUM is not None
        self.closing = contextlib.ExitStack()
        folder = self.closing.enter_context(tempfile.TemporaryDirectory(prefix="zk-chromium-", ignore_cleanup_errors=True))
        (theirs_in, self.out), (self.back, theirs_out) = os.pipe(), os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}", "--disable-background-networking", "--disable-extensions"]
        command = [sys.executable, "-c", _EXEC, str(theirs_in), str(theirs_out), CHROMIUM, *flags]
        self.process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.number, self.rest, self.events, self.session = 0, b"", list[dict[str, Any]](), ""

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            data = os.read(self.back, 1 << 20)
            assert data, f"chromium has ended, with {self.process.wait()}"
            self.rest += data
        one, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(one))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command, to the page once there is one."""
        self.number += 1
        session = {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps({"id": self.number, "method": method, "params": params, **session}).encode() + b"\0")
        while (message := self._message()).get("id") != self.number:
            self.events.append(message)
        assert "error" not in message, (method, message)
        return dict(message["result"])

    def open(self, url: str, *, offline: bool = True) -> None:
        """Open a page, and wait until it has been loaded."""
        self.session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        if offline:
            self.send("Network.emulateNetworkConditions", **_OFF)
        self.events.clear()
        self.send("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def complaints(self) -> list[str]:
        """Messages of the console, and exceptions, since the page was opened."""
        self.send("Runtime.evaluate", expression="0")
        kinds = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Addresses that the page has asked for."""
        return [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, of a promise too."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self) -> None:
        self.session = ""
        with contextlib.suppress(AssertionError, OSError):  # it ends before it answers
            self.send("Browser.close")
        self.process.wait(PATIENCE_S)
        os.close(self.out)
        os.close(self.back)
        self.closing.close()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""A headless Chromium, driven by the DevTools protocol over a pipe; nothing but the browser is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Browser", "find_browser"]

#: Seconds until an answer must have come; a busy machine is slow to start a browser.
_PATIENCE = 120.0

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The path of a Chromium on this machine, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser.

    Attributes:
        requests: address of everything the page asked for.
        complaints: what the page wrote to the console, exceptions and blocked content among it.
    """

    def __init__(self, executable: str, profile: Path) -> None:
        self._executable, self._profile = executable, profile
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._number = 0
        self._rest = b""
        self._session: str | None = None

    def __enter__(self) -> Browser:
        # The protocol's pipe: the browser reads commands from descriptor 3 and writes answers to 4.
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        options += [
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={self._profile}",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", script, self._executable, *options, "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        try:
            targets = self._call("Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def open(self, address: str, *, width: int = 1280, height: int = 900, scripts: bool = True) -> None:
        """Load a page, and wait until it is loaded."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._call("Page.navigate", url=address)
        self._until("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of a script, a promise's too.

        Raises:
            RuntimeError: the script threw.
        """
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", script))
        return answer["result"].get("value")

    def emulate(self, **features: str) -> None:
        """Set CSS media features, such as prefers_color_scheme="dark"."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self._call("Emulation.setEmulatedMedia", features=named)

    def press(self, key: str) -> None:
        """Press and let go of a key, by the name of `KeyboardEvent.key`."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key)
        pressed = {"key": key, "windowsVirtualKeyCode": codes[key], **({"text": text} if text else {})}
        self._call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **pressed)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes[key])

    def screenshot(self) -> bytes:
        """The visible part of the page as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    # ---- protocol -------------------------------------------------------------------------------

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _until(self, event: str) -> None:
        while self._receive().get("method") != event:
            pass

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], _PATIENCE)
            if not ready:
                raise TimeoutError(f"the browser said nothing for {_PATIENCE:.0f} s")
            read = os.read(self._from, 1 << 16)
            if not read:
                raise RuntimeError("the browser has ended")
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        self._note(answer.get("method", ""), answer.get("params", {}))
        return answer

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

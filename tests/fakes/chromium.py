"""Debian's Chromium without a window, driven by the DevTools protocol over two pipes. No test in here.

Nothing but loopback can be reached from it: other names are not resolved. Each `Page` has a profile of its own.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
PATIENCE = 120.0
"""Seconds that anything may take: a limit for what hangs, never a measure of what works."""
_SWITCHES = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root, and load pages of ours alone
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-first-run",
    "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
# Windows virtual key codes of the keys that have no letter.
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Backspace": 8, " ": 32, "/": 191}
ALT, CONTROL, SHIFT = 1, 2, 8
# Puts the pipes where Chromium looks for them, by way of numbers that neither has, and becomes it.
_BECOME = """import os, sys
ends = [os.dup2(int(end), 100 + place) for place, end in enumerate(sys.argv[1:3])]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])"""
_WATCH = f"""new Promise((resolve, reject) => {{
    const end = performance.now() + {PATIENCE * 800};
    const look = () => {{
        let value = null;
        try {{ value = (CONDITION); }} catch {{ }}
        if (value) resolve(value);
        else if (performance.now() > end) reject(new Error("it never became true"));
        else setTimeout(look, 20);
    }};
    look();
}})"""


class PageError(AssertionError):
    """An expression raised in the page, or never became true."""


def find_chromium() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Chromium:
    """One browser process. Commands go out on its descriptor 3, answers and events come on 4, ended by zeros."""

    def __init__(self, program: str, folder: Path) -> None:
        to_it, self._out = os.pipe()
        self._in, from_it = os.pipe()
        become = [sys.executable, "-ISc", _BECOME, str(to_it), str(from_it), program]
        log = (folder / "chromium.log").open("wb")
        switches = (*_SWITCHES, f"--user-data-dir={folder / 'profile'}", "about:blank")
        with log:
            self._process = subprocess.Popen(
                [*become, *switches], pass_fds=(to_it, from_it), stdout=log, stderr=log, start_new_session=True
            )
        os.close(to_it)
        os.close(from_it)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        left = b""
        with contextlib.suppress(OSError):
            while data := os.read(self._in, 1 << 20):
                *messages, left = (left + data).split(b"\0")
                for message in messages:
                    self._take(json.loads(message))
        for waiting in list(self._answers.values()):
            waiting.put({"error": {"message": "Chromium ended"}})

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]].put(message)
        elif listener := self._listeners.get(message.get("sessionId", "")):
            listener(message["method"], message["params"])

    def command(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Give a command and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        try:
            found = answer.get(timeout=PATIENCE)
        except queue.Empty:
            raise PageError(f"{method} was not answered within {PATIENCE:.0f} s") from None
        finally:
            del self._answers[number]
        if "error" in found:
            raise PageError(f"{method}: {found['error']['message']}")
        result: dict[str, Any] = found["result"]
        return result

    def listen(self, session: str, listener: Callable[[str, dict[str, Any]], None]) -> None:
        self._listeners[session] = listener

    @contextlib.contextmanager
    def page(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> Iterator[Page]:
        """Open a page in a profile of its own, and wait until it is loaded."""
        context = self.command("Target.createBrowserContext")["browserContextId"]
        try:
            yield Page(self, context, (width, height), "dark" if dark else "light").opened(url)
        finally:
            self.command("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        with contextlib.suppress(PageError, OSError):
            self.command("Browser.close")
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)


class Page:
    """One page: what a user does to it, what it shows, and what it asked for."""

    def __init__(self, browser: Chromium, context: str, size: tuple[int, int], scheme: str) -> None:
        self._browser = browser
        target = browser.command("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._session = browser.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.asked: list[str] = []
        """Addresses of all requests that the page began, in their order."""
        self.complaints: list[str] = []
        """Exceptions, errors on the console, breaches of the content security policy; not answers that were errors."""
        self._loaded = threading.Event()
        browser.listen(self._session, self._on_event)
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._do(f"{domain}.enable")
        self._do("Performance.enable", timeDomain="threadTicks")
        self._do("Emulation.setFocusEmulationEnabled", enabled=True)
        self._do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        width, height = size
        self._do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def _do(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.command(method, self._session, **parameters)

    def _on_event(self, method: str, what: Mapping[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.asked.append(what["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = what["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and what["entry"]["level"] == "error" and what["entry"]["source"] != "network":
            self.complaints.append(f"{what['entry']['text']} {what['entry'].get('url', '')}".strip())
        elif method == "Runtime.consoleAPICalled" and what["type"] == "error":
            self.complaints.append(" ".join(str(one.get("value")) for one in what["args"]))

    def opened(self, url: str) -> Page:
        """Go to an address, and wait until it is loaded."""
        self._loaded.clear()
        failure = self._do("Page.navigate", url=url).get("errorText")
        assert not failure, f"{url}: {failure}"
        assert self._loaded.wait(PATIENCE), f"{url} was not loaded"
        return self

    def run(self, expression: str) -> Any:
        """Evaluate an expression, or the promise that it is, and return its value as JSON has it."""
        done = self._do("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if details := done.get("exceptionDetails"):
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return done["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until an expression is true, and return its value."""
        watch = _WATCH.replace("CONDITION", condition)
        try:
            return self.run(watch)
        except PageError as error:
            seen = self.run("document.body.innerText.slice(0, 2000)")
            raise PageError(f"{condition}: {error}\n{self.complaints}\n--- the page:\n{seen}") from None

    def text(self, selector: str = "body") -> str:
        """Return the text that is shown of the first element."""
        found: str = self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return found

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self._do("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press one key and let it go, as the keyboard does."""
        code = _KEYS.get(key) or ord(key.upper())
        text = {"Enter": "\r", " ": " "}.get(key, "")
        shared = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers, "code": key}
        self._do("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **shared, text=text)
        self._do("Input.dispatchKeyEvent", type="keyUp", **shared)

    def click(self, selector: str) -> None:
        """Click into the middle of the first element, with the mouse."""
        place = self.wait(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            " if (!one || one.disabled) return null; one.scrollIntoView({block: 'nearest'});"
            " const box = one.getBoundingClientRect();"
            " return box.width && [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._do("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def focused(self) -> str:
        """Return the name that a screen reader has for what has the focus: its label, else its text."""
        expression = (
            "(() => { const one = document.activeElement; return one.getAttribute('aria-label') ??"
            " one.labels?.[0]?.firstChild.textContent ?? one.innerText; })()"
        )
        found: str = self.run(expression)
        return found

    def tree(self) -> list[tuple[str, str]]:
        """Return role and name of each node of the accessibility tree."""
        nodes = self._do("Accessibility.getFullAXTree")["nodes"]
        told = [one for one in nodes if not one.get("ignored")]
        return [(one["role"]["value"], one.get("name", {}).get("value", "")) for one in told]

    def seconds_of_work(self) -> float:
        """Return the processor's time that the page's main thread has taken since it was opened."""
        told = {one["name"]: one["value"] for one in self._do("Performance.getMetrics")["metrics"]}
        return float(told["TaskDuration"])

    def shoot(self, path: Path) -> None:
        """Write a picture of what is shown, as PNG of 256 colours: a third of the size, and as sharp."""
        from PIL import Image

        data = self._do("Page.captureScreenshot", format="png")["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        shown = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
        shown.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


def opened_chromium(folder: Path) -> Iterator[Chromium]:
    """Yield a browser with its profile in `folder`, and close it; skips the test where there is none."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here: `apt-get install chromium`")
    browser = Chromium(program, folder)
    yield browser
    browser.close()

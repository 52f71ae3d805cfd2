"""How each router is started over the same engines: ours, and the peers that are installed."""

from __future__ import annotations

import resource
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
from pagefleet_protocol.endpoints import Endpoint, encode_endpoints

MODEL = "fake"
OPEN_FILES = 65536


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """One router with its settings. `{port}`, `{urls}`, `{file}` and the like in its command are filled in."""

    name: str
    program: str
    arguments: tuple[str, ...]
    ready_path: str = "/readyz"
    urls_apart: bool = True
    """Whether `{urls}` becomes one argument for each engine."""

    def command(self, programs: Mapping[str, str], port: int, ports: Sequence[int], folder: Path) -> list[str]:
        """Return the words of its command line."""
        urls = [f"http://127.0.0.1:{engine}" for engine in ports]
        file = folder / "endpoints.json"
        file.write_bytes(encode_endpoints(tuple(Endpoint(f"e{i}", url, MODEL) for i, url in enumerate(urls))))
        words = [programs[self.program]]
        for argument in self.arguments:
            if argument == "{urls}" and self.urls_apart:
                words += urls
            else:
                names = {"port": port, "metrics": port + 1, "file": file, "urls": ",".join(urls)}
                words.append(argument.format(models=",".join([MODEL] * len(urls)), **names))
        return words


PAGEFLEET = ("--endpoints-file", "{file}", "--port", "{port}", "--access-log", "--max-concurrent", "60000")
RUST = ("--host", "127.0.0.1", "--port", "{port}", "--prometheus-port", "{metrics}", "--log-level", "warn")
STACK = (
    *("--host", "127.0.0.1", "--port", "{port}", "--service-discovery", "static", "--static-backends", "{urls}"),
    *("--static-models", "{models}", "--engine-stats-interval", "15", "--log-level", "warning"),
)
OURS = (*PAGEFLEET, "--policy", "auto", "--max-connections", "60000")
ROUTERS = (
    RouterSpec("pagefleet", "pagefleet-route", OURS),
    # The same out of an environment whose wheel was compiled, as an image has it.
    RouterSpec("pagefleet compiled", "pagefleet-compiled", OURS),
    RouterSpec(
        "sglang-router", "sglang-router",
        ("launch", "--worker-urls", "{urls}", *RUST, "--policy", "cache_aware"), "/health",
    ),
    RouterSpec(
        "vllm-router", "vllm-router",
        ("--worker-urls", "{urls}", *RUST[:-1], "warning", "--policy", "cache_aware"), "/health",
    ),
    RouterSpec(
        "production-stack", "production-stack", (*STACK, "--routing-logic", "prefixaware"), "/health", urls_apart=False
    ),
)  # fmt: skip


def installed(options: Mapping[str, str | None]) -> dict[str, str]:
    """Return the programs that can be started, by name; what is not given is looked for beside Python and on PATH."""
    found = {}
    for router in ROUTERS:
        given = options.get(router.program)
        beside = Path(sys.executable).with_name(router.program)
        program = given or (str(beside) if beside.exists() else shutil.which(router.program))
        if program:
            found[router.program] = program
    return found


class RunningRouter:
    """A router's process and its children."""

    def __init__(self, spec: RouterSpec, programs: Mapping[str, str], ports: Sequence[int], folder: Path) -> None:
        self.spec = spec
        self.port = free_port()
        self._log = (folder / f"{spec.name}.log").open("ab")
        command = spec.command(programs, self.port, ports, folder)
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self._wait_ready()

    def __enter__(self) -> RunningRouter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        family = self._family()
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in family:
            if child.is_running():
                child.kill()
        self._log.close()

    @property
    def process(self) -> psutil.Process:
        """The parent of all its processes."""
        return psutil.Process(self._process.pid)

    def cpu_seconds(self) -> float:
        """User and system time of all its processes."""
        return sum(float(sum(process.cpu_times()[:2])) for process in self._family())

    def resident_bytes(self) -> int:
        """Resident memory of all its processes."""
        return sum(int(process.memory_info().rss) for process in self._family())

    def _family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def _wait_ready(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.spec.name} ended with {self._process.returncode}: {self._last_words()}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.spec.ready_path}", timeout=1).close()
                time.sleep(1.0)  # some are up before they know their engines
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        raise RuntimeError(f"{self.spec.name} is not ready: {self._last_words()}")

    def _last_words(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-1000:]


def raise_open_files() -> int:
    """Allow this process, and those it starts, as many open files as the benchmarks need; returns how many it got."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def free_port() -> int:
    """A port that nobody listens on now, nor on the next one: some routers tell their metrics there."""
    while True:
        with socket.socket() as probe, socket.socket() as beside:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            try:
                beside.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port

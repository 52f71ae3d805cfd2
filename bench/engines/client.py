"""Starts a driver in an engine's own Python and speaks to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("driver.py")


@dataclass(frozen=True)
class EngineSpec:
    """How to start one engine."""

    name: str
    adapter: str
    python: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


class EngineFailedError(RuntimeError):
    """The driver ended; the message holds the end of its log."""


class EngineProcess:
    """One running driver."""

    def __init__(self, spec: EngineSpec, model: Path, log: Path) -> None:
        self.spec = spec
        self._log = log
        command = [spec.python, str(DRIVER), spec.adapter, str(model), "--options", json.dumps(dict(spec.options))]
        started = time.perf_counter()
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env={**os.environ, **spec.env},
            )
        self.load_seconds = float(self._read()["load_seconds"])
        """Import and construction of the engine."""
        self.start_seconds = time.perf_counter() - started
        """The same with the start of its Python."""
        self.cpu_seconds = 0.0
        """Of the last `generate`, of all threads and processes of the engine."""

    def generate(
        self, prompts: Sequence[Sequence[int]], output_lens: Sequence[int], schema: Mapping[str, Any] | None = None
    ) -> tuple[float, list[list[int]]]:
        """Return wall seconds and the output tokens; `schema`: of JSON, which all outputs hold."""
        used = tree_cpu_seconds(self._process.pid)
        assert self._process.stdin is not None
        command = {"prompts": prompts, "output_lens": output_lens, "schema": schema}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self.cpu_seconds = tree_cpu_seconds(self._process.pid) - used
        return float(answer["seconds"]), answer["outputs"]

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """End the driver if what is asked of it takes longer.

        Raises:
            EngineFailedError: it did.
        """
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            yield
        except EngineFailedError:
            if timer.is_alive():
                raise
            raise EngineFailedError(f"{self.spec.name} was not done within {seconds:.0f} s") from None
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the driver."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise EngineFailedError(f"{self.spec.name} ended:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def tree_cpu_seconds(pid: int) -> float:
    """What a process and all below it have computed so far, as Linux counts it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    tree = {pid}
    while more := {each for each, parent in parents.items() if parent in tree} - tree:
        tree |= more
    nanoseconds = 0
    for thread in (thread for each in tree for thread in Path(f"/proc/{each}/task").glob("*/schedstat")):
        with contextlib.suppress(OSError):
            nanoseconds += int(thread.read_text().split()[0])
    return nanoseconds / 1e9

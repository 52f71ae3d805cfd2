"""Starts the engine core's process and notices its end, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from pagefleet_kv.config import KvEventsConfig
from pagefleet_protocol.private_folder import PrivateFolder

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.engine_core.process import CoreStart

CORE_COMMAND = (sys.executable, "-P", "-m", "pagefleet_engine.engine_core.process")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a core has to do with beside its API process."""

    kv_events: KvEventsConfig | None = None
    """Where it publishes what its prefix cache gains and loses; None: nowhere."""
    fleet_key_file: str | None = None
    """Of the secret that the engines of its service share; None: it is of no fleet."""
    profiler_dir: str | None = None
    """An existing folder for profiles; None: none is recorded."""
    name: str = "engine core"
    """In the log."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Variables by which it sees no devices but its own."""


class CoreProcess:
    """One child process, with the private folder that both sides share.

    Its end is seen through a pipe of which the child holds the only writing end, so it costs no thread and no waiting,
    and works in every event loop.

    Args:
        config: of the engine.
        command: of the process.
        around: it.

    Attributes:
        folder: private to both sides.
        incarnation: 32 hexadecimal digits, drawn for this one process: a new one has a new, empty cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str] = CORE_COMMAND,
        around: Surroundings | None = None,
    ) -> None:
        self._private = PrivateFolder("pagefleet-engine-")
        self.folder = self._private.path
        self.incarnation = uuid.uuid4().hex
        self._command = command
        self.config = config
        self._around = around or Surroundings()
        self._process: subprocess.Popen[bytes] | None = None
        self._sentinel: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pid(self) -> int:
        """Of the running child."""
        assert self._process is not None
        return self._process.pid

    def start(self, on_exit: Callable[[], None]) -> None:
        """Start the child; `on_exit` is called in the running event loop when it ends."""
        reading, writing = os.pipe()
        try:
            environment = {**os.environ, **self._around.devices}
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, pass_fds=(writing,), env=environment)
        finally:
            os.close(writing)
        self._sentinel = reading
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(reading, self._ended, on_exit)
        assert self._process.stdin is not None
        start = CoreStart(
            str(self.folder),
            writing,
            self.config,
            self.incarnation,
            self._around.kv_events,
            self._around.fleet_key_file,
            self._around.profiler_dir,
            self._around.name,
        )
        with contextlib.suppress(BrokenPipeError):  # it ended already, which the sentinel tells
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.flush()

    def exit_status(self) -> str:
        """Say in words how the child ended."""
        if self._process is None:
            return "was never started"
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "closed its side"
        return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"

    def stop(self) -> None:
        """End the child at once and remove the folder. A second call does nothing."""
        self._unwatch()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._private.remove()

    def _ended(self, on_exit: Callable[[], None]) -> None:
        self._unwatch()
        on_exit()

    def _unwatch(self) -> None:
        if self._sentinel is not None and self._loop is not None:
            self._loop.remove_reader(self._sentinel)
            os.close(self._sentinel)
            self._sentinel = None

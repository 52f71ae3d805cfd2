"""One child process: in a group of its own, its output in a log, gone when this process is gone."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagefleet_operator.local.log_files import ProcessLog

_PR_SET_PDEATHSIG = 1
_CHUNK = 65_536
_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run, and where it will answer."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Added to our own."""
    url: str
    """Base URL without trailing slash, for probes."""
    endpoints: tuple[str, ...] = ()
    """Base URLs for requests, of each data rank; none: it is `url`."""
    kv_addresses: tuple[str, ...] = ()
    """HOST:PORT where the ranks of a prefill engine will answer decode engines; none: it is no prefill engine."""
    followers: tuple[Launch, ...] = ()
    """The other nodes of an engine that has several; their URLs answer probes alone."""


class Child:
    """A running child. Signals go to its whole group, so that what it started ends with it."""

    def __init__(self, process: asyncio.subprocess.Process, log: ProcessLog) -> None:
        self._process = process
        self._log = log
        self._reader = asyncio.create_task(self._copy_output())

    @classmethod
    async def start(cls, launch: Launch, log: ProcessLog) -> Child:
        """Start it.

        Raises:
            OSError: the program cannot be run.
        """
        process = await asyncio.create_subprocess_exec(
            *launch.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **launch.environment},
            start_new_session=True,  # a Ctrl-C in the terminal reaches only us; we end children in the right order
            preexec_fn=die_with_parent(),
        )
        return cls(process, log)

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait until it has ended, and all it said is in the log. Returns its exit status, negative for a signal."""
        status = await self._process.wait()
        self.kill()  # what it may have left behind in its group
        done, _ = await asyncio.wait({self._reader}, timeout=_LAST_WORDS_S)
        if not done:  # something outside the group holds the output open
            self._reader.cancel()
            self._log.close()
        return status

    def terminate(self) -> None:
        """Ask it to finish and end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End it and all it started, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _copy_output(self) -> None:
        stream = self._process.stdout
        while stream is not None and (data := await stream.read(_CHUNK)):
            self._log.feed(data)
        self._log.close()


def exit_text(status: int) -> str:
    """Say in words how a process ended."""
    if status >= 0:
        return f"exit status {status}"
    if -status == signal.SIGKILL:
        return "killed by SIGKILL (by hand, or by the kernel because memory ran out)"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def die_with_parent() -> Callable[[], None] | None:
    """Return what makes a child get SIGTERM when we end in whatever way; only Linux can do that."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: the child must not allocate more than it has to
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the call above
            os.kill(os.getpid(), signal.SIGTERM)

    return prepare

"""A child process that is told one line of JSON, and whose end is noticed, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence

from pagefleet_engine.process_end import how_it_ended


class ChildProcess:
    """One child.

    Its end is seen through a pipe of which it holds the only writing end, so it costs no thread and no waiting, and
    works in every event loop. What it writes there is heard.

    Args:
        command: of the process.
        environment: is added to this process's.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sentinel = -1
        self._its_end = -1
        """The child's number of the pipe's writing end."""

    @property
    def pid(self) -> int:
        """Of the running child."""
        assert self._process is not None
        return self._process.pid

    def begin(self, fds: Sequence[int] = ()) -> None:
        """Start the process, which waits for what it is told; `start` does so where nobody has.

        Args:
            fds: that it inherits.
        """
        self._sentinel, self._its_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                pass_fds=(self._its_end, *fds),
                env={**os.environ, **self._environment},
            )
        finally:
            os.close(self._its_end)

    def start(
        self,
        line: Callable[[int], bytes],
        on_exit: Callable[[], None],
        fds: Sequence[int] = (),
        on_word: Callable[[], None] | None = None,
    ) -> None:
        """Start it in the running event loop.

        Args:
            line: returns what it is told, given the descriptor that it has to keep open.
            on_exit: called when it ends.
            fds: that it inherits besides.
            on_word: called when it writes to the pipe.
        """
        if self._process is None:
            self.begin(fds)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sentinel, self._hear, on_exit, on_word)
        self.tell(line(self._its_end))

    def tell(self, line: bytes) -> None:
        """Write a line to its standard input; nothing where it has ended, which the sentinel tells."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def exit_status(self) -> str:
        """Say in words how it ended."""
        return how_it_ended(self._process)

    def returncode(self) -> int:
        """Return its exit status, once it has ended; negative for a signal."""
        assert self._process is not None
        return self._process.wait()

    def terminate(self) -> None:
        """Send it SIGTERM."""
        assert self._process is not None
        self._process.terminate()

    def stop(self) -> None:
        """End it at once. A second call does nothing."""
        self._unwatch()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _hear(self, on_exit: Callable[[], None], on_word: Callable[[], None] | None) -> None:
        if os.read(self._sentinel, 4096):
            if on_word is not None:
                on_word()
            return
        self._unwatch()
        on_exit()

    def _unwatch(self) -> None:
        if self._sentinel >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._sentinel)
            os.close(self._sentinel)
            self._sentinel = -1

"""One rank's process, as the executor sees it: starts it, hears it, notices its end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from pagefleet_engine.executor.messages import RankStart
from pagefleet_engine.executor.ring import RingHandles, RingReader
from pagefleet_engine.process_end import how_it_ended

RANK_COMMAND = (sys.executable, "-P", "-m", "pagefleet_engine.executor.rank_process")


class LocalRank:
    """A child process. Its end is seen through a pipe of which the child holds the only writing end.

    Attributes:
        sentinel: a descriptor that is readable when the process has ended.
        writing: the other end, which the process inherits.
        replies: what it tells.
        asking: a socket on which it asks the `Rendezvous`.
        asked: the other end, which the process inherits.
    """

    def __init__(self, replies: RingHandles) -> None:
        self.replies = RingReader(replies)
        self.asking, self.asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.sentinel, self.writing = os.pipe()
        except OSError:
            self.asking.close()
            self.asked.close()
            raise
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, start: RankStart, command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
    ) -> None:
        """Start the process, which inherits `fds`; `environment` is added to this one's.

        Raises:
            OSError: the system starts no more processes.
        """
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=(self.writing, self.asked.fileno(), *fds),
                env={**os.environ, **environment},
            )
        finally:
            self._close_theirs()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended already, which the sentinel tells
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Of the process, which was started."""
        assert self._process is not None
        return self._process.pid

    def exit_status(self) -> str:
        """Say in words how the process ended."""
        return how_it_ended(self._process)

    def leave(self) -> None:
        """Have the process end by itself."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def end(self, within_s: float) -> None:
        """Wait for the process's end, and kill it where that does not come; call this once."""
        self.leave()
        if self._process is not None:
            try:
                self._process.wait(within_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.replies.close()
        self._close_theirs()
        self.asking.close()
        os.close(self.sentinel)

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()

    def _close_theirs(self) -> None:
        self.asked.close()
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

"""Lines to a file descriptor by a thread of their own: who writes them never waits for who reads them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator

MAX_CHARS = 2**20
"""That wait for a reader; beyond them lines are dropped."""
_GATHER_S = 0.01
"""What comes within it is written at once: a thread that woke for every piece would take the loop's turns."""


class LineWriter:
    """Looks like a text file to loggers. A reader that is gone ends the writing, not the process.

    Not `sys.stdout` itself: a thread that waits in its lock would abort the interpreter at its end.

    Args:
        fd: where lines go.
        max_chars: that may wait.
    """

    def __init__(self, fd: int, max_chars: int = MAX_CHARS) -> None:
        self.num_dropped = 0
        """Lines for which there was no room."""
        self._fd = fd
        self._max_chars = max_chars
        self._waiting: deque[str] = deque()
        self._num_chars = 0
        self._changed = threading.Condition()
        self._is_over = False
        self._thread: threading.Thread | None = None
        self._is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        """Other processes may write to it: only a piece of its own stays whole."""

    def write(self, lines: str) -> None:
        """Hand whole lines on, which stay together."""
        with self._changed:
            if self._is_over or self._num_chars + len(lines) > self._max_chars:
                self.num_dropped += lines.count("\n")
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
                self._thread.start()
            self._waiting.append(lines)
            self._num_chars += len(lines)
            self._changed.notify()

    def flush(self) -> None:
        """Do nothing: lines go by themselves, within a moment."""

    def close(self, timeout_s: float = 1.0) -> None:
        """Take no more lines, and give the reader a moment for those that wait."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if not self._waiting:
                    return
                ending = self._is_over
            if not ending:
                time.sleep(_GATHER_S)
            with self._changed:
                pieces = list(self._waiting)
                self._waiting.clear()
            num_chars = sum(map(len, pieces))
            if not self._is_pipe:
                pieces = ["".join(pieces)]
            try:
                for lines in pieces:
                    _write_all(self._fd, lines.encode(errors="replace"))
            except OSError:
                with self._changed:
                    self._is_over = True
                    self._waiting.clear()
                return
            with self._changed:
                self._num_chars -= num_chars


@contextlib.contextmanager
def log_without_waiting(package: str, fd: int = 2) -> Iterator[None]:
    """Let a package's log, which goes to `fd`, be written by a `LineWriter` for a while."""
    writer = LineWriter(fd)
    handlers = [one for one in logging.getLogger(package).handlers if isinstance(one, logging.StreamHandler)]
    streams = [handler.setStream(writer) for handler in handlers]
    try:
        yield
    finally:
        writer.close()
        for handler, stream in zip(handlers, streams, strict=True):
            handler.setStream(stream)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # whoever shares it has set it so
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            poller.poll()

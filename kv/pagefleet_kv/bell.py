"""A bell between two threads: one rings, the other waits on its descriptor together with others."""

from __future__ import annotations

import contextlib
import select
import socket
import time


class Bell:
    """Rings until it is silenced. Any thread may ring; one waits and silences."""

    def __init__(self) -> None:
        self._rung = False
        self._hand, self._ear = socket.socketpair()
        self._hand.setblocking(False)
        self._ear.setblocking(False)

    def fileno(self) -> int:
        """Readable while it rings."""
        return self._ear.fileno()

    def ring(self) -> None:
        """Wake who waits. Costs nothing while it rings already."""
        if self._rung:
            return
        self._rung = True
        with contextlib.suppress(BlockingIOError):  # it rings already
            self._hand.send(b"\x00")

    def silence(self) -> None:
        """Stop ringing; call this before looking at what it rang for, so that later news ring again."""
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)
        # Only now: who rang before this line and was not heard has its news in place already.
        self._rung = False

    def close(self) -> None:
        self._hand.close()
        self._ear.close()


_LEAST_S = 0.001
"""That the system can wait for descriptors."""


def wait_for_any(bells: select.poll, timeout_s: float) -> None:
    """Return once one of them is readable, or the time is up; a short one may be slept through.

    Takes descriptors of any number: `select.select` refuses those from 1024 on.
    """
    if timeout_s >= _LEAST_S:
        bells.poll(timeout_s * 1000)
    elif not bells.poll(0):
        time.sleep(timeout_s)

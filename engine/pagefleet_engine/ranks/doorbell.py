"""A count that one process adds to and another takes: how processes of one machine wake each other.

It is an eventfd, and not a word in shared memory, for two reasons. Who waits sleeps after a short while. And what was
written to shared memory before a ring is there for whoever took it, on every processor: the kernel's lock orders it.
"""

from __future__ import annotations

import os
import select
import time


class Doorbell:
    """One end of it. Any process that has the descriptor may ring; one takes.

    Args:
        fd: inherited from the process that made it; None: make one.
    """

    __slots__ = ("_poll", "fd")

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def fileno(self) -> int:
        """Readable while there is something to take."""
        return self.fd

    def ring(self, count: int = 1) -> None:
        """Add to the count."""
        os.eventfd_write(self.fd, count)

    def take(self) -> int:
        """Return the count and set it to 0."""
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def wait(self, timeout_s: float | None = None, spin_s: float = 0.0) -> int:
        """Take the count as soon as there is one; 0 when it did not come in time.

        `spin_s`: look so long before going to sleep. To wake up takes some ten microseconds, in a virtual machine more.
        """
        if count := self.take():
            return count
        if spin_s:
            until = time.perf_counter() + spin_s
            while time.perf_counter() < until:
                if self._poll.poll(0):
                    return self.take()
        return self.take() if self._poll.poll(None if timeout_s is None else timeout_s * 1000) else 0

    def close(self) -> None:
        """Close this end."""
        os.close(self.fd)

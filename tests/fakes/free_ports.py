"""Ports for what must be told its port before it listens, or listens again on the one that it had. No test in here."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
from pathlib import Path

_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _END = 10_000, 20_000
"""From the second on `pagefleet up` draws ports for its own processes, which listen on them seconds later."""


class _Ports:
    """Goes round the ports that are this process's own among those that test side by side."""

    def __init__(self) -> None:
        first_given_away = int(_GIVEN_AWAY.read_text().split()[0])
        end = first_given_away if _LOWEST + 1000 < first_given_away < _END else _END  # else it leaves hardly any
        num = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        share = (end - _LOWEST) // num
        self.own = range(_LOWEST + number * share, _LOWEST + (number + 1) * share)
        self.at = random.SystemRandom().randrange(share)  # a test's seed would have all its runs meet on one port

    def next(self, count: int) -> int:
        if self.at + count > len(self.own):
            self.at = 0
        self.at += count
        return self.own[self.at - count]


@functools.cache
def _of_this_process() -> _Ports:
    return _Ports()


def free_ports(count: int = 1) -> int:
    """Return the first of so many ports in a row that are free on 127.0.0.1 and 127.0.0.2.

    They are none that the system gives away by itself: of those any connection, of whoever runs on this machine, may
    take one between this look and the moment when it is listened on. Nor does anybody else who asks here get them soon.
    """
    while True:
        first = _of_this_process().next(count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                for host in ("127.0.0.1", "127.0.0.2"):
                    stack.enter_context(socket.socket()).bind((host, port))
            return first

"""Ports for what must be told its port before it listens, or listens again on the one that it had. No test in here."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_ports(count: int = 1) -> int:
    """Return the first of so many ports in a row that are free on 127.0.0.1 and 127.0.0.2.

    They are none that the system gives away by itself: of those any connection, of whoever runs on this machine, may
    take one between this look and the moment when it is listened on.
    """
    first_given_away = int(_GIVEN_AWAY.read_text().split()[0])
    end = first_given_away if first_given_away > _LOWEST + 1000 else 32_768  # else it leaves hardly any
    drawn = random.SystemRandom()  # a test's seed would have all its runs meet on one port
    while True:
        first = drawn.randrange(_LOWEST, end - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                for host in ("127.0.0.1", "127.0.0.2"):
                    stack.enter_context(socket.socket()).bind((host, port))
            return first

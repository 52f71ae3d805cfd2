"""One listening socket per process, all on one port (SO_REUSEPORT): Linux spreads connections over them by their hash.

Who starts the processes opens them once and keeps them open, so that nothing is lost when a process dies: whoever takes
its place inherits the same socket with the connections that wait there. One socket shared by all would leave the
spreading to chance: whichever process wakes first takes what it can get.
"""

from __future__ import annotations

import contextlib
import socket


def bind_together(host: str, port: int, num: int) -> tuple[socket.socket, ...]:
    """Return sockets that are bound to one address, and get connections from when they listen.

    Args:
        host: name or address.
        port: 0 takes a free one for all.
        num: how many.

    Raises:
        OSError: the address cannot be had, or somebody has it.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, address = found[0][0], found[0][4]
    _claim(family, address)
    with contextlib.ExitStack() as on_error:
        bound: list[socket.socket] = []
        for _ in range(num):
            one = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM))
            _set_options(one)
            one.bind(address)
            address = one.getsockname()
            bound.append(one)
        on_error.pop_all()
    return tuple(bound)


def _claim(family: int, address: tuple[object, ...]) -> None:
    """Fail where another program of the same user listens: with SO_REUSEPORT two would share the port unnoticed."""
    with socket.socket(family, socket.SOCK_STREAM) as alone:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind(address)


def _set_options(one: socket.socket) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    one.setblocking(False)

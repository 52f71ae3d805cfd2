"""One listening socket per worker, all on one port (SO_REUSEPORT): Linux spreads connections over them by their hash.

The parent opens them once and keeps them open, so that nothing is lost when a worker dies: whoever takes its seat
inherits the same socket with the connections that wait there. One socket shared by all would leave the spreading to
chance: whichever process wakes first takes what it can get.
"""

from __future__ import annotations

import socket

from pagefleet_router.errors import ConfigError

BACKLOG = 1024


def open_listeners(host: str, port: int, num: int) -> tuple[socket.socket, ...]:
    """Return listening sockets on one address; port 0 takes a free one for all.

    Raises:
        ConfigError: the address cannot be had.
    """
    opened: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, address = found[0][0], found[0][4]
        _claim(family, address)
        for _ in range(num):
            listener = socket.socket(family, socket.SOCK_STREAM)
            opened.append(listener)
            _set_options(listener)
            listener.bind(address)
            address = listener.getsockname()
        for listener in opened:
            listener.listen(BACKLOG)
    except OSError as error:
        for listener in opened:
            listener.close()
        raise ConfigError(f"{host}:{port} cannot be listened on ({error.strerror}): give another --port") from error
    return tuple(opened)


def _claim(family: int, address: tuple[object, ...]) -> None:
    """Fail where another router of the same user listens: with SO_REUSEPORT two would share the port unnoticed."""
    with socket.socket(family, socket.SOCK_STREAM) as alone:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind(address)


def _set_options(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.setblocking(False)

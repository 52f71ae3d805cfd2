"""A worker's place: what it inherits from the parent, and so does whoever comes after it."""

from __future__ import annotations

import mmap
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from pagefleet_router.errors import ConfigError

_STAMP = struct.Struct("d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One of several workers."""

    index: int
    num_workers: int
    listener: socket.socket
    """Bound, and listening from the start."""
    folder: Path
    """Private to the workers; holds the sockets on which they tell each other their figures."""
    lifeline: int
    """File descriptor that becomes readable when the parent is gone."""
    stamps: mmap.mmap
    """Shared with the parent: the time of each worker's last sign of life."""
    is_replacement: bool = False
    """Whether another worker had this seat: connections may wait in its socket, and the other workers serve."""

    @property
    def figures_path(self) -> Path:
        """Where this worker tells its figures."""
        return _figures_path(self.folder, self.index)

    @property
    def sibling_paths(self) -> tuple[Path, ...]:
        """Where the others do."""
        others = (index for index in range(self.num_workers) if index != self.index)
        return tuple(_figures_path(self.folder, index) for index in others)

    def beat(self, now: float) -> None:
        """Show that the event loop turns; `now` in monotonic seconds, which all processes have in common."""
        _STAMP.pack_into(self.stamps, _STAMP.size * self.index, now)


def make_stamps(num_workers: int) -> mmap.mmap:
    """Return memory that the processes to be forked share."""
    return mmap.mmap(-1, _STAMP.size * num_workers)


def last_beat(stamps: mmap.mmap, index: int) -> float:
    """Return when a worker last showed itself; 0: never."""
    beat: float = _STAMP.unpack_from(stamps, _STAMP.size * index)[0]
    return beat


def _figures_path(folder: Path, index: int) -> Path:
    return folder / f"{index}.sock"


# One listening socket per worker, all on one port (SO_REUSEPORT): Linux spreads connections over them by their hash.
# The parent opens them once and keeps them open, so that nothing is lost when a worker dies: whoever takes its seat
# inherits the same socket with the connections that wait there. One socket shared by all would leave the spreading to
# chance: whichever process wakes first takes what it can get.
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

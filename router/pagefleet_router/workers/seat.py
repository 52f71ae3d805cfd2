"""A worker's place: what it inherits from the parent, and so does whoever comes after it."""

from __future__ import annotations

import mmap
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from pagefleet_protocol.workers.listeners import bind_together

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
    """Private to the workers; holds the sockets on which they answer each other."""
    lifeline: int
    """File descriptor that becomes readable when the parent is gone."""
    stamps: mmap.mmap
    """Shared with the parent: the time of each worker's last sign of life."""
    is_replacement: bool = False
    """Whether another worker had this seat: connections may wait in its socket, and the other workers serve."""

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


BACKLOG = 1024


def open_listeners(host: str, port: int, num: int) -> tuple[socket.socket, ...]:
    """Return listening sockets on one address; port 0 takes a free one for all.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        opened = bind_together(host, port, num)
        for listener in opened:
            listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be listened on ({error.strerror}): give another --port") from error
    return opened

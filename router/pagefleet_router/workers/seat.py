"""A worker's place: what it inherits from the parent, and so does whoever comes after it."""

from __future__ import annotations

import mmap
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

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

"""The core's sign of life, in memory that the API process reads without asking.

A core that hangs or loads cannot answer, so nobody asks it: it stamps a step counter and the time into a mapped file
before and after each step, and until it is ready how far the loading is. The clock is CLOCK_MONOTONIC, which all
processes of one machine share.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pagefleet_protocol.load_progress import LoadPhase, LoadProgress

_LAYOUT = struct.Struct("<QQQ")
_LOADING = struct.Struct("<QQQ")
"""The phase's place in `_PHASES`, done, total."""
_PHASES: tuple[LoadPhase, ...] = get_args(LoadPhase)


@dataclass(frozen=True, slots=True)
class Progress:
    """What the core stamped last."""

    steps: int
    stamped_at: float
    """Monotonic seconds."""
    busy: bool
    """True from before a step until no work is left."""


class ProgressWriter:
    """The core's side."""

    def __init__(self, file: Path) -> None:
        self._map = _mapped(file)
        self._steps = 0

    def stamp(self, busy: bool, steps: int = 0) -> None:
        """Write the time; `steps` of them were completed since the last stamp."""
        self._steps += steps
        _LAYOUT.pack_into(self._map, 0, self._steps, time.monotonic_ns(), busy)

    def loading(self, phase: LoadPhase, done: int, total: int) -> None:
        """Write how far the loading is; see `startup.Tell`."""
        _LOADING.pack_into(self._map, _LAYOUT.size, _PHASES.index(phase), done, total)


class ProgressReader:
    """An API process's side; the first creates the file."""

    def __init__(self, file: Path, is_first: bool = True) -> None:
        if is_first:
            file.write_bytes(_LAYOUT.pack(0, time.monotonic_ns(), 0) + bytes(_LOADING.size))
        self._map = _mapped(file)
        self._began = time.monotonic()

    def read(self) -> Progress:
        """Return the last stamp. It may be torn between two stamps, which are microseconds apart."""
        steps, nanoseconds, busy = _LAYOUT.unpack_from(self._map, 0)
        return Progress(steps, nanoseconds / 1e9, bool(busy))

    def loading(self) -> LoadProgress:
        """Return how far the loading is."""
        phase, done, total = _LOADING.unpack_from(self._map, _LAYOUT.size)
        return LoadProgress(_PHASES[phase], done, total, time.monotonic() - self._began)

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def _mapped(file: Path) -> mmap.mmap:
    with file.open("r+b") as handle:
        return mmap.mmap(handle.fileno(), _LAYOUT.size + _LOADING.size)


READY_STALL_S = 10.0
LIVE_STALL_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether the core makes progress."""

    alive: bool
    """The process exists."""
    stalled_s: float
    """Seconds without a step while work waits; 0 when idle."""

    @property
    def ready(self) -> bool:
        """Send it traffic."""
        return self.alive and self.stalled_s < READY_STALL_S

    @property
    def live(self) -> bool:
        """Keep the process."""
        return self.alive and self.stalled_s < LIVE_STALL_S


def judge(progress: Progress, alive: bool, work_since: float | None, now: float) -> EngineHealth:
    """Work out the health.

    Args:
        progress: the core's last stamp.
        alive: False when the process is gone.
        work_since: when the client's oldest spell of open requests began; None when it has none. A core that stopped
            while it was idle has an old stamp, and cannot have taken up work before it was sent.
        now: monotonic seconds.
    """
    began = progress.stamped_at
    if work_since is not None:
        began = max(began, work_since)
    elif not progress.busy:
        return EngineHealth(alive, 0.0)
    return EngineHealth(alive, max(0.0, now - began))

"""Where the time from a process's start to its first request goes, by phase; and which phase it is in now."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
from pagefleet_protocol.load_progress import LoadPhase

Tell = Callable[[LoadPhase, int, int], None]
"""Called with the phase that runs, what is done of it and all of it; both 0 where that is not counted."""


def _tell_nobody(phase: LoadPhase, done: int, total: int) -> None:
    """The default."""


def process_age() -> float:
    """Seconds since this process began: to a hundredth where /proc tells, else to a second."""
    told = Path("/proc/self/stat")
    if not told.exists():
        return time.time() - float(psutil.Process().create_time())
    began = int(told.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


class StartupTimes:
    """Seconds of each phase, in the order in which they began. A phase within another counts for itself only.

    Args:
        clock: seconds, monotonic.
        tell: is told each change.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, tell: Tell = _tell_nobody) -> None:
        self._clock = clock
        self._tell = tell
        self._running: list[LoadPhase] = ["other"]
        """Phases that run, the outermost first."""
        self._began = clock()
        self._seconds: dict[LoadPhase, float] = {}
        self._inner: list[float] = []
        """Seconds of finished phases within each one that runs, the outermost first."""

    @contextmanager
    def phase(self, name: LoadPhase) -> Iterator[None]:
        """Count what runs inside to the phase, also when it fails; a phase may run several times."""
        self._seconds.setdefault(name, 0.0)
        self._inner.append(0.0)
        self._running.append(name)
        self._tell(name, 0, 0)
        began = self._clock()
        try:
            yield
        finally:
            self._running.pop()
            self._tell(self._running[-1], 0, 0)
            taken = self._clock() - began
            self._seconds[name] += taken - self._inner.pop()
            if self._inner:
                self._inner[-1] += taken

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Count the phase of imports. No garbage is collected meanwhile: what imports make stays, and to look through
        it again and again takes a sixth of their time."""
        collects = gc.isenabled()
        gc.disable()
        try:
            with self.phase("imports"):
                yield
        finally:
            if collects:
                gc.enable()

    def count(self, done: int, total: int) -> None:
        """Tell how much of the phase that runs is done."""
        self._tell(self._running[-1], done, total)

    def relay(self, phase: LoadPhase, done: int, total: int) -> None:
        """Tell how far other processes are that this one waits for."""
        self._tell(phase, done, total)

    def include(self, seconds: Mapping[LoadPhase, float]) -> None:
        """Count the phases that another process went through meanwhile."""
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value

    def phases(self) -> dict[LoadPhase, float]:
        """Seconds of each phase that has a name."""
        return dict(self._seconds)

    @property
    def total(self) -> float:
        """Seconds since this object was made."""
        return self._clock() - self._began

    def seconds(self) -> dict[str, float]:
        """Each phase so far, `other` for what belongs to none, and the `total`."""
        total = self.total
        named: dict[str, float] = {str(name): value for name, value in self._seconds.items()}
        named["other"] = named.get("other", 0.0) + total - sum(self._seconds.values())
        return {**named, "total": total}

    def describe(self) -> str:
        """One line for the log; phases under 10 ms are not worth their words."""
        seconds = self.seconds()
        total = seconds.pop("total")
        phases = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.01)
        return f"started in {total:.2f} s: {phases or 'nothing that took time'}"

"""How long the device had nothing to do between steps that followed each other: what a host that is too slow costs."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch


class IdleTimer(Protocol):
    """Adds up the gaps. Each step calls `begin` before its first work on the device and `end` after its last."""

    def begin(self, *, follows: bool) -> None:
        """A step starts; `follows` says that the one before left work to do."""
        ...

    def end(self) -> None:
        """Its last work was given to the device."""
        ...

    @property
    def idle_seconds(self) -> float:
        """The gaps so far, of steps that are done."""
        ...


class HostIdleTimer:
    """Where a step is computed while it is launched."""

    def __init__(self) -> None:
        self._ended_at: float | None = None
        self._total = 0.0

    def begin(self, *, follows: bool) -> None:
        """See IdleTimer."""
        if follows and self._ended_at is not None:
            self._total += time.monotonic() - self._ended_at

    def end(self) -> None:
        """See IdleTimer."""
        self._ended_at = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """See IdleTimer."""
        return self._total


class CudaIdleTimer:
    """Events around each step; their times are read when the device has passed them, so nothing waits."""

    def __init__(self) -> None:
        self._last_end: torch.cuda.Event | None = None
        self._gaps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._total = 0.0

    def begin(self, *, follows: bool) -> None:
        """See IdleTimer."""
        if follows and self._last_end is not None:
            start = _event()
            self._gaps.append((self._last_end, start))
        while self._gaps and self._gaps[0][1].query():  # type: ignore[no-untyped-call]
            end, start = self._gaps.popleft()
            self._total += end.elapsed_time(start) / 1e3

    def end(self) -> None:
        """See IdleTimer."""
        self._last_end = _event()

    @property
    def idle_seconds(self) -> float:
        """See IdleTimer."""
        return self._total


def make_idle_timer(device: torch.device) -> IdleTimer:
    """The timer of a device."""
    return CudaIdleTimer() if device.type == "cuda" else HostIdleTimer()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event

"""How far a download is, and how fast: counted by those who work, read by whoever draws or tells it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from pagefleet_protocol.model_facts import Phase, Progress

_log = logging.getLogger(__name__)
_WINDOW_S = 5.0
_MARK_S = 0.25
_REPORT_S = 10.0


class DownloadProgress(Protocol):
    """What a bar needs. Reading costs nothing and is allowed from any thread."""

    def snapshot(self) -> Progress:
        """Phase, bytes and files, done and in all; no totals before the files are listed."""
        ...

    def bytes_per_second(self) -> float:
        """Speed over the network in the last seconds; 0 while nothing comes. What was here already does not count."""
        ...


class ProgressMeter:
    """Counts bytes and files. For one event loop; a DownloadProgress for everybody."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase: Phase = "listing"
        self._bytes_done = self._bytes_total = self._files_done = self._files_total = 0
        self._fetched = 0
        self._marks: deque[tuple[float, int]] = deque()
        """Times and bytes fetched until then, the first just older than the window."""

    def begin(self, phase: Phase) -> None:
        self._phase = phase

    def expect(self, num_bytes: int, num_files: int) -> None:
        """Say what the whole of the next download is, whether it is here already or not."""
        self._bytes_done = self._files_done = 0
        self._bytes_total, self._files_total = num_bytes, num_files

    def add_bytes(self, count: int) -> None:
        """So many more have come; less than 0 when bytes turned out to be wrong."""
        now, marks = self._clock(), self._marks
        if not marks or now - marks[-1][0] >= _MARK_S:
            marks.append((now, self._fetched))
            while len(marks) > 1 and now - marks[1][0] >= _WINDOW_S:
                marks.popleft()
        self._fetched += max(0, count)
        self._bytes_done += count

    def add_found(self, count: int) -> None:
        """So many more were here already."""
        self._bytes_done += count

    def add_files(self, count: int = 1) -> None:
        """So many more are here and verified."""
        self._files_done += count

    def snapshot(self) -> Progress:
        return Progress(
            phase=self._phase,
            bytes_done=self._bytes_done,
            bytes_total=self._bytes_total,
            files_done=self._files_done,
            files_total=self._files_total,
        )

    def bytes_per_second(self) -> float:
        now, fetched = self._clock(), self._fetched
        at, before = next((mark for mark in tuple(self._marks) if now - mark[0] <= _WINDOW_S), (now, fetched))
        return (fetched - before) / max(now - at, _MARK_S)


@asynccontextmanager
async def logged(progress: DownloadProgress) -> AsyncIterator[None]:
    """A line in the log now and then, for as long as the context lasts."""

    async def report() -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            now = progress.snapshot()
            _log.info(
                "%s: %s of %s at %s/s, %s of %s files",
                *(now.phase, amount(now.bytes_done), amount(now.bytes_total), amount(int(progress.bytes_per_second()))),
                *(now.files_done, now.files_total),
            )

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def amount(num_bytes: int) -> str:
    """Bytes as people read them."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"

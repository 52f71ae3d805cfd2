"""Work on text, off the event loop: metered by its size, fair between tenants, bounded in memory.

Tokenizing a megabyte takes about a second. Whose turn it is follows start-time fair queueing: of the tenants that wait
the one that has had the least work is next. Large pieces leave a thread free, so that short ones never wait for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pagefleet_engine.errors import QueueFull

THREADS = 2
LARGE = 64 * 1024
"""Characters or bytes from which on a piece is large."""
MAX_WAITING = 64 * 1024 * 1024
"""Characters and bytes of all pieces in line."""
_SMALLEST = 1024
"""What a piece counts at least: a thread has to take it."""

T = TypeVar("T")
_Name = tuple[str, bool]
"""A tenant, and whether the line is that of its large pieces."""


@dataclass(slots=True)
class _Piece:
    size: int
    work: Callable[[], Any]
    done: asyncio.Future[Any]


@dataclass(slots=True)
class _Line:
    """One tenant's small pieces, or its large ones; it exists while some of them wait."""

    begins_at: float
    """Virtual time at which its next piece begins."""
    pieces: deque[_Piece] = field(default_factory=deque)
    size: int = 0
    """Of its pieces together."""


class TextWork:
    """Runs pieces of work in a pool. Belongs to one event loop.

    Args:
        pool: of `threads` threads.
        threads: that work at once.
        max_waiting: in line together; one tenant may fill half of it.
    """

    def __init__(self, pool: Executor, threads: int = THREADS, max_waiting: int = MAX_WAITING) -> None:
        self._pool = pool
        self._threads = threads
        self._max_waiting = max_waiting
        self._lines: dict[_Name, _Line] = {}
        self._finished: dict[_Name, float] = {}
        """Line -> virtual time at which its last piece ends; only where that lies ahead."""
        self._clock = 0.0
        self._num_working = 0
        self._num_large = 0
        self._waiting = 0

    async def run(self, tenant: str | None, size: int, work: Callable[[], T]) -> T:
        """Return what `work` returns, in its turn. Whoever is cancelled leaves the line.

        Args:
            tenant: whose work it is; None: nobody's in particular.
            size: characters or bytes that it works on.
            work: called in a thread.

        Raises:
            QueueFull: too much is waiting.
        """
        name = (tenant or "", size >= LARGE)
        line = self._lines.get(name)
        own = sum(self._lines[one].size for one in ((name[0], False), (name[0], True)) if one in self._lines)
        if own and (own + size > self._max_waiting // 2 or self._waiting + size > self._max_waiting):
            raise QueueFull("The server has too much text to work on. Try again later.", 1.0)
        piece = _Piece(size, work, asyncio.get_running_loop().create_future())
        if line is None:
            line = self._lines[name] = _Line(max(self._clock, self._finished.pop(name, 0.0)))
        line.pieces.append(piece)
        line.size += size
        self._waiting += size
        self._start()
        return await piece.done  # type: ignore[no-any-return]

    def _start(self) -> None:
        """Give free threads what is next."""
        while self._num_working < self._threads and (name := self._next()) is not None:
            line = self._lines[name]
            piece = line.pieces.popleft()
            line.size -= piece.size
            self._waiting -= piece.size
            if not piece.done.cancelled():
                self._clock = max(self._clock, line.begins_at)
                line.begins_at += max(piece.size, _SMALLEST)
                self._work(piece)
            if not line.pieces:
                del self._lines[name]
                self._remember(name, line.begins_at)

    def _next(self) -> _Name | None:
        """Return the line whose turn it is; None where all that waits is large, and enough of that is worked on."""
        may_be_large = self._num_large < max(1, self._threads - 1)
        names = [name for name in self._lines if may_be_large or not name[1]]
        return min(names, key=lambda name: self._lines[name].begins_at, default=None)

    def _remember(self, name: _Name, ends_at: float) -> None:
        self._finished[name] = ends_at
        if len(self._finished) > 2 * len(self._lines) + 64:
            self._finished = {one: end for one, end in self._finished.items() if end > self._clock}

    def _work(self, piece: _Piece) -> None:
        is_large = piece.size >= LARGE
        self._num_working += 1
        self._num_large += is_large

        def ended(worked: asyncio.Future[Any]) -> None:
            self._num_working -= 1
            self._num_large -= is_large
            error = None if worked.cancelled() else worked.exception()
            if not piece.done.done():
                if worked.cancelled():
                    piece.done.cancel()
                elif error is not None:
                    piece.done.set_exception(error)
                else:
                    piece.done.set_result(worked.result())
            self._start()

        asyncio.get_running_loop().run_in_executor(self._pool, piece.work).add_done_callback(ended)

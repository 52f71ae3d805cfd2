"""Ends a request's work from outside: its client left, or the process stops. Costs nothing per token.

Works as asyncio.timeout does: the task is cancelled, and the cancellation becomes the exception that says why.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class OpenRequests:
    """The generations that run now, so that the process can end them."""

    def __init__(self) -> None:
        self._scopes: set[InterruptScope] = set()
        self._ended_by: Exception | None = None

    def __len__(self) -> int:
        return len(self._scopes)

    def scope(self, receive: Receive) -> InterruptScope:
        """Return a scope for one request's work, to be entered with `async with`."""
        return InterruptScope(self, receive)

    def end_all(self, reason: Exception) -> None:
        """Interrupt every open scope, and each later one as it opens."""
        self._ended_by = reason
        for scope in tuple(self._scopes):
            scope.interrupt(reason)

    def add(self, scope: InterruptScope) -> None:
        """Take in a scope that opens.

        Raises:
            Exception: the reason given to `end_all`, if that was called.
        """
        if self._ended_by is not None:
            raise self._ended_by
        self._scopes.add(scope)

    def discard(self, scope: InterruptScope) -> None:
        """Let go of a scope that closes."""
        self._scopes.discard(scope)


class InterruptScope:
    """Work that ends with ClientGoneError when `receive` reports a disconnect, or with what `interrupt` is given.

    The request's body must have been read before: whatever else `receive` returns is dropped.
    """

    def __init__(self, owner: OpenRequests, receive: Receive) -> None:
        self._owner = owner
        self._receive = receive
        self._reason: Exception | None = None
        self._tasks: tuple[asyncio.Task[object], asyncio.Task[None]] | None = None
        self._cancelling = 0

    async def __aenter__(self) -> InterruptScope:
        work = asyncio.current_task()
        if work is None:
            raise RuntimeError("an interrupt scope needs a task")
        self._owner.add(self)
        self._cancelling = work.cancelling()
        self._tasks = (work, asyncio.create_task(self._watch()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.discard(self)
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return
        work, watcher = tasks
        watcher.cancel()
        if self._reason is None:
            return
        others = work.uncancel() > self._cancelling
        if kind is asyncio.CancelledError and not others:
            raise self._reason from None

    def interrupt(self, reason: Exception) -> None:
        """End the work with `reason`; the first call counts, and none after the work has ended."""
        if self._reason is None and self._tasks is not None:
            self._reason = reason
            self._tasks[0].cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGoneError())

"""The answer to a scrape where several processes are one router: it waits for the others' figures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pagefleet_router.errors import Refusal
from pagefleet_router.proxy.client_connection import ClientConnection
from pagefleet_router.proxy.client_request import ClientRequest

PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
CLIENT_LEFT = 499


class Scrape:
    """Implements the responder of a client connection.

    Args:
        request: what is answered.
        client: who gets it.
        gather: returns the exposition of all processes, in bounded time.
    """

    def __init__(
        self, request: ClientRequest, client: ClientConnection, gather: Callable[[], Awaitable[bytes]]
    ) -> None:  # fmt: skip
        self.request = request
        self.status = 200
        self._client = client
        self._gather = gather
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.get_running_loop().create_task(self._answer())

    def client_lost(self) -> None:
        """Ask no more."""
        self.status = CLIENT_LEFT
        self._stop()

    def client_paused(self) -> None:
        """Nothing is sent before all of it is there."""

    def client_resumed(self) -> None:
        """See `client_paused`."""

    def check(self, now: float) -> None:
        """Nothing to look at: gathering ends by itself."""

    def cut(self, refusal: Refusal) -> None:
        """End now."""
        self.status = refusal.status
        self._stop()
        self._client.refuse(refusal)

    async def _answer(self) -> None:
        text = await self._gather()
        self._task = None
        self._client.answer(200, PROMETHEUS, text)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

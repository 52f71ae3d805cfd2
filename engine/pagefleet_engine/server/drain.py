"""How many requests the server works on: at most so many at once, and none new once it drains."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from pagefleet_engine.errors import QueueFull
from pagefleet_engine.server.access import ROUTES, Access
from pagefleet_engine.server.errors import ServerStoppingError


class Drain:
    """Whether the server takes new requests, and how many it works on.

    Args:
        max_in_flight: more than the engine would run and queue are refused before their bodies are read.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.draining = False
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """Take no new requests from now on."""
        self.draining = True

    async def wait_until_idle(self) -> None:
        """Return when no request is being worked on."""
        await self._idle.wait()

    def enter(self) -> None:
        """Count a request.

        Raises:
            ServerStoppingError: none is taken any more.
            QueueFull: too many are worked on.
        """
        if self.draining:
            raise ServerStoppingError
        if self._in_flight >= self._max_in_flight:
            raise QueueFull(f"The server works on {self._in_flight} requests already. Try again later.", 1.0)
        self._in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request's end."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()


class DrainGate:
    """ASGI middleware that counts requests; probes and metrics are answered until the very end."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or ROUTES.get(scope["path"]) is Access.PUBLIC:
            await self._app(scope, receive, send)
            return
        self._drain.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.leave()

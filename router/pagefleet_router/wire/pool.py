"""Connections to engines, kept alive between requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pagefleet_router.config import check_engine_url
from pagefleet_router.errors import Failure
from pagefleet_router.wire.upstream import UpstreamConnection

MAX_IDLE = 512
IDLE_S = 30.0
"""Shorter than the engine's own limit (75 s), so that it rarely closes a connection just as we use it."""

OnConnected = Callable[[UpstreamConnection | Failure], None]


@dataclass(slots=True, eq=False)
class EnginePool:
    """The connections to one engine."""

    url: str
    connect_timeout: float
    clock: Callable[[], float]
    idle: list[UpstreamConnection] = field(default_factory=list)
    open: set[UpstreamConnection] = field(default_factory=set)
    _dials: set[asyncio.Task[None]] = field(default_factory=set)
    closed: bool = False

    def take(self) -> UpstreamConnection | None:
        """Return the idle connection that was used last, so that surplus ones grow old; None when there is none."""
        while self.idle:
            connection = self.idle.pop()
            if connection.usable:
                return connection
        return None

    def dial(self, then: OnConnected) -> asyncio.Task[None]:
        """Open a connection and hand it, or why there is none, to `then`. Cancelling the task calls nobody."""
        task = asyncio.get_running_loop().create_task(self._dial(then))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        return task

    def on_open(self, connection: UpstreamConnection) -> None:
        """Count a connection."""
        self.open.add(connection)

    def on_idle(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request."""
        if self.closed or len(self.idle) >= MAX_IDLE:
            connection.abandon()
            return
        connection.idle_since = self.clock()
        self.idle.append(connection)

    def on_closed(self, connection: UpstreamConnection) -> None:
        """Forget a connection."""
        self.open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def drop_stale(self, now: float) -> None:
        """Close what was idle for long."""
        stale = [connection for connection in self.idle if now - connection.idle_since > IDLE_S]
        for connection in stale:
            self.idle.remove(connection)
            connection.abandon()

    def drop_idle(self) -> None:
        """Close every connection that waits for a request."""
        for connection in self.idle:
            connection.abandon()
        self.idle.clear()

    def close(self) -> None:
        """Keep nothing from now on; what runs ends in its own time."""
        self.closed = True
        self.drop_idle()

    async def _dial(self, then: OnConnected) -> None:
        loop = asyncio.get_running_loop()
        host, port = check_engine_url(self.url)
        result: UpstreamConnection | Failure
        try:
            async with asyncio.timeout(self.connect_timeout):
                _, result = await loop.create_connection(lambda: UpstreamConnection(self), host, port)
        except TimeoutError:
            result = Failure.UNREACHABLE
        except ConnectionRefusedError:
            result = Failure.REFUSED
        except (OSError, UnicodeError):  # the second for what cannot be a host at all
            result = Failure.UNREACHABLE
        then(result)


class UpstreamPools:
    """One pool per base URL."""

    def __init__(self, connect_timeout: float, clock: Callable[[], float]) -> None:
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._pools: dict[str, EnginePool] = {}

    def pool(self, url: str) -> EnginePool:
        """Return the pool of one engine."""
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = EnginePool(url, self._connect_timeout, self._clock)
        return pool

    def keep_only(self, urls: set[str]) -> None:
        """Close the pools of engines that left."""
        for gone in self._pools.keys() - urls:
            self._pools.pop(gone).close()

    def drop_stale(self, now: float) -> None:
        """Close what was idle for long."""
        for pool in self._pools.values():
            pool.drop_stale(now)

    def num_open(self) -> int:
        """Return how many connections are open."""
        return sum(len(pool.open) for pool in self._pools.values())

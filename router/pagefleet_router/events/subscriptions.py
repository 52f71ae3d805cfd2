"""Who is listened to: every engine whose facts name a port for KV events, at the address that discovery gave for it.

Each engine has a place in the exact index only as long as its incarnation is followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable
from functools import partial

import zmq
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_protocol.fleet_key import FleetKey

from pagefleet_router.background import tell_of_a_crash
from pagefleet_router.config import check_engine_url
from pagefleet_router.endpoints import EndpointTable, EngineView
from pagefleet_router.events.sockets import EventSockets
from pagefleet_router.events.subscriber import EventCounts, EventSubscriber
from pagefleet_router.prefix.exact import ExactIndex

logger = logging.getLogger(__name__)


class EventSubscriptions:
    """The subscribers of one router.

    Args:
        table: says which engines there are, and their facts.
        index: what the events go into.
        on_live: see EventSubscriber.
        key: of the fleet; None: only engines on this machine are listened to.
    """

    def __init__(
        self, table: EndpointTable, index: ExactIndex, on_live: Callable[[str, bool], None], key: FleetKey | None
    ) -> None:
        self.counts = EventCounts()
        self._index = index
        self._on_live = on_live
        self._key = key
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        table.subscribe(self._follow)
        table.subscribe_to_facts(self._facts_changed)

    async def stop(self) -> None:
        """End all."""
        for engine_id in list(self._tasks):
            self._end(engine_id)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    def _follow(self, left: set[str], came: set[str]) -> None:
        for engine_id in left:
            self._end(engine_id)

    def _facts_changed(self, engine: EngineView, before: EngineFacts | None) -> None:
        self._end(engine.id)
        facts = engine.facts
        if facts is None or facts.kv_events_port is None or not facts.prefix_caching:
            return
        host, _ = check_engine_url(engine.endpoint.url)
        if self._key is None and not _is_loopback(host):
            logger.warning("engine %s has KV events, but this router no fleet key: give --fleet-key-file", engine.id)
            return
        if self._context is None:
            self._context = zmq.Context()
        connect = partial(EventSockets, self._context, host, facts.kv_events_port, self._key)
        self._index.join(engine.id, facts.num_blocks)
        subscriber = EventSubscriber(engine.id, facts.incarnation, self._index, self.counts, self._on_live)
        task = asyncio.get_running_loop().create_task(subscriber.run(connect))
        self._tasks[engine.id] = task
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        tell_of_a_crash(task, "the KV events of an engine are not followed any more")

    def _end(self, engine_id: str) -> None:
        task = self._tasks.pop(engine_id, None)
        if task is not None:
            task.cancel()
            self._on_live(engine_id, False)
            self._index.leave(engine_id)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

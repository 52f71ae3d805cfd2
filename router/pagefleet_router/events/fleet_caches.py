"""What a router knows of its engines' prefix caches, put together: their events, the exact index, and the guess."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Iterator
from functools import partial

import zmq
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_protocol.fleet_key import FleetKey
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagefleet_router.config import RouterConfig, check_engine_url
from pagefleet_router.engines.endpoints import EndpointTable, EngineView
from pagefleet_router.events.sockets import EventSockets
from pagefleet_router.events.subscriber import EventCounts, EventSubscriber
from pagefleet_router.prefix.exact import ExactIndex
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.prefix.knowledge import ApproximatePrefixes, PrefixBook
from pagefleet_router.telemetry.log import tell_of_a_crash

logger = logging.getLogger(__name__)

_PREFIX = "pagefleet_router_kv_"


class FleetCaches:
    """The caches of one router's engines.

    Attributes:
        knowledge: for the policies.

    Args:
        config: the settings.
        table: the engines.
        key: of the fleet, which engines that publish events ask for; None: there is none.
    """

    def __init__(self, config: RouterConfig, table: EndpointTable, key: FleetKey | None = None) -> None:
        self._index = ExactIndex()
        self.knowledge = PrefixBook(ApproximatePrefixes(PrefixIndex(config.prefix_pieces)), self._index)
        self._subscriptions: EventSubscriptions | None = None
        table.subscribe_to_facts(self._facts_changed)
        if config.kv_events:
            self._subscriptions = EventSubscriptions(table, self._index, self.knowledge.set_live, key)

    def tick(self, now: float) -> None:
        """Forget what is too old, some of it at a time."""
        self._index.tick(now)

    async def stop(self) -> None:
        """Listen no more."""
        if self._subscriptions is not None:
            await self._subscriptions.stop()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        if self._subscriptions is None:
            return
        counts = self._subscriptions.counts
        for name, text, value in (
            ("events", "Messages of engines about their prefix caches.", counts.num_messages),
            ("event_gaps", "Gaps in their numbers, each of which was asked for again.", counts.num_gaps),
            ("events_dropped", "Messages that were garbage or of a stranger.", counts.num_dropped),
        ):
            yield CounterMetricFamily(_PREFIX + name, text, value=value)
        yield GaugeMetricFamily(_PREFIX + "blocks", "Blocks of engines in the exact prefix index.", len(self._index))
        caches = self.knowledge.num_live
        yield GaugeMetricFamily(_PREFIX + "engines_followed", "Caches of engines that are known exactly.", caches)

    def _facts_changed(self, engine: EngineView, before: EngineFacts | None) -> None:
        if before is not None and (engine.facts is None or engine.facts.incarnation != before.incarnation):
            self.knowledge.lost(engine.id)


# Who is listened to: every cache for which an engine's facts name a port for KV events, at the address that discovery
# gave for the engine. Each has a place in the exact index only as long as its incarnation is followed. Caches of one
# engine end and begin together: where one rank dies, the engine does.
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
        self._tasks: dict[str, dict[str, asyncio.Task[None]]] = {}
        """Of each engine, by its caches."""
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
        if facts is None or not facts.prefix_caching or all(one.kv_events_port is None for one in facts.caches):
            return
        host, _ = check_engine_url(engine.endpoint.url)
        if self._key is None and not _is_loopback(host):
            logger.warning("engine %s has KV events, but this router no fleet key: give --fleet-key-file", engine.id)
            return
        if self._context is None:
            self._context = zmq.Context()
        tasks = self._tasks[engine.id] = {}
        for name, cache in zip(engine.cache_ids, facts.caches, strict=True):
            if cache.kv_events_port is None:
                continue
            connect = partial(EventSockets, self._context, host, cache.kv_events_port, self._key)
            self._index.join(name, cache.num_blocks)
            subscriber = EventSubscriber(name, cache.incarnation, self._index, self.counts, self._on_live)
            task = asyncio.get_running_loop().create_task(subscriber.run(connect))
            tasks[name] = task
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            tell_of_a_crash(task, "the KV events of an engine are not followed any more")

    def _end(self, engine_id: str) -> None:
        for name, task in self._tasks.pop(engine_id, {}).items():
            task.cancel()
            self._on_live(name, False)
            self._index.leave(name)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

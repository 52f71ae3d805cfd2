"""What a router knows of its engines' prefix caches, put together: their events, the exact index, and the guess."""

from __future__ import annotations

from collections.abc import Iterator

from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_protocol.fleet_key import FleetKey
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagefleet_router.config import RouterConfig
from pagefleet_router.endpoints import EndpointTable, EngineView
from pagefleet_router.events.subscriptions import EventSubscriptions
from pagefleet_router.prefix.exact import ExactIndex
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.prefix.knowledge import ApproximatePrefixes, PrefixBook

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
        engines = self.knowledge.num_live
        yield GaugeMetricFamily(_PREFIX + "engines_followed", "Engines whose caches are known exactly.", engines)

    def _facts_changed(self, engine: EngineView, before: EngineFacts | None) -> None:
        if before is not None and (engine.facts is None or engine.facts.incarnation != before.incarnation):
            self.knowledge.lost(engine.id)

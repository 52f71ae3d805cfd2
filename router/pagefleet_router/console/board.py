"""The console's document: built in the event loop in small steps when somebody asks, kept for a second."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec
from pagefleet_protocol.console_state import (
    MAX_NOTES,
    AdmissionState,
    ConsoleState,
    EngineState,
    PairState,
    ServiceState,
    encode_state,
)
from pagefleet_protocol.fault_book import FaultBook, shown_time
from pagefleet_protocol.service_news import ServiceNews
from pagefleet_protocol.version import VERSION

from pagefleet_router.admission.gate import Gate
from pagefleet_router.console.engines import engine_state, flow_rates
from pagefleet_router.console.parts import Part, decode_parts, encode_part, merge_parts
from pagefleet_router.engines.endpoints import EndpointTable
from pagefleet_router.signals.monitor import Watched
from pagefleet_router.telemetry.faults import UNLISTED
from pagefleet_router.telemetry.recent_requests import RecentRequests
from pagefleet_router.wire.client_connection import OwnAnswer
from pagefleet_router.wire.client_request import ClientRequest

KEPT_S = 1.0
"""A document is good for so long, whoever asks."""
_STEP = 10
"""Engines that are looked at in one turn of the event loop."""
_MARK_S, _WINDOW_S = 5.0, 30.0
"""How often the flows between engines are noted, and for how long."""

Flows = Mapping[tuple[str, str], tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the figures come from."""

    table: EndpointTable
    watched: Mapping[str, Watched]
    """By engine."""
    gate: Gate
    recent: RecentRequests
    faults: FaultBook
    running: Callable[[], Iterable[str]]
    """Yields the tenant of each request that was let in."""
    flows: Callable[[], Flows]
    """Returns what went from engine to engine since the start, see `PairMetrics.flows`."""
    news: Callable[[], Awaitable[ServiceNews]]
    """Returns what is known of the service."""
    ask_siblings: Callable[[], Awaitable[list[bytes]]] | None = None
    """Returns the parts of the other workers; None: there are none."""


class Document:
    """What was so at one moment, and how each tenant sees it."""

    def __init__(self, state: ConsoleState, built_at: float) -> None:
        self.built_at = built_at
        self._state = state
        self._seen: dict[str | None, tuple[str, bytes]] = {}

    def seen_by(self, tenant: str | None) -> tuple[str, bytes]:
        """Return the ETag and the JSON that a tenant gets; None: no keys are asked for."""
        found = self._seen.get(tenant)
        if found is None:
            state = self._state
            its = msgspec.structs.replace(
                state,
                tenant=tenant,
                admission=tuple(line for line in state.admission if tenant in (None, line.tenant)),
                requests=tuple(one for one in state.requests if tenant in (None, one.tenant))[:MAX_NOTES],
            )
            found = self._seen[tenant] = encode_state(its)
        return found


class Board:
    """Implements Console.

    Args:
        sources: what it shows.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self, sources: Sources, clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._sources = sources
        self._clock = clock
        self._wall_clock = wall_clock
        self._document: Document | None = None
        self._building: asyncio.Task[Document] | None = None
        self._marks: deque[tuple[float, Flows]] = deque([(clock(), {})])

    async def state(self, request: ClientRequest) -> OwnAnswer:
        """See Console."""
        tenant = None if request.tenant is None else request.tenant.name
        etag, body = (await self._fresh()).seen_by(tenant)
        fields = [(b"etag", etag.encode()), (b"cache-control", b"private, no-cache")]
        if etag in request.fields.get(b"if-none-match", b"").decode("latin-1"):
            return OwnAnswer(b"", fields, 304)
        return OwnAnswer(body, [*fields, (b"content-type", b"application/json")])

    def tick(self, now: float) -> None:
        """Note the flows between engines; called a few times a second."""
        if now - self._marks[-1][0] < _MARK_S:
            return
        self._marks.append((now, dict(self._sources.flows())))
        while now - self._marks[0][0] > _WINDOW_S:
            self._marks.popleft()

    def own_part(self) -> bytes:
        """Return this worker's part, for the others."""
        return encode_part(self._part())

    async def _fresh(self) -> Document:
        document = self._document
        if document is not None and self._clock() - document.built_at < KEPT_S:
            return document
        if self._building is None:
            self._building = asyncio.get_running_loop().create_task(self._build())
            self._building.add_done_callback(self._built)
        return await asyncio.shield(self._building)

    def _built(self, task: asyncio.Task[Document]) -> None:
        self._building = None
        if not task.cancelled() and task.exception() is None:
            self._document = task.result()

    async def _build(self) -> Document:
        sources, built_at = self._sources, self._clock()
        if sources.table.unlisted is not None:
            sources.faults.note(UNLISTED, detail=sources.table.unlisted)
        parts = [self._part()]
        if sources.ask_siblings is not None:
            parts += decode_parts(await sources.ask_siblings())
        whole = merge_parts(parts)
        news, snapshot = await sources.news(), sources.table.snapshot
        state = ConsoleState(
            at=shown_time(self._wall_clock()),
            source="router",
            tenant=None,
            workers=len(parts),
            service=ServiceState(
                name=news.name,
                namespace=news.namespace,
                models=snapshot.names,
                version=VERSION,
                statements=news.statements,
            ),
            engines=await self._engines(Counter(fault.engine for fault in whole.faults)),
            pairs=whole.pairs,
            admission=whole.admission,
            scaling=news.scaling,
            faults=whole.faults,
            requests=whole.requests,
        )
        return Document(state, built_at)

    async def _engines(self, num_faults: Counter[str | None]) -> tuple[EngineState, ...]:
        """Look at some at a time, so that requests get their turns in between."""
        states: list[EngineState] = []
        for number, engine in enumerate(self._sources.table.snapshot.engines):
            watched = self._sources.watched.get(engine.id)
            if watched is not None:  # else it has left since
                states.append(engine_state(engine, watched, num_faults[engine.id]))
            if number % _STEP == _STEP - 1:
                await asyncio.sleep(0)
        return tuple(states)

    def _part(self) -> Part:
        sources = self._sources
        waiting, refused = sources.gate.waiting_by_tenant(), sources.gate.refused_by_tenant()
        running = Counter(sources.running())
        lines = (
            AdmissionState(tenant=one, running=running[one], waiting=waiting[one], refused=refused[one])
            for one in sorted({*running, *waiting, *refused})
        )
        return Part(
            admission=tuple(lines),
            pairs=tuple(self._pairs()),
            faults=sources.faults.states(),
            requests=tuple(sources.recent.states()),
        )

    def _pairs(self) -> Iterable[PairState]:
        flows, (since, before) = self._sources.flows(), self._marks[0]
        rates = flow_rates(flows, before, self._clock() - since)
        for (source, target), (count, _) in sorted(flows.items()):
            transfers_s, bytes_s = rates[source, target]
            yield PairState(
                source=source,
                target=target,
                transfers=count,
                transfers_s=round(transfers_s, 3),
                bytes_s=round(bytes_s),
            )

"""One request that a gateway carries, from its body to its answer's end: what the router decides and counts of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import takewhile

import msgspec
from pagefleet_protocol import headers
from pagefleet_protocol.handoff import CACHE_SALT, tenant_salt
from pagefleet_protocol.key_file import API_KEY

from pagefleet_router.engines.endpoints import EngineView, Snapshot
from pagefleet_router.errors import Failure, Refusal, no_engine, refusal_of
from pagefleet_router.exchange.answer_writer import EventHold, count_events
from pagefleet_router.exchange.engine_answer import Identity, failure_of_status, identify
from pagefleet_router.exchange.services import Services
from pagefleet_router.picker.ext_proc import DESTINATION, Fields, HeadEdits
from pagefleet_router.prefix.knowledge import BYTES_PER_TOKEN
from pagefleet_router.request_view import ANONYMOUS, RequestView
from pagefleet_router.scheduling.in_flight import InFlight
from pagefleet_router.scheduling.policy import Choice
from pagefleet_router.scheduling.selection import candidates
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.http_names import OWN_PREFIX
from pagefleet_router.wire.upstream import AnswerHead

MAX_FALLBACKS = 2
"""Engines that a gateway may try after the chosen one: as often as the router itself sends a request again."""
_KEYS = (b"authorization", API_KEY.encode())
_REQUEST_ID = headers.REQUEST_ID.encode()
_ENGINE_ID = headers.ENGINE_ID.encode()
_INCARNATION = headers.INCARNATION.encode()
_CORS_PREFIX = b"access-control-allow-"


def address_of(engine: EngineView) -> str:
    """Return IP:PORT."""
    return engine.endpoint.url.removeprefix("http://")


def among(snapshot: Snapshot, addresses: Collection[str]) -> Snapshot:
    """Return the snapshot with no other usable engines than those at the addresses, IP:PORT or IP for all its ports."""

    def is_named(engine: EngineView) -> bool:
        address = address_of(engine)
        return address in addresses or address.rpartition(":")[0].strip("[]") in addresses

    usable = {model: tuple(filter(is_named, engines)) for model, engines in snapshot.usable.items()}
    return replace(snapshot, usable=usable)


@dataclass(slots=True)
class AnswerSeen:
    """What went by of an answer. Times are the dispatcher's."""

    head: AnswerHead
    num_bytes: int = 0
    num_reads: int = 0
    num_events: int = 0
    """Of a stream: a read may hold many, or a part of one."""
    first_at: float = 0.0
    last_at: float = 0.0
    is_whole: bool = False
    _events: EventHold = field(default_factory=EventHold)

    def take(self, body: bytes, now: float) -> None:
        """Count a read of the body."""
        if not self.num_reads:
            self.first_at = now
        self.last_at = now
        self.num_reads += 1
        self.num_bytes += len(body)
        if self.head.is_event_stream:
            self.num_events += count_events(self._events.push(body))

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer: an event of a stream counts as one, and bytes make as many as in a prompt."""
        return self.num_events if self.head.is_event_stream else self.num_bytes // BYTES_PER_TOKEN

    @property
    def token_seconds(self) -> float | None:
        """Mean time between two reads of a stream; None where there are none."""
        if self.num_reads < 2 or not self.head.is_event_stream:
            return None
        return (self.last_at - self.first_at) / (self.num_reads - 1)


class PickedRequest:
    """Implements the gate's `Waiter`. `end` has to be called once, whatever happens.

    Args:
        request: with its body.
        view: of it.
        services: the router's.

    A choice is of one engine: where prompts are computed apart, that takes a second request, which no gateway makes.
    """

    def __init__(self, request: ClientRequest, view: RequestView, services: Services) -> None:
        self.request = request
        self.view = view
        self.choice: Choice | None = None
        """Who answers, as far as is known."""
        self.answer: AnswerSeen | None = None
        self.waited_s = 0.0
        """From its head until it was let in."""
        self.held_s = 0.0
        """At the gate alone."""
        self.tried: list[str] = []
        """Engines that the gateway asked in vain."""
        self._services = services
        self._dispatcher = services.dispatcher
        self._offered: tuple[EngineView, ...] = ()
        self._in_flight: InFlight | None = None
        self._failure: Failure | None = None
        """What the answer says against its engine."""
        self._is_counted = False
        """Whether that has been noted: whether an engine ends or was told to stop is in its answer's body."""
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_inside = False
        self._dispatcher.budget.request_began()

    @property
    def num_body_bytes(self) -> int:
        """Memory that it takes while it waits."""
        return len(self.request.body)

    def admitted(self) -> None:
        """See Waiter."""
        self.is_inside = True
        if not self._turn.done():
            self._turn.set_result(None)

    def turned_away(self, refusal: Refusal) -> None:
        """See Waiter."""
        if not self._turn.done():
            self._turn.set_exception(refusal)

    async def pick(self, subset: Sequence[str] | None) -> str:
        """Wait to be let in, and return where to go: IP:PORT of the chosen engine, and of others to try after it.

        Args:
            subset: the addresses among which to choose; None: among all.

        Raises:
            Refusal: it is not let in, or there is no engine.
        """
        if subset is not None and not self._engines(subset, ()):
            raise no_engine()  # nobody knows when one of these comes: it is not worth a wait
        came_at = self._dispatcher.clock()
        if self._services.admission.enter(self):
            self.is_inside = True
        else:
            await self._turn
        now = self._dispatcher.clock()
        self.waited_s, self.held_s = now - self.request.began_at, now - came_at
        self.view = await self._read_prompt()
        engines = self._engines(subset, ())
        if not engines:
            raise no_engine()
        choice = self._dispatcher.policy.choose(self.view, engines)
        others = self._engines(subset, (choice.engine.id,))
        fallbacks = nsmallest(MAX_FALLBACKS, others, key=lambda engine: engine.num_requests)
        self._offered = (choice.engine, *fallbacks)
        self._begin(choice)
        self._dispatcher.sent(self.view, choice)
        return ",".join(map(address_of, self._offered))

    def request_edits(self, destination: str) -> HeadEdits:
        """Return what an engine is to get of the request's head: what `forwarded_request` does, by a gateway's hands.

        Args:
            destination: as `pick` returned it.
        """
        request, tenant = self.request, self.request.tenant
        fields = [(DESTINATION.encode(), destination.encode()), (_REQUEST_ID, request.request_id)]
        if tenant is not None:
            fields.append((headers.PRIORITY.encode(), str(tenant.max_priority).encode()))
        if self.view.tenant != ANONYMOUS:
            fields.append((CACHE_SALT.encode(), tenant_salt(self.view.tenant).encode()))
        given = {name for name, _ in fields}
        remove = {
            name
            for name in request.fields
            if name.startswith(OWN_PREFIX) or b"_" in name or (tenant is not None and name in _KEYS)
        }
        return HeadEdits(fields, sorted(remove - given))

    def forget_request(self) -> None:
        """Let go of what the choice alone needed: answers may take long."""
        self.request.body = b""
        self.request.headers, self.request.fields = [], {}
        view = self.view
        if view.pieces or view.blocks:
            self.view = msgspec.structs.replace(view, pieces=(), blocks=())
            if self._in_flight is not None:
                self._in_flight.view = self.view

    def answered_by(self, address: str) -> None:
        """Note which engine answers, where the gateway says so: those before it were asked in vain."""
        choice, dispatcher = self.choice, self._dispatcher
        if choice is None or not address or address == address_of(choice.engine):
            return
        engine = next((one for one in dispatcher.table.snapshot.engines if address_of(one) == address), None)
        if engine is None:
            return  # it has left since
        if engine.id in {one.id for one in self._offered}:
            for one in takewhile(lambda one: one.id != engine.id, self._offered):
                self.tried.append(one.id)
                dispatcher.failed(one, Failure.UNREACHABLE)
                dispatcher.metrics.retries[Failure.UNREACHABLE.value] += 1
        self._begin(Choice(engine))

    def take_head(self, status: int, fields: Fields) -> HeadEdits:
        """Take the head of the answer; returns what becomes of it."""
        head = AnswerHead(status, list(fields))
        self.answer = AnswerSeen(head)
        choice, dispatcher, request = self.choice, self._dispatcher, self.request
        ours: list[tuple[bytes, bytes]] = [(_REQUEST_ID, request.request_id), *request.cors]
        if choice is not None and self._in_flight is not None:
            ours.append((_ENGINE_ID, choice.engine.id.encode()))
            dispatcher.metrics.first_byte.observe(dispatcher.clock() - self._in_flight.sent_at)
            self._failure = self._said_against(head, choice.engine)
            if self._failure is Failure.ENDING:
                dispatcher.ending(choice.engine)
            else:
                self._count_failure()
        given = {name for name, _ in ours}
        remove = {name for name in head.fields if name.startswith((OWN_PREFIX, _CORS_PREFIX))}
        return HeadEdits(ours, sorted(remove - given))

    def unreadable(self) -> Refusal:
        """Note an answer whose head is over the limit; returns what the client is told."""
        if self.choice is not None:
            self._dispatcher.failed(self.choice.engine, Failure.GARBAGE)
        return refusal_of(Failure.GARBAGE)

    def take_body(self, body: bytes) -> None:
        """Take bytes of the answer's body."""
        answer, in_flight, dispatcher = self.answer, self._in_flight, self._dispatcher
        if answer is None or in_flight is None:
            return
        now, is_first = dispatcher.clock(), not answer.num_reads
        answer.take(body, now)
        if self._failure is not None:
            if self._failure is Failure.ENDING:
                self._failure = failure_of_status(answer.head, body)
            self._count_failure()
            return
        if not is_first or answer.head.status >= 400:
            return
        in_flight.answering(now)
        model = self.view.model
        if answer.head.is_event_stream and model is not None:
            dispatcher.metrics.first_token[model].observe(now - self.request.began_at)
            engine, trials = in_flight.choice.engine, dispatcher.table.trials
            dispatcher.metrics.revisions.first_token(engine, trials, now - in_flight.sent_at)

    def whole(self) -> None:
        """Note that nothing of the answer is missing."""
        answer = self.answer
        if answer is not None and not answer.is_whole:
            answer.is_whole = True
            if self.choice is not None and answer.head.status < 500 and self._failure is None:
                self._dispatcher.succeeded(self.choice.engine, answer.head.status)

    def end(self) -> None:
        """Let go of everything."""
        dispatcher, answer, model = self._dispatcher, self.answer, self.view.model
        self._turn.cancel()
        self._count_failure()
        if self._in_flight is not None:
            self._in_flight.end(dispatcher.clock())
        dispatcher.budget.request_ended(0)
        gap = None if answer is None else answer.token_seconds
        if gap is not None and model is not None and self.choice is not None:
            dispatcher.metrics.token_seconds[model].observe(gap)
            dispatcher.metrics.revisions.between_tokens(self.choice.engine, dispatcher.table.trials, gap)
        if self.is_inside:
            self.is_inside = False
            num_answered = 0 if answer is None else answer.num_tokens
            self._services.admission.ended(self, self.view.num_tokens + num_answered)
        else:
            self._services.admission.left(self)

    def _engines(self, subset: Sequence[str] | None, tried: Collection[str]) -> Sequence[EngineView]:
        snapshot = self._dispatcher.table.snapshot
        return candidates(snapshot if subset is None else among(snapshot, frozenset(subset)), self.view, tried)

    async def _read_prompt(self) -> RequestView:
        read: asyncio.Future[RequestView] = asyncio.get_running_loop().create_future()
        request = self.request
        assert request.route is not None

        def take(view: RequestView) -> None:
            if not read.done():  # the gateway may have left meanwhile
                read.set_result(view)

        view = self._services.prompts.read(request.route.name, request.body, self.view, take)
        if view is None:
            view = await read
        return msgspec.structs.replace(view, token_ids=b"") if view.token_ids else view

    def _begin(self, choice: Choice) -> None:
        """Count the request at an engine, and at no other."""
        if self._in_flight is not None:
            self._in_flight.end(self._dispatcher.clock())
        self.choice = choice
        self._in_flight = self._dispatcher.begin(self.view, choice)

    def _count_failure(self) -> None:
        if self._failure is not None and self.choice is not None and not self._is_counted:
            self._is_counted = True
            self._dispatcher.failed(self.choice.engine, self._failure)

    def _said_against(self, head: AnswerHead, engine: EngineView) -> Failure | None:
        """Return what an answer's head says against its engine; None: nothing."""
        dispatcher = self._dispatcher
        who = identify(head, engine, dispatcher.table.snapshot)
        if who is Identity.STRANGER:
            return Failure.STRANGER
        if who is Identity.RESTARTED:
            dispatcher.restarted(engine)
        if head.status < 500:
            return None
        if engine.facts is not None and _INCARNATION not in head.fields:  # the gateway's own words
            return None if head.status == 504 else Failure.UNREACHABLE  # its patience, not the engine's doing
        return failure_of_status(head)

"""One proxied request from its first attempt to its end: a small state machine driven by both connections.

Until a byte went to the client everything can be tried again elsewhere; after that the client gets the rest, or is told
that there will be none.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from pagefleet_router.admission.admission import Admission
from pagefleet_router.endpoints import EngineView
from pagefleet_router.errors import Failure, Refusal, no_engine, refusal_of
from pagefleet_router.proxy.answer_writer import AnswerWriter
from pagefleet_router.proxy.client_request import ClientRequest
from pagefleet_router.proxy.dispatcher import Dispatcher
from pagefleet_router.proxy.forwarding import forwarded_request
from pagefleet_router.proxy.pool import UpstreamPools
from pagefleet_router.proxy.upstream import AnswerHead, UpstreamConnection
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.attempt import Attempt
from pagefleet_router.scheduling.policy import Choice
from pagefleet_router.tokens.prompt_reader import PromptReader

MAX_RETRIES = 2
_TRY_ELSEWHERE = frozenset({502, 503, 504})
_ENGINE_ENDED = frozenset({Failure.RESET, Failure.ENDING})
_STALE_S = 0.5
CLIENT_LEFT = 499


class ClientSide(Protocol):
    """Where an answer goes."""

    def write(self, data: bytes) -> None:
        """Send bytes."""

    def finish(self, keep_alive: bool) -> None:
        """The answer is complete."""

    def refuse(self, refusal: Refusal) -> None:
        """Send a whole error answer."""

    def abort(self) -> None:
        """Close at once: the client must see that the answer is not whole."""


@dataclass(frozen=True, slots=True)
class Services:
    """What every exchange uses."""

    dispatcher: Dispatcher
    pools: UpstreamPools
    admission: Admission
    prompts: PromptReader
    first_byte_timeout: float
    gap_timeout: float


class Exchange:
    """Relays one request. Ends with one call of the client's `finish`, `refuse` or `abort`, unless the client left."""

    def __init__(self, request: ClientRequest, view: RequestView, client: ClientSide, services: Services) -> None:
        self.request = request
        self.status = 0
        self.num_retries = 0
        self.engine: EngineView | None = None
        self.first_byte_s: float | None = None
        self.view = view
        self._client = client
        self._services = services
        self._dispatcher = services.dispatcher
        self._clock = services.dispatcher.clock
        self._writer: AnswerWriter | None = None
        self._upstream: UpstreamConnection | None = None
        self._dial: asyncio.Task[None] | None = None
        self._tried: list[str] = []
        self._num_budgeted = 0
        self._attempted: Attempt | None = None
        self._is_admitted = False
        self._sent_at = self._last_read_at = 0.0
        self._begun = False
        """Whether the client has been sent anything."""
        self._redialled = self._paused = self._ended = False

    @property
    def num_bytes_out(self) -> int:
        """Bytes of body that the client was sent."""
        return 0 if self._writer is None else self._writer.num_bytes

    def start(self) -> None:
        """Ask to be let in."""
        self._dispatcher.budget.request_began()
        try:
            if self._services.admission.enter(self):
                self.admitted()
        except Refusal as refusal:
            self.turned_away(refusal)

    def admitted(self) -> None:
        """Have the prompt read."""
        self._is_admitted = True
        assert self.request.route is not None
        view = self._services.prompts.read(self.request.route.name, self.request.body, self.view, self._send_to_engine)
        if view is not None:
            self._send_to_engine(view)

    def turned_away(self, refusal: Refusal) -> None:
        """Tell the client."""
        self._refuse(refusal)

    def _send_to_engine(self, view: RequestView) -> None:
        if self._ended:
            return  # the client left while its prompt was read
        self.view = view
        choice = self._dispatcher.choose(view, ())
        if choice is None:
            self._refuse(no_engine())
        else:
            self._attempt(choice)

    def client_lost(self) -> None:
        """Stop working for a client that is gone."""
        self.status = CLIENT_LEFT
        self._end()

    def client_paused(self) -> None:
        """Take nothing more from the engine until the client has read."""
        self._paused = True
        if self._upstream is not None:
            self._upstream.pause()

    def client_resumed(self) -> None:
        """Go on."""
        self._paused = False
        self._last_read_at = self._clock()
        if self._upstream is not None:
            self._upstream.resume()

    def check(self, now: float) -> None:
        """Give up on an engine that is silent for too long."""
        if self._upstream is None or self._paused:
            return
        limit = self._services.gap_timeout if self._begun else self._services.first_byte_timeout
        since = self._last_read_at if self._begun else self._sent_at
        if limit and now - since > limit:
            self._upstream.abandon()
            self.on_lost(Failure.SILENT)

    def cut(self, refusal: Refusal) -> None:
        """End now, with `refusal` told in whichever way is still open."""
        if self._ended:
            return
        if self._writer is None or not self._begun:
            self._refuse(refusal)
            return
        event = self._writer.error_event(refusal)
        self._end()
        if event is None:
            self._client.abort()
            return
        self._dispatcher.metrics.streams_cut += 1
        self._client.write(event)
        self._client.finish(self._writer.keep_alive)

    def on_answer(self, head: AnswerHead | None, body: bytes, complete: bool) -> None:
        """Pass on what the engine sent, or try another engine when this one says that it cannot."""
        self._last_read_at = self._clock()
        if head is not None:
            self.first_byte_s = self._last_read_at - self._sent_at
            self._dispatcher.metrics.first_byte.observe(self.first_byte_s)
            if self._attempted is not None:
                self._attempted.answering(self._last_read_at)
            if head.status >= 500 and self._failed_status(head, complete):
                return
            self.status = head.status
            assert self.engine is not None
            self._writer = AnswerWriter(self.request, head, self.engine.id)
        assert self._writer is not None
        data = self._writer.encode(body, complete)
        if not complete:
            if data:
                self._begun = True
                self._client.write(data)
            return
        self._upstream = None
        if self.status < 500:
            assert self.engine is not None
            self._dispatcher.succeeded(self.engine)
        self._end()
        self._client.write(data)
        self._client.finish(self._writer.keep_alive)

    def on_lost(self, failure: Failure) -> None:
        """Try elsewhere, or tell the client."""
        upstream, self._upstream = self._upstream, None
        if self._writer is None and failure is Failure.RESET and upstream is not None and self._is_stale(upstream):
            self._redialled = True
            self._connect()
            return
        assert self.engine is not None
        self._dispatcher.failed(self.engine, failure)
        if not self._begun and self._retry(failure, was_sent=upstream is not None):
            return
        self.cut(refusal_of(failure))

    def _attempt(self, choice: Choice) -> None:
        self.engine = choice.engine
        self._tried.append(choice.engine.id)
        self._attempted = self._dispatcher.begin(self.view, choice)
        self._redialled = False
        self._writer = None
        upstream = self._services.pools.pool(choice.engine.endpoint.url).take()
        if upstream is None:
            self._connect()
        else:
            self._send(upstream)

    def _connect(self) -> None:
        assert self.engine is not None
        self._dial = self._services.pools.pool(self.engine.endpoint.url).dial(self._on_connected)

    def _on_connected(self, result: UpstreamConnection | Failure) -> None:
        self._dial = None
        if isinstance(result, Failure):
            self.on_lost(result)
        elif not result.usable:
            self.on_lost(Failure.RESET)
        else:
            self._send(result)

    def _send(self, upstream: UpstreamConnection) -> None:
        assert self.engine is not None
        self._upstream = upstream
        self._sent_at = self._clock()
        upstream.send(forwarded_request(self.request, self.engine.endpoint.url), self)

    def _is_stale(self, upstream: UpstreamConnection) -> bool:
        """Whether the engine had just closed a kept connection: no failure, but a reason for a new one."""
        return upstream.num_sent > 1 and not self._redialled and self._clock() - self._sent_at < _STALE_S

    def _failed_status(self, head: AnswerHead, complete: bool) -> bool:
        """Note an answer of 500 or more; returns whether another engine has the request now."""
        assert self.engine is not None
        upstream = self._upstream
        failure = Failure.ENDING if head.status == 503 and head.closes else Failure.STATUS
        self._dispatcher.failed(self.engine, failure)
        if head.status not in _TRY_ELSEWHERE or not self._retry(failure, was_sent=True):
            return False
        if not complete and upstream is not None:
            upstream.abandon()
        return True

    def _retry(self, failure: Failure, was_sent: bool) -> bool:
        # A request may be what killed its engine, so that its end is followed by one more try, not two.
        limit = 1 if failure in _ENGINE_ENDED and was_sent else MAX_RETRIES
        if self.num_retries >= limit:
            return False
        choice, counted = self._dispatcher.choose_again(self.view, self._tried, failure)
        if choice is None:
            return False
        self._end_attempt()
        self.num_retries += 1
        self._num_budgeted += counted
        self._attempt(choice)
        return True

    def _refuse(self, refusal: Refusal) -> None:
        self.status = refusal.status
        self._end()
        self._client.refuse(refusal)

    def _end(self) -> None:
        """Let go of everything, once."""
        if self._ended:
            return
        self._ended = True
        self._end_attempt()
        self._dispatcher.budget.request_ended(self._num_budgeted)
        if self._is_admitted:
            self._services.admission.ended(self, self.view.num_tokens)
        else:
            self._services.admission.left(self)
        if self._dial is not None:
            self._dial.cancel()
            self._dial = None
        if self._upstream is not None:
            self._upstream.abandon()
            self._upstream = None

    def _end_attempt(self) -> None:
        if self._attempted is not None:
            self._attempted.over(self._clock())
            self._attempted = None

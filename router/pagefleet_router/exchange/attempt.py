"""One engine, or two, being asked for the answer of one request: from the choice until nothing more comes of it."""

from __future__ import annotations

from typing import Protocol

from pagefleet_protocol import trace_names
from pagefleet_protocol.tracing import Span

from pagefleet_router.errors import Failure
from pagefleet_router.exchange.engine_answer import Identity, failure_of_status, identify
from pagefleet_router.exchange.forwarding import forwarded_request
from pagefleet_router.exchange.pair_attempt import PairAttempt, tell_leg
from pagefleet_router.exchange.services import Services
from pagefleet_router.exchange.stream_tape import StreamTape
from pagefleet_router.exchange.tracing import attempt_failed, attempt_span
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.policy import Choice
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.engine_call import EngineCall
from pagefleet_router.wire.upstream import AnswerHead

_TRY_ELSEWHERE = frozenset({502, 503, 504})
_STUCK_S = 5.0
"""Without a byte of an engine of which is known that it makes no progress. Where nobody else can have the request it
stays: a step may be that long."""


class AttemptOwner(Protocol):
    """Whose request it is, and who gets what the engine answers."""

    request: ClientRequest
    view: RequestView
    tape: StreamTape | None
    span: Span

    def take_head(self, head: AnswerHead) -> bool:
        """Take the head of an answer; returns whether the body is wanted."""

    def take(self, body: bytes, complete: bool, now: float) -> None:
        """Take bytes of its body."""

    def lost(self, failure: Failure, was_sent: bool) -> None:
        """Learn that nothing more comes."""

    def asks_elsewhere(self, failure: Failure, was_sent: bool) -> bool:
        """Give the request to another engine if one may have it; returns whether one has."""

    def lost_kv(self, failure: Failure) -> None:
        """Learn that K/V did not come from the prefill engine."""


class Attempt:
    """Asks the engines of one choice.

    Args:
        owner: whose request it is.
        choice: who is asked.
        services: of the exchange.
        is_last_pair: whether no other prefill engine would be asked; looked at where the choice is of two engines.
        paused: whether the client cannot take anything now.
    """

    __slots__ = (
        "_begun", "_call", "_in_flight", "_is_over", "_last_read_at", "_looked_at", "_owner", "_services", "choice",
        "engine", "first_byte_s", "is_answering", "pair", "span",
    )  # fmt: skip

    def __init__(
        self, owner: AttemptOwner, choice: Choice, services: Services, is_last_pair: bool, paused: bool
    ) -> None:  # fmt: skip
        self.choice = choice
        self.engine = choice.engine
        self.first_byte_s: float | None = None
        self.is_answering = False
        """Whether the engine has begun to answer."""
        self.pair: PairAttempt | None = None
        """Where two engines were chosen."""
        self.span = attempt_span(owner.span, choice)
        self._owner = owner
        self._services = services
        self._begun = self._is_over = False
        """Whether a good answer has a head and no body yet, which is when a stream's prompt is computed."""
        self._last_read_at = self._looked_at = 0.0
        self._in_flight = services.dispatcher.begin(owner.view, choice)
        if choice.prefill is not None:
            self.pair = PairAttempt(choice, is_last_pair, services, self._prefill_failed)
            tell_leg(self.span, "decode", self.pair.transfer)
        self._call = EngineCall(self, services.pools.pool(self.engine.endpoint.url), paused)

    @property
    def sent_at(self) -> float:
        """When the engine was chosen, on the dispatcher's clock."""
        return self._in_flight.sent_at

    def start(self) -> None:
        """Send to both engines."""
        owner = self._owner
        self._call.start()
        if self.pair is not None:
            self.pair.start(owner.request, owner.view, owner.span)
        self._services.dispatcher.sent(owner.view, self.choice)

    def encode_request(self) -> list[bytes]:
        """Return the request's pieces as the engine gets them, with the stream's state where it knows that."""
        owner = self._owner
        tape = owner.tape if self.engine.facts is not None else None
        transfer = "" if self.pair is None else self.pair.transfer.decode
        return forwarded_request(owner.request, owner.view, self.engine, tape, self.span.context, transfer)

    def on_answer(self, head: AnswerHead | None, body: bytes, complete: bool) -> None:
        """Pass on what the engine sent, or give up when it says that it cannot."""
        now = self._last_read_at = self._services.dispatcher.clock()
        if complete:
            self._call.completed()  # what follows may pause the engine's connection, which is the pool's again
        if self.pair is not None and not self.is_answering:
            taken = self.pair.take(head, body, complete)
            if taken is None:
                return
            if self.pair.refused is not None:
                self._owner.lost_kv(self.pair.refused)
                return
            head, body = taken
        if head is None or self._take_head(head, body, now):
            self._owner.take(body, complete, now)

    def on_lost(self, failure: Failure) -> None:
        """Say so, unless a kept connection was stale."""
        was_sent = self._call.upstream is not None
        if not self._call.sends_again(failure, self.is_answering):
            self._owner.lost(failure, was_sent)

    def fail(self, failure: Failure) -> None:
        """Drop the engine for what it sent, or did not."""
        self._call.abandon()
        self._owner.lost(failure, was_sent=True)

    def learn(self, now: float) -> None:
        """Learn from the first bytes of an answer: no client has to wait for that."""
        if self._begun:
            self._begun = False
            self._in_flight.answering(now)
            if self.pair is not None:
                self.pair.answered(self._owner.view, now)

    def pause(self) -> None:
        """Take nothing more from the engine until `resume`."""
        self._call.pause()

    def resume(self, now: float) -> None:
        """Go on."""
        self._last_read_at = now
        self._call.resume()

    def check(self, now: float, paused: bool) -> None:
        """Give up on an engine that is silent for too long, or of which is known that it is stuck."""
        if self.pair is not None:
            self.pair.check(now)
        call, services = self._call, self._services
        if paused or call.upstream is None:
            return
        limit = services.gap_timeout if self.is_answering else services.first_byte_timeout
        silent_s = now - (self._last_read_at if self.is_answering else call.sent_at)
        if limit and silent_s > limit:
            leg = None if self.pair is None or self.is_answering else self.pair.leg
            if leg is not None and leg.is_running:
                leg.failed(Failure.SILENT, is_blamed=True)  # it is this one that the other waits for
            else:
                self.fail(Failure.SILENT)
        elif silent_s > _STUCK_S and services.dispatcher.is_stuck(self.engine) and now - self._looked_at > 1.0:
            self._looked_at = now
            if self._owner.asks_elsewhere(Failure.STUCK, was_sent=True):  # else it may yet go on
                services.dispatcher.failed(self.engine, Failure.STUCK)

    def forget(self, view: RequestView) -> None:
        """Let go of what only another engine would need; `view` is what is left."""
        self._in_flight.view = view

    def failed(self, failure: Failure) -> None:
        """End the span as that of an engine that gave no good answer."""
        attempt_failed(self.span, failure)

    def close(self) -> None:
        """Let go of the engines and of what counts there; may be called again."""
        if self._is_over:
            return
        self._is_over = True
        self.span.end()
        self._in_flight.end(self._services.dispatcher.clock())
        self._call.abandon()
        if self.pair is not None:
            self.pair.close()

    def _prefill_failed(self, failure: Failure) -> None:
        """Do without a prefill engine, unless the decode engine has its K/V or does not need it."""
        if not self.is_answering and not self._is_over:
            self._owner.lost_kv(failure)

    def _take_head(self, head: AnswerHead, body: bytes, now: float) -> bool:
        """Look at who answers and how; returns whether the body is for the client."""
        engine, dispatcher = self.engine, self._services.dispatcher
        self.first_byte_s = now - self._call.sent_at
        dispatcher.metrics.first_byte.observe(self.first_byte_s)
        self.span.set(trace_names.STATUS, head.status)
        who = identify(head, engine, dispatcher.table.snapshot)
        if who is Identity.STRANGER:
            self._services.pools.pool(engine.endpoint.url).drop_idle()
            self.fail(Failure.STRANGER)
            return False
        if who is Identity.RESTARTED:
            dispatcher.restarted(engine)
        if head.status >= 500 and self._failed_status(head, body):
            return False
        self.is_answering = True
        self._begun = head.status < 400
        return self._owner.take_head(head)

    def _failed_status(self, head: AnswerHead, body: bytes) -> bool:
        """Note an answer of 500 or more; returns whether another engine has the request now."""
        dispatcher = self._services.dispatcher
        failure = failure_of_status(head, body)
        dispatcher.failed(self.engine, failure)
        self.span.failed(failure.value)
        if failure in (Failure.ENDING, Failure.STOPPING):
            dispatcher.ending(self.engine)
        is_tried_out = self.engine.endpoint.on_trial is not None  # whose mistakes cost no client a request
        may_go = head.status in _TRY_ELSEWHERE or failure is Failure.OWN or is_tried_out
        return may_go and self._owner.asks_elsewhere(failure, was_sent=True)

"""One proxied request from its arrival to its end: a small state machine driven by both connections.

Until a byte of an engine went to the client everything can be tried again elsewhere. After that a stream whose tokens
are known goes on at another engine; any other client gets the rest, or is told that there will be none.
"""

from __future__ import annotations

import msgspec
from pagefleet_protocol import trace_names
from pagefleet_protocol.tracing import NO_SPAN, Span

from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.errors import Failure, Refusal, no_engine, refusal_of
from pagefleet_router.exchange.delivery import ClientSide, Delivery
from pagefleet_router.exchange.dispatcher import explanation, wants_explanation
from pagefleet_router.exchange.engine_answer import Identity, identify
from pagefleet_router.exchange.forwarding import forwarded_request
from pagefleet_router.exchange.pair_attempt import PairAttempt, tell_leg
from pagefleet_router.exchange.retries import Retries
from pagefleet_router.exchange.services import Services
from pagefleet_router.exchange.stream_tape import StreamTape
from pagefleet_router.exchange.tracing import attempt_failed, attempt_span
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.in_flight import InFlight
from pagefleet_router.scheduling.policy import Choice
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.engine_call import EngineCall
from pagefleet_router.wire.upstream import AnswerHead

_TRY_ELSEWHERE = frozenset({502, 503, 504})
CLIENT_LEFT = 499


class Exchange:
    """Relays one request. Ends with one call of the client's `finish`, `refuse` or `abort`, unless the client left."""

    __slots__ = (
        "_answering", "_attempted", "_begun", "_call", "_clock", "_dispatcher", "_ended", "_has_come_back",
        "_is_admitted", "_keeps_request", "_last_read_at", "_paused", "_retries", "_services", "_tape",
        "_try_span", "choice", "delivery", "engine", "first_byte_s", "pair", "request", "span", "view", "waited_s",
    )  # fmt: skip

    def __init__(self, request: ClientRequest, view: RequestView, client: ClientSide, services: Services) -> None:
        self.request = request
        self.view = view
        self.delivery = Delivery(request, client, services.hold)
        self.engine: EngineView | None = None
        self.choice: Choice | None = None
        """The last one."""
        self.pair: PairAttempt | None = None
        """Of the last choice, where it is of two engines."""
        self.first_byte_s: float | None = None
        self.waited_s = 0.0
        """Until it was admitted."""
        self.span = services.traces.request(request, services.dispatcher.clock() - request.began_at)
        """Who is told that the request is over ends it."""
        self._try_span: Span = NO_SPAN
        """Of the engine that is being asked."""
        self._services = services
        self._dispatcher = services.dispatcher
        self._clock = services.dispatcher.clock
        self._retries: Retries | None = None
        self._call: EngineCall | None = None
        self._tape: StreamTape | None = None
        self._attempted: InFlight | None = None
        self._begun: InFlight | None = None
        """The same while its answer has a head and no body yet, which is when a stream's prompt is computed."""
        self._last_read_at = 0.0
        self._is_admitted = self._paused = self._ended = self._has_come_back = False
        self._answering = False
        """Whether the current engine has begun to answer."""
        self._keeps_request = True

    @property
    def num_body_bytes(self) -> int:
        """Memory that the request takes while it waits."""
        return len(self.request.body)

    @property
    def num_retries(self) -> int:
        """How often the request was sent to another engine."""
        return 0 if self._retries is None else self._retries.num

    def start(self) -> None:
        """Ask to be let in."""
        self._dispatcher.budget.request_began()
        try:
            is_in = self._services.admission.enter(self)
        except Refusal as refusal:
            self.cut(refusal)
            return
        if is_in:
            self.admitted()
        elif self.view.stream:
            self.delivery.wait(self._clock())

    def admitted(self) -> None:
        """Have the prompt read."""
        self._is_admitted = True
        now = self._clock()
        self.waited_s = now - self.request.began_at
        if self.view.stream:
            self.delivery.ask(now)
        assert self.request.route is not None
        view = self._services.prompts.read(self.request.route.name, self.request.body, self.view, self._send_to_engine)
        if view is not None:
            self._send_to_engine(view)

    def turned_away(self, refusal: Refusal) -> None:
        """Tell the client."""
        self.cut(refusal)

    def client_lost(self) -> None:
        """Stop working for a client that is gone."""
        self.delivery.status = CLIENT_LEFT
        self._end()

    def client_paused(self) -> None:
        """Take nothing more from the engine until the client has read."""
        self._paused = True
        if self._call is not None:
            self._call.pause()

    def client_resumed(self) -> None:
        """Go on."""
        self._paused = False
        self._last_read_at = self._clock()
        if self._call is not None:
            self._call.resume()

    def check(self, now: float) -> None:
        """Say that the client's stream still waits; give up on an engine that is silent for too long."""
        if self.pair is not None:
            self.pair.check(now)
        if self._paused:
            return
        self.delivery.check(now)
        call = self._call
        if call is None or call.upstream is None:
            return
        limit = self._services.gap_timeout if self._answering else self._services.first_byte_timeout
        since = self._last_read_at if self._answering else call.sent_at
        if not limit or now - since <= limit:
            return
        leg = None if self.pair is None or self._answering else self.pair.leg
        if leg is not None and leg.is_running:
            leg.failed(Failure.SILENT, is_blamed=True)  # it is this one that the other waits for
        else:
            self._fail(Failure.SILENT)

    def cut(self, refusal: Refusal) -> None:
        """End now, with `refusal` told in whichever way is still open."""
        if not self._ended:
            self._end()
            self.span.failed(refusal.code or str(refusal.status))
            self._dispatcher.metrics.streams_cut += self.delivery.break_off(refusal)

    def on_answer(self, head: AnswerHead | None, body: bytes, complete: bool) -> None:
        """Pass on what the engine sent, or try another engine when this one says that it cannot."""
        call, delivery = self._call, self.delivery
        assert call is not None
        now = self._last_read_at = self._clock()
        if complete:
            call.completed()  # what follows may pause the engine's connection, which is the pool's again
        if self.pair is not None and not self._answering:
            taken = self._from_decode_leg(self.pair, head, body, complete)
            if taken is None:
                return
            head, body = taken
        if head is not None and not self._take_head(head, now):
            return
        was_relayed = delivery.relayed
        is_over = delivery.take(body, complete, now)
        if self._begun is not None and (body or complete):
            self._learn(self._begun, now)
        if not was_relayed and delivery.relayed:
            self._relayed_first(now)
        tape = self._tape
        if tape is not None and tape.failure is not None:
            self._fail(tape.failure)
        elif is_over:
            self._finish()
        elif self._keeps_request and delivery.relayed and (tape is None or not tape.can_go_on):
            self._forget_request()

    def encode_request(self) -> list[bytes]:
        """Return the request's pieces as the current engine gets them, with the stream's state where it knows that."""
        assert self.engine is not None
        tape = self._tape if self.engine.facts is not None else None
        transfer = "" if self.pair is None else self.pair.transfer.decode
        return forwarded_request(self.request, self.view, self.engine, tape, self._try_span.context, transfer)

    def on_lost(self, failure: Failure) -> None:
        """Try elsewhere, or tell the client."""
        call = self._call
        assert call is not None
        was_sent = call.upstream is not None
        if not call.sends_again(failure, self._answering):
            self._lost(failure, was_sent)

    def _send_to_engine(self, view: RequestView) -> None:
        if self._ended:
            return  # the client left while its prompt was read
        self.view = view
        if self._services.explain and wants_explanation(self.request):
            self.delivery.explanation = explanation(self._dispatcher.explain(view, ()))
        choice = self._dispatcher.choose(view, ())
        if choice is not None:
            self._attempt(choice)
        elif not self._waits_again():
            self.cut(no_engine())

    def _attempt(self, choice: Choice) -> None:
        self.choice = choice
        engine = self.engine = choice.engine
        if self._attempted is not None:
            self._attempted.over(self._clock())
        self._attempted = self._dispatcher.begin(self.view, choice)
        self._try_span.end()
        self._try_span = attempt_span(self.span, choice)
        self._next_pair(choice)
        self._answering = False
        self._begun = None
        if self.view.stream and self._tape is None and engine.facts is not None:
            self._tape = StreamTape(int(self._services.wall_clock()))
        if self._tape is not None:
            self._tape.next_engine()
        self.delivery.next_engine(self._tape)
        self._call = EngineCall(self, self._services.pools.pool(engine.endpoint.url), self._paused)
        self._call.start()
        if self.pair is not None:
            self.pair.start(self.request, self.view, self.span)
        self._dispatcher.sent(self.view, choice)

    def _next_pair(self, choice: Choice) -> None:
        """End the last prefill leg, and make the next transfer where two engines were chosen."""
        if self.pair is not None:
            self.pair.close()
            self.pair = None
        if choice.prefill is not None:
            is_last = self._attempts().is_last_pair(self._dispatcher, self.view, choice.prefill.engine.id)
            self.pair = PairAttempt(choice, is_last, self._services, self._prefill_failed)
            tell_leg(self._try_span, "decode", self.pair.transfer)

    def _prefill_failed(self, failure: Failure) -> None:
        """Do without a prefill engine, unless the decode engine has its K/V or does not need it."""
        if not self._answering and not self._ended:
            self._without_kv(failure)

    def _from_decode_leg(
        self, pair: PairAttempt, head: AnswerHead | None, body: bytes, complete: bool
    ) -> tuple[AnswerHead | None, bytes] | None:
        """Return what the client may get; None: nothing yet, or the decode engine did not get its K/V."""
        taken = pair.take(head, body, complete)
        if taken is not None and pair.refused is not None:
            self._without_kv(pair.refused)
            return None
        return taken

    def _without_kv(self, failure: Failure) -> None:
        """Have the prompt computed by another engine than the one from which no K/V came."""
        assert self.pair is not None
        assert self._call is not None
        self._call.abandon()
        attempt_failed(self._try_span, failure)
        choice = self.pair.another(self._attempts(), self.view, failure)
        if choice is not None:
            self._attempt(choice)
        elif not self._waits_again():
            self.cut(refusal_of(Failure.KV_LOST))

    def _attempts(self) -> Retries:
        if self._retries is None:
            self._retries = Retries()
        return self._retries

    def _take_head(self, head: AnswerHead, now: float) -> bool:
        """Look at who answers and how; returns whether the body is for the client."""
        call, engine, delivery = self._call, self.engine, self.delivery
        assert call is not None
        assert engine is not None
        self.first_byte_s = now - call.sent_at
        self._dispatcher.metrics.first_byte.observe(self.first_byte_s)
        self._try_span.set(trace_names.STATUS, head.status)
        who = identify(head, engine, self._dispatcher.table.snapshot)
        if who is Identity.STRANGER:
            self._services.pools.pool(engine.endpoint.url).drop_idle()
            self._fail(Failure.STRANGER)
            return False
        if who is Identity.RESTARTED:
            self._dispatcher.restarted(engine)
        if head.status >= 500 and self._failed_status(head):
            return False
        self._answering = True
        if head.status < 400:
            self._begun = self._attempted
        is_continued = delivery.relayed
        if not delivery.take_head(head, engine.id, self._tape):
            self.cut(refusal_of(Failure.RESET))  # it cannot go on with the stream: what was lost stays lost
            return False
        self._dispatcher.metrics.continued[engine.endpoint.model] += is_continued
        return True

    def _failed_status(self, head: AnswerHead) -> bool:
        """Note an answer of 500 or more; returns whether another engine has the request now."""
        assert self.engine is not None
        assert self._call is not None
        failed = self._call
        failure = Failure.ENDING if head.status == 503 and head.closes else Failure.STATUS
        self._dispatcher.failed(self.engine, failure)
        self._try_span.failed(failure.value)
        if failure is Failure.ENDING:
            self._dispatcher.ending(self.engine)
        if head.status not in _TRY_ELSEWHERE or not self._elsewhere(failure, was_sent=True):
            return False
        failed.abandon()
        return True

    def _fail(self, failure: Failure) -> None:
        """Drop the engine for what it sent, or did not."""
        assert self._call is not None
        self._call.abandon()
        self._lost(failure, was_sent=True)

    def _lost(self, failure: Failure, was_sent: bool) -> None:
        if self._tape is not None and self._tape.done:
            self._end()
            self.delivery.finish_framing()  # the client has the last event
            return
        assert self.engine is not None
        self._dispatcher.failed(self.engine, failure)
        attempt_failed(self._try_span, failure)
        if not self._elsewhere(failure, was_sent):
            self.cut(refusal_of(failure))

    def _elsewhere(self, failure: Failure, was_sent: bool) -> bool:
        """Give the request to another engine, whole or from where its stream is; returns whether one has it."""
        assert self.engine is not None
        retries = self._attempts()
        retries.tried.append(self.engine.id)
        if self.delivery.relayed:
            choice = retries.takeover(self._dispatcher, self.view, failure, self.engine, self._tape)
        else:
            choice = retries.again(self._dispatcher, self.view, failure, was_sent)
        if choice is None:
            return not self.delivery.relayed and self._waits_again()
        self._attempt(choice)
        return True

    def _waits_again(self) -> bool:
        """Go back to the gate where the model's last engine has just gone, as to zero; returns whether it does.

        Once: what no engine bears must not go round for ever.
        """
        usable = self._dispatcher.table.snapshot.usable
        if not self._services.holds or self._has_come_back or self.view.model is None or usable.get(self.view.model):
            return False
        self._has_come_back = True
        self._try_span.end()
        if self._attempted is not None:
            self._attempted.over(self._clock())
            self._attempted = None
        self._call = None
        if self.pair is not None:
            self.pair.close()
            self.pair = None
        self.delivery.next_engine(self._tape)
        self._services.admission.ended(self, self.view.num_tokens)
        self._is_admitted = False
        try:
            is_in = self._services.admission.enter(self)
        except Refusal as refusal:
            self.cut(refusal)
            return True
        if is_in:
            self.admitted()
        elif self.view.stream:
            self.delivery.wait(self._clock())
        return True

    def _learn(self, begun: InFlight, now: float) -> None:
        """Learn from an answer's beginning: no client has to wait for that."""
        begun.answering(now)
        if self.pair is not None:
            self.pair.answered(self.view, now)
        self._begun = None

    def _relayed_first(self, now: float) -> None:
        if self.delivery.is_stream and self.view.model is not None:
            self._dispatcher.metrics.first_token[self.view.model].observe(now - self.request.began_at)

    def _forget_request(self) -> None:
        """Let go of what only another engine would need."""
        self._keeps_request = False
        self.request.body = b""
        self.request.headers, self.request.fields = [], {}
        view = self.view
        if view.pieces or view.blocks or view.token_ids:
            self.view = msgspec.structs.replace(view, pieces=(), blocks=(), token_ids=b"")
            if self._attempted is not None:
                self._attempted.view = self.view

    def _finish(self) -> None:
        if self.delivery.status < 500:
            assert self.engine is not None
            self._dispatcher.succeeded(self.engine)
        self._end()
        self._dispatcher.metrics.streams_cut += self.delivery.finish()

    def _end(self) -> None:
        """Let go of everything, once."""
        if self._ended:
            return
        self._ended = True
        self._try_span.end()
        if self._attempted is not None:
            self._attempted.over(self._clock())
            self._attempted = None
        if self._call is not None:
            self._call.abandon()
            self._call = None
        if self.pair is not None:
            self.pair.close()
        self._dispatcher.budget.request_ended(0 if self._retries is None else self._retries.num_budgeted)
        gap = self.delivery.token_seconds()
        if gap is not None and self.view.model is not None:
            self._dispatcher.metrics.token_seconds[self.view.model].observe(gap)
        if self._is_admitted:
            self._services.admission.ended(self, self.view.num_tokens + self.delivery.num_tokens)
        else:
            self._services.admission.left(self)

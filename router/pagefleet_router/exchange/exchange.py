"""One proxied request from its arrival to its end: a small state machine driven by both connections.

Until a byte of an engine went to the client everything can be tried again elsewhere. After that a stream whose tokens
are known goes on at another engine; any other client gets the rest, or is told that there will be none.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.errors import Failure, Refusal, no_engine, refusal_of
from pagefleet_router.exchange.attempt import Attempt
from pagefleet_router.exchange.delivery import ClientSide, Delivery
from pagefleet_router.exchange.dispatcher import explanation, wants_explanation
from pagefleet_router.exchange.retries import Retries
from pagefleet_router.exchange.services import Services
from pagefleet_router.exchange.stream_tape import StreamTape
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.policy import Choice
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.upstream import AnswerHead

CLIENT_LEFT = 499


class Exchange:
    """Relays one request. Ends with one call of the client's `finish`, `refuse` or `abort`, unless the client left."""

    __slots__ = (
        "_clock", "_dispatcher", "_ended", "_has_come_back", "_is_admitted", "_keeps_request", "_paused", "_retries",
        "_services", "_suspect", "attempt", "delivery", "error", "request", "span", "tape", "view", "waited_s",
    )  # fmt: skip

    def __init__(self, request: ClientRequest, view: RequestView, client: ClientSide, services: Services) -> None:
        self.request = request
        self.view = view
        self.delivery = Delivery(request, client, services.hold)
        self.attempt: Attempt | None = None
        """The last one."""
        self.tape: StreamTape | None = None
        """Of a stream whose engine may give notes."""
        self.waited_s = 0.0
        """Until it was admitted."""
        self.error: str | None = None
        """Code of the error that we ended it with."""
        self.span = services.traces.request(request, services.dispatcher.clock() - request.began_at)
        """Who is told that the request is over ends it."""
        self._services = services
        self._dispatcher = services.dispatcher
        self._clock = services.dispatcher.clock
        self._retries: Retries | None = None
        self._is_admitted = self._paused = self._ended = self._has_come_back = False
        self._keeps_request = True
        self._suspect: EngineView | None = None
        """An engine that says the request is to blame, which another engine then answers."""

    @property
    def num_body_bytes(self) -> int:
        """Memory that the request takes while it waits."""
        return len(self.request.body)

    @property
    def num_retries(self) -> int:
        """How often the request was sent to another engine."""
        return 0 if self._retries is None else self._retries.num

    @property
    def tried(self) -> Sequence[str]:
        """Ids of the engines that failed it."""
        return () if self._retries is None else self._retries.tried

    @property
    def is_inside(self) -> bool:
        """Whether it was let in, and is not over."""
        return self._is_admitted and not self._ended

    @property
    def choice(self) -> Choice | None:
        """The last one."""
        return None if self.attempt is None else self.attempt.choice

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
        if self.attempt is not None:
            self.attempt.pause()

    def client_resumed(self) -> None:
        """Go on."""
        self._paused = False
        if self.attempt is not None:
            self.attempt.resume(self._clock())

    def check(self, now: float) -> None:
        """Say that the client's stream still waits, and look at the engine."""
        if not self._paused:
            self.delivery.check(now)
        if self.attempt is not None:
            self.attempt.check(now, self._paused)

    def cut(self, refusal: Refusal) -> None:
        """End now, with `refusal` told in whichever way is still open."""
        if not self._ended:
            self._end()
            self.error = refusal.code or str(refusal.status)
            self.span.failed(self.error)
            self._dispatcher.metrics.streams_cut += self.delivery.cut(refusal)

    def take_head(self, head: AnswerHead) -> bool:
        """See AttemptOwner."""
        assert self.attempt is not None
        engine, is_continued = self.attempt.engine, self.delivery.relayed
        if not self.delivery.take_head(head, engine.id, self.tape):
            if head.status != 429 or not self.asks_elsewhere(Failure.DECLINED, was_sent=True):
                self.cut(refusal_of(Failure.RESET))  # it cannot go on with the stream: what was lost stays lost
            return False
        self._dispatcher.metrics.continued[engine.endpoint.model] += is_continued
        return True

    def take(self, body: bytes, complete: bool, now: float) -> None:
        """Pass on what the engine sent."""
        attempt, delivery, tape = self.attempt, self.delivery, self.tape
        assert attempt is not None
        was_relayed = delivery.relayed
        is_over = delivery.take(body, complete, now)
        if body or complete:
            attempt.learn(now)
        if not was_relayed and delivery.relayed:
            self._relayed_first(now)
        if tape is not None and tape.failure is not None:
            attempt.fail(tape.failure)
        elif is_over:
            self._finish(attempt)
        elif self._keeps_request and delivery.relayed and (tape is None or not tape.can_go_on):
            self._forget_request(attempt)

    def lost(self, failure: Failure, was_sent: bool) -> None:
        """Try elsewhere, or tell the client."""
        if self.tape is not None and self.tape.done:
            self._end()
            self.delivery.finish_framing()  # the client has the last event
            return
        assert self.attempt is not None
        self._dispatcher.failed(self.attempt.engine, failure)
        self.attempt.failed(failure)
        if not self.asks_elsewhere(failure, was_sent):
            self.cut(refusal_of(failure))

    def asks_elsewhere(self, failure: Failure, was_sent: bool) -> bool:
        """Give the request to another engine, whole or from where its stream is; returns whether one has it."""
        assert self.attempt is not None
        engine, retries = self.attempt.engine, self._attempts()
        if engine.id not in retries.tried:
            retries.tried.append(engine.id)
        if self.delivery.relayed:
            choice = retries.takeover(self._dispatcher, self.view, failure, engine, self.tape)
        else:
            choice = retries.again(self._dispatcher, self.view, failure, was_sent)
        if choice is None:  # an engine that hangs keeps the request until another one can have it
            return failure is not Failure.STUCK and not self.delivery.relayed and self._waits_again()
        if failure is Failure.OWN:
            self._suspect = engine
        self._ask(choice)
        return True

    def lost_kv(self, failure: Failure) -> None:
        """Have the prompt computed by another engine than the one from which no K/V came."""
        attempt = self.attempt
        assert attempt is not None
        assert attempt.pair is not None
        attempt.failed(failure)
        choice = attempt.pair.another(self._attempts(), self.view, failure)
        if choice is not None:
            self._ask(choice)
        elif not self._waits_again():
            self.cut(refusal_of(Failure.KV_LOST))

    def _send_to_engine(self, view: RequestView) -> None:
        if self._ended:
            return  # the client left while its prompt was read
        self.view = view
        if self._services.explain and wants_explanation(self.request):
            self.delivery.explanation = explanation(self._dispatcher.explain(view, ()))
        choice = self._dispatcher.choose(view, ())
        if choice is not None:
            self._ask(choice)
        elif not self._waits_again():
            self.cut(no_engine())

    def _ask(self, choice: Choice) -> None:
        is_last_pair = False
        if self.attempt is not None:
            self.attempt.close()
        if choice.prefill is not None:
            is_last_pair = self._attempts().is_last_pair(self._dispatcher, self.view, choice.prefill.engine.id)
        if self.view.stream and self.tape is None and choice.engine.facts is not None:
            self.tape = StreamTape(int(self._services.wall_clock()))
        if self.tape is not None:
            facts = choice.engine.facts
            self.tape.next_engine(None if facts is None else facts.response_store)
        self.delivery.next_engine(self.tape)
        self.attempt = Attempt(self, choice, self._services, is_last_pair, self._paused)
        self.attempt.start()

    def _attempts(self) -> Retries:
        if self._retries is None:
            self._retries = Retries()
        return self._retries

    def _waits_again(self) -> bool:
        """Go back to the gate where the model's last engine has just gone, as to zero; returns whether it does.

        Once: what no engine bears must not go round for ever.
        """
        usable = self._dispatcher.table.snapshot.usable
        if not self._services.holds or self._has_come_back or self.view.model is None or usable.get(self.view.model):
            return False
        self._has_come_back = True
        if self.attempt is not None:
            self.attempt.close()
        self.delivery.next_engine(self.tape)
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

    def _relayed_first(self, now: float) -> None:
        if self.delivery.is_stream and self.view.model is not None:
            metrics, trials = self._dispatcher.metrics, self._dispatcher.table.trials
            metrics.first_token[self.view.model].observe(now - self.request.began_at)
            if self.attempt is not None:
                metrics.revisions.first_token(self.attempt.engine, trials, now - self.attempt.sent_at)

    def _forget_request(self, attempt: Attempt) -> None:
        """Let go of what only another engine would need."""
        self._keeps_request = False
        self.request.body = b""
        self.request.headers, self.request.fields = [], {}
        view = self.view
        if view.pieces or view.blocks or view.token_ids:
            self.view = msgspec.structs.replace(view, pieces=(), blocks=(), token_ids=b"")
            attempt.forget(self.view)

    def _finish(self, attempt: Attempt) -> None:
        if self.delivery.status < 500:
            self._dispatcher.succeeded(attempt.engine, self.delivery.status)
            if self._suspect is not None:
                self._dispatcher.failed(self._suspect, Failure.STATUS)
        self._end()
        self._dispatcher.metrics.streams_cut += self.delivery.finish()

    def _end(self) -> None:
        """Let go of everything, once."""
        if self._ended:
            return
        self._ended = True
        if self.attempt is not None:
            self.attempt.close()
        self._dispatcher.budget.request_ended(0 if self._retries is None else self._retries.num_budgeted)
        gap = self.delivery.token_seconds()
        if gap is not None and self.view.model is not None:
            metrics, trials = self._dispatcher.metrics, self._dispatcher.table.trials
            metrics.token_seconds[self.view.model].observe(gap)
            if self.attempt is not None:
                metrics.revisions.between_tokens(self.attempt.engine, trials, gap)
        if self._is_admitted:
            self._services.admission.ended(self, self.view.num_tokens + self.delivery.num_tokens)
        else:
            self._services.admission.left(self)

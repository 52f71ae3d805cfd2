"""The part of a request that computes its prompt at one engine, for another one that answers it.

Nothing of its answer goes to a client. It runs beside the decode leg, and ends with the request at the latest.
"""

from __future__ import annotations

from collections.abc import Callable

from pagefleet_protocol import trace_names
from pagefleet_protocol.tracing import Span

from pagefleet_router.errors import Failure
from pagefleet_router.exchange.engine_answer import (
    INVALID_HANDOFF,
    KV_LOAD_FAILED,
    EngineError,
    Identity,
    failure_of_status,
    identify,
)
from pagefleet_router.exchange.services import Services
from pagefleet_router.exchange.tracing import attempt_failed
from pagefleet_router.scheduling.in_flight import InFlight
from pagefleet_router.wire.engine_call import EngineCall
from pagefleet_router.wire.upstream import AnswerHead

_FULL = frozenset({408, 429})
"""What an engine says that could compute the prompt at another time, as another one can now."""


class PrefillLeg:
    """Asks one engine to compute a prompt.

    Args:
        pieces: the request as the engine gets it.
        in_flight: counts at the engine.
        span: of the attempt.
        services: of the exchange.
        on_failed: called when it fails, at most once.
    """

    __slots__ = (
        "_call", "_error", "_has_head", "_in_flight", "_is_over", "_on_failed", "_pieces", "_services", "_span",
        "done_at", "engine",
    )  # fmt: skip

    def __init__(
        self, pieces: list[bytes], in_flight: InFlight, span: Span, services: Services,
        on_failed: Callable[[Failure], None],
    ) -> None:  # fmt: skip
        self.engine = in_flight.choice.engine
        self.done_at: float | None = None
        """When the prompt was computed."""
        self._pieces = pieces
        self._in_flight = in_flight
        self._span = span
        self._services = services
        self._on_failed = on_failed
        self._error: EngineError | None = None
        self._has_head = self._is_over = False
        self._call = EngineCall(self, services.pools.pool(self.engine.endpoint.url), False)

    @property
    def is_running(self) -> bool:
        """Whether its engine has yet to answer."""
        return not self._is_over

    def start(self) -> None:
        """Send as soon as there is a connection."""
        self._call.start()

    def encode_request(self) -> list[bytes]:
        """See CallListener."""
        return self._pieces

    def on_answer(self, head: AnswerHead | None, body: bytes, complete: bool) -> None:
        """Note that the prompt is computed, or why it will not be."""
        if complete:
            self._call.completed()
        if head is not None:
            self._has_head = True
            self._pieces = []
            if not self._take_head(head):
                return
        if self._error is not None:
            self._take_error(self._error, body, complete)
        elif complete:
            now = self.done_at = self._services.dispatcher.clock()
            self._in_flight.answering(now)
            self.close()

    def on_lost(self, failure: Failure) -> None:
        """Say so, unless a kept connection was stale."""
        if not self._call.sends_again(failure, self._has_head):
            self.failed(failure, is_blamed=True)

    def failed(self, failure: Failure, is_blamed: bool) -> None:
        """Give up and tell of it.

        Args:
            failure: why.
            is_blamed: whether it is the engine's fault; else it only did not take this request.
        """
        if self._is_over:
            return
        attempt_failed(self._span, failure)
        self.close()
        if is_blamed:
            self._services.dispatcher.failed(self.engine, failure)
        self._on_failed(failure)

    def close(self) -> None:
        """Let go of the engine and of what counts there; may be called again."""
        if self._is_over:
            return
        self._is_over = True
        self._pieces = []
        self._call.abandon()
        self._in_flight.end(self._services.dispatcher.clock())
        self._span.end()

    def _take_head(self, head: AnswerHead) -> bool:
        """Look at who answers and how; returns whether the body matters."""
        dispatcher, engine = self._services.dispatcher, self.engine
        self._span.set(trace_names.STATUS, head.status)
        who = identify(head, engine, dispatcher.table.snapshot)
        if who is Identity.STRANGER:
            self._services.pools.pool(engine.endpoint.url).drop_idle()
            self.failed(Failure.STRANGER, is_blamed=True)
            return False
        if who is Identity.RESTARTED:
            dispatcher.restarted(engine)
        if head.status == 200:
            return True
        failure = _failure_of(head, who)
        if failure is Failure.REJECTED or (failure is Failure.STATUS and head.status == 503):
            self._error = EngineError(head)
            return True
        if failure is Failure.ENDING:
            dispatcher.ending(engine)
        self.failed(failure, is_blamed=head.status >= 500)
        return False

    def _take_error(self, error: EngineError, body: bytes, complete: bool) -> None:
        """Give up once the engine has said what is wrong."""
        if not error.take(body, complete):
            return
        if error.code == INVALID_HANDOFF:
            self._services.dispatcher.disbelieved(self.engine, error)
        if error.head.status != 503:
            self.failed(Failure.REJECTED, is_blamed=False)
        elif error.code == KV_LOAD_FAILED:  # it has computed all, and waited for the decode engine to have it
            self.failed(Failure.KV_LOST, is_blamed=False)
        else:
            self.failed(Failure.STATUS, is_blamed=True)


def _failure_of(head: AnswerHead, who: Identity) -> Failure:
    """Tell what is wrong with the engine from what is wrong with the request, which no other would compute either."""
    if head.status >= 500:
        return failure_of_status(head)
    if head.status < 400 or head.status in _FULL:
        return Failure.STATUS
    return Failure.HANDOFF if who is Identity.RESTARTED else Failure.REJECTED

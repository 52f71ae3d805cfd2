"""One attempt to answer a request with two engines: the transfer, the prefill leg, what the decode leg says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
from pagefleet_protocol import trace_names
from pagefleet_protocol.kv_handoff import KvFault
from pagefleet_protocol.tracing import Span

from pagefleet_router.errors import Failure
from pagefleet_router.exchange.engine_answer import INVALID_HANDOFF, KV_LOAD_FAILED, EngineError, Identity, identify
from pagefleet_router.exchange.forwarding import Transfer, forwarded_request
from pagefleet_router.exchange.prefill_leg import PrefillLeg
from pagefleet_router.exchange.retries import Retries
from pagefleet_router.exchange.services import Services
from pagefleet_router.exchange.tracing import attempt_span
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.cost import late_seconds
from pagefleet_router.scheduling.in_flight import InFlight
from pagefleet_router.scheduling.policy import Choice
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.upstream import AnswerHead

_LATE_S = 1.0
"""Longer than a prefill engine takes to say that its blocks have arrived, which it may after the first token."""
_APART_S: Mapping[KvFault | None, float] = {"unknown_peer": 5.0, "incompatible": 30.0}
"""Faults of no engine but of the two together, and for how long they are not tried again: peers are looked up each five
seconds; versions and kinds of K/V only change with an engine."""
_REFUSALS = {KV_LOAD_FAILED: Failure.KV_LOST, INVALID_HANDOFF: Failure.HANDOFF}


class PairAttempt:
    """Goes beside the decode leg's call, and ends before the next attempt begins.

    Args:
        choice: of two engines.
        is_last: whether no other prefill engine would be asked after this one.
        services: of the exchange, which make transfers.
        on_failed: called where the prefill engine fails.
    """

    __slots__ = (
        "_answered_at", "_choice", "_error", "_late_s", "_on_failed", "_on_failure", "_services", "_transfers", "leg",
        "refused", "transfer",
    )  # fmt: skip

    def __init__(self, choice: Choice, is_last: bool, services: Services, on_failed: Callable[[Failure], None]) -> None:
        assert services.transfers is not None
        self._transfers = services.transfers
        self._on_failure = self._transfers.fallback if is_last else "fail"
        self.transfer = self._transfers.make(choice, self._on_failure)
        """What the engines are told."""
        self.leg: PrefillLeg | None = None
        self.refused: Failure | None = None
        """Why the decode engine does not go on from the other's K/V; set with its whole answer."""
        self._choice = choice
        self._services = services
        self._on_failed = on_failed
        self._late_s = 0.0
        self._error: EngineError | None = None
        self._answered_at = math.inf

    @property
    def prefill(self) -> Choice:
        """Where the prompt is computed."""
        assert self._choice.prefill is not None
        return self._choice.prefill

    def start(self, request: ClientRequest, view: RequestView, span: Span) -> None:
        """Have the prompt computed; called when the decode leg is on its way.

        Args:
            request: whole.
            view: of it.
            span: of the request.
        """
        prefill, services = self.prefill, self._services
        dispatcher = services.dispatcher
        self._late_s = late_seconds(prefill, self._choice, view.num_tokens)
        part = attempt_span(span, prefill)
        tell_leg(part, "prefill", self.transfer)
        # Of its answer, too, the first byte tells that the prompt is computed; the leg's end is not that of the stream,
        # for which a long prompt must not be kept.
        counted = msgspec.structs.replace(view, stream=True, pieces=(), blocks=(), token_ids=b"")
        in_flight = InFlight(counted, prefill, dispatcher.clock())
        pieces = forwarded_request(request, view, prefill.engine, None, part.context, self.transfer.prefill)
        self.leg = PrefillLeg(pieces, in_flight, part, services, self._leg_failed)
        self.leg.start()

    def take(self, head: AnswerHead | None, body: bytes, complete: bool) -> tuple[AnswerHead | None, bytes] | None:
        """Look at the beginning of the decode engine's answer; None: it has to be whole to be understood.

        Returns:
            What is to be passed on, unless `refused` is set.
        """
        if self._error is None:
            if head is None or head.status not in (400, 503) or head.closes:
                return head, body
            self._error = EngineError(head)
        error = self._error
        if not error.take(body, complete):
            return None
        self._error = None
        self.refused = _REFUSALS.get(error.code or "")
        if self.refused is not None:
            self._note(error, self.refused)
        return error.head, error.body

    def _note(self, error: EngineError, refused: Failure) -> None:
        """Note what it tells of the two engines."""
        dispatcher, decode = self._services.dispatcher, self._choice.engine
        if identify(error.head, decode, dispatcher.table.snapshot) is Identity.RESTARTED:
            dispatcher.restarted(decode)
        elif refused is Failure.HANDOFF:
            dispatcher.disbelieved(decode, error)
        if refused is Failure.KV_LOST:
            self._lost(error.fault)

    def _leg_failed(self, failure: Failure) -> None:
        if failure is Failure.KV_LOST:
            self._lost()
            if self._on_failure == "recompute":  # the decode engine knows it too, and computes: once is enough
                return
        self._on_failed(failure)

    def _lost(self, fault: KvFault | None = None) -> None:
        """Note that K/V did not come, which either engine says; whose fault it is only the decode engine may know."""
        dispatcher, prefill, decode = self._services.dispatcher, self.prefill.engine, self._choice.engine
        if fault in _APART_S:
            dispatcher.links.part(prefill, decode, dispatcher.clock() + _APART_S[fault])
        elif fault != "not_asked" and dispatcher.links.lost(prefill.id, decode.id):
            dispatcher.failed(prefill, Failure.KV_LOST)

    def answered(self, view: RequestView, now: float) -> None:
        """Learn from the decode leg's first byte; `view` is still whole."""
        self._answered_at = now
        dispatcher, leg = self._services.dispatcher, self.leg
        dispatcher.policy.sent(view, self._choice.engine, self._choice.rank)
        if leg is None or leg.done_at is None:
            return  # it was not needed, or its K/V did not come
        dispatcher.succeeded(self.prefill.engine)
        if self._on_failure == "fail":  # else it may have computed the prompt itself
            dispatcher.links.came(self._choice.engine.id)
        pairs, facts = dispatcher.metrics.pairs, self._choice.engine.facts
        if facts is not None and facts.kv_transfer is not None:
            lacked = max(0, view.num_tokens - self._choice.cached_tokens)
            pairs.came(self.prefill.engine.id, self._choice.engine.id, lacked * facts.kv_transfer.bytes_per_token)
        seconds = now - leg.done_at
        pairs.handover.observe(seconds)
        self._choice.engine.rates.transfer.handed_over(seconds, self._late_s, now)

    def check(self, now: float) -> None:
        """End a leg whose engine hangs, or computes what was not needed: the answer goes on without it."""
        if now - self._answered_at >= _LATE_S:
            self.close()
        elif self.leg is not None and self.leg.is_running and self._services.dispatcher.is_stuck(self.leg.engine):
            self.leg.failed(Failure.STUCK, is_blamed=True)

    def another(self, attempts: Retries, view: RequestView, failure: Failure) -> Choice | None:
        """Count that no K/V came; returns who gets the request now, without this prefill engine.

        Args:
            attempts: of the request.
            view: of it.
            failure: why it did not come.
        """
        dispatcher, may_compute = self._services.dispatcher, self._transfers.fallback == "recompute"
        pairs = dispatcher.metrics.pairs
        pairs.retries[failure.value] += 1
        attempts.tried.append(self.prefill.engine.id)
        choice = attempts.another_prefill(dispatcher, view, failure, may_compute)
        pairs.recomputed += choice is not None and choice.prefill is None
        return choice

    def close(self) -> None:
        """End the prefill leg, wherever it is."""
        if self.leg is not None:
            self.leg.close()


def tell_leg(span: Span, leg: str, transfer: Transfer) -> None:
    """Say in a span which leg of which transfer it is."""
    span.set(trace_names.LEG, leg)
    span.set(trace_names.TRANSFER_ID, transfer.id)

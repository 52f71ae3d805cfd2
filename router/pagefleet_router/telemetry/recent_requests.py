"""The last requests, for the console: noted in passing, put into words when somebody looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec
from pagefleet_protocol.console_state import RequestState
from pagefleet_protocol.fault_book import shown_time

from pagefleet_router.telemetry.access_record import AccessRecord

MAX_KEPT = 250
"""Requests of all tenants: enough that each tenant finds some of its own."""
MAX_GOOD_PER_S = 50
"""Answers below 400 that are noted. More would cost busy routers time, and be gone before anybody has read them."""


class PassedRequest(msgspec.Struct, frozen=True):
    """One request that is over."""

    record: AccessRecord
    ended_at: float
    """Seconds since the epoch."""
    tenant: str
    error: str | None = None
    """Code of the error that the router ended it with."""
    ttft_s: float | None = None
    """From its arrival to the first byte of a stream."""
    generated_tokens: int | None = None
    tried: tuple[str, ...] = ()
    """Engines that failed it."""
    trace_parent: bytes = b""
    """The header `traceparent` of its span; empty: it has none."""

    def state(self) -> RequestState:
        """Return it in the console's words."""
        record, seconds = self.record, self.record.total_ms / 1000
        return RequestState(
            id=record.request_id,
            at=shown_time(self.ended_at - seconds),
            tenant=self.tenant,
            route=record.route,
            model=record.model,
            status=record.status,
            error=self.error,
            seconds=seconds,
            queue_seconds=record.queue_ms / 1000,
            ttft_seconds=None if self.ttft_s is None else round(self.ttft_s, 5),
            prompt_tokens=record.prompt_tokens or None,
            cached_tokens=record.cached_tokens,
            generated_tokens=self.generated_tokens,
            engine=record.engine,
            prefill_engine=record.prefill_engine,
            attempts=0 if record.engine is None else record.retries + 1,
            tried=self.tried,
            trace_id=self.trace_parent[3:35].decode() or None,
        )


class RecentRequests:
    """Keeps the last MAX_KEPT requests; of many good ones a second, some."""

    def __init__(self) -> None:
        self._kept: deque[PassedRequest] = deque(maxlen=MAX_KEPT)
        self._second = 0
        self._num_good = 0
        """That were wanted in this second."""

    def wants(self, status: int, now: float) -> bool:
        """Whether a request that ends now, on any clock in seconds, is to be noted."""
        if status >= 400:
            return True
        if self._second != int(now):
            self._second, self._num_good = int(now), 0
        self._num_good += 1
        return self._num_good <= MAX_GOOD_PER_S

    def add(self, request: PassedRequest) -> None:
        """Note one that has just ended."""
        self._kept.append(request)

    def states(self) -> Iterator[RequestState]:
        """Yield them in the console's words, newest first."""
        return (request.state() for request in reversed(self._kept))

"""What the engine tells of generation requests in spans: one for each, with what the engine core did for it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from pagefleet_protocol import metric_names
from pagefleet_protocol import trace_names as names
from pagefleet_protocol.trace_collector import TracesError, make_tracer
from pagefleet_protocol.tracing import NO_SPAN, Span, Tracer
from pagefleet_protocol.version import VERSION
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.errors import ConfigError, EngineError
from pagefleet_engine.server.console import RequestNote
from pagefleet_engine.server.middleware import request_id_of

logger = logging.getLogger(__name__)

TRACED_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
_KEY = "pagefleet_span"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request from when it was there, before its prompt was built."""

    at: float
    """On the generator's clock."""
    span: Span = NO_SPAN
    """Is told what becomes of it."""
    note: RequestNote | None = None
    """The same, for the console."""


def make_engine_tracer(config: ServerConfig, model: str) -> Tracer:
    """Return what sends this engine's spans to where the settings say.

    Raises:
        ConfigError: the packages for that are not installed.
    """
    resource = {
        "service.name": "pagefleet-engine",
        "service.version": VERSION,
        "service.instance.id": uuid.uuid4().hex,
        names.MODEL: model,
    }
    try:
        return make_tracer(config.otlp_traces_endpoint, config.otlp_traces_sample, resource, logger)
    except TracesError as error:
        raise ConfigError(f"otlp_traces_endpoint {error}") from None


class TraceRequests:
    """ASGI middleware: begins a span with each generation request, in the caller's trace, and ends it."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with its span in the scope."""
        if scope["type"] != "http" or scope["path"] not in TRACED_ROUTES:
            await self._app(scope, receive, send)
            return
        route: str = scope["path"]
        span = scope[_KEY] = self._tracer.serve(route, scope["headers"])
        span.set(names.METHOD, scope["method"])
        span.set(names.ROUTE, route)
        span.set(names.REQUEST_ID, request_id_of(scope))

        async def send_watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                status: int = message["status"]
                span.set(names.STATUS, status)
                if status >= 500:
                    span.failed(str(status))
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        finally:
            span.end()


def span_of(scope: Scope) -> Span:
    """Return the span of a request; an empty one where it is not traced."""
    span: Span = scope.get(_KEY, NO_SPAN)
    return span


async def traced(chunks: Chunks, asked: Generation, arrival: Arrival, clock: Callable[[], float]) -> Chunks:
    """Yield `chunks`, and tell the request's span of them."""
    span = arrival.span
    _begin(span, asked)
    first, num_tokens = True, 0
    num_cached: dict[int, int] = {}
    reasons: dict[int, str] = {}
    try:
        async with aclosing(chunks):
            async for index, chunk in chunks:
                if first and chunk.token_ids:
                    first = False
                    span.event(names.FIRST_TOKEN)
                    span.set(names.FIRST_TOKEN_S, round(clock() - arrival.at, 6))
                num_tokens += len(chunk.token_ids)
                if chunk.num_cached_tokens is not None:
                    num_cached.setdefault(index // asked.sampling.n, chunk.num_cached_tokens)
                if chunk.waits is not None and chunk.waits.kv_s is not None:
                    span.set(names.KV_WAIT_S, round(chunk.waits.kv_s, 6))
                if chunk.finish_reason is not None:
                    reasons[index] = chunk.finish_reason
                yield index, chunk
    except EngineError as error:
        span.failed(type(error).__name__)
        raise
    finally:
        span.set(names.OUTPUT_TOKENS, num_tokens)
        span.set(names.CACHED_TOKENS, sum(num_cached.values()))
        span.set(names.FINISH_REASONS, [reasons[index] for index in sorted(reasons)])


def _begin(span: Span, asked: Generation) -> None:
    span.event(names.QUEUED)
    span.set(names.INPUT_TOKENS, asked.num_prompt_tokens)
    if asked.transfer is not None:
        span.set(names.LEG, asked.transfer.leg)
        span.set(names.TRANSFER_ID, asked.transfer.transfer_id)
    if asked.resumed:
        span.set(names.RESUMED_TOKENS, asked.num_resumed_tokens)


def span_stats(tracer: Tracer) -> dict[str, float]:
    """Return what became of the spans, by the metrics' names."""
    name = metric_names.ENGINE_TRACE_SPANS
    return {f'{name}{{outcome="exported"}}': tracer.num_exported, f'{name}{{outcome="dropped"}}': tracer.num_dropped}

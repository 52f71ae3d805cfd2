"""Spans as the processes of a fleet make them: one per request in each process, and one per attempt at an engine.

What leaves for a collector is in `otlp_traces`, which is imported only where a collector is named. Without one there
are the empty spans here, which cost a call each. No span holds a request's text, a key or a tenant's name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

Header = tuple[bytes, bytes]
"""A name in lower case, and its value."""
Value = str | bool | int | float | Sequence[str]

CONTEXT_HEADERS = frozenset({b"traceparent", b"tracestate"})
"""Trace context of the W3C, level 1."""

_TRACES_PATH = "/v1/traces"


class TracesError(ValueError):
    """Spans cannot be sent as it was asked for. The message is the end of a sentence about the collector's URL."""


class Span(Protocol):
    """A piece of work. Its parts may outlive it; after `end` it takes nothing more."""

    @property
    def is_kept(self) -> bool:
        """Whether anybody will see it: what is costly to find out need not be, if not."""
        ...

    @property
    def context(self) -> Sequence[Header] | None:
        """Headers for those who do a part of it; None: what a client sent is passed on as it is."""
        ...

    def part(self, name: str) -> Span:
        """Begin a part that is done elsewhere, by whoever is sent the part's `context`."""
        ...

    def set(self, name: str, value: Value) -> None:
        """Say something of it; the last word on a name counts."""
        ...

    def event(self, name: str) -> None:
        """Say that something has happened now."""
        ...

    def failed(self, reason: str) -> None:
        """Say that it did not do what it was for."""
        ...

    def end(self) -> None:
        """It is over. May be said again."""
        ...


class Tracer(Protocol):
    """Makes the spans of one process."""

    @property
    def num_exported(self) -> int:
        """Spans that a collector has taken."""
        ...

    @property
    def num_dropped(self) -> int:
        """Spans that it did not take, or that did not fit the queue."""
        ...

    def serve(self, name: str, headers: Iterable[Header], age_s: float = 0.0) -> Span:
        """Begin the span of a request.

        Args:
            name: of few values, e.g. method and route.
            headers: of the request; it continues the trace that they name.
            age_s: seconds since it came.
        """
        ...

    def close(self) -> None:
        """Send what is left, for a moment. Blocks."""
        ...


class NoSpan:
    """Implements `Span` for nobody."""

    is_kept = False
    context: Sequence[Header] | None = None

    def part(self, name: str) -> Span:
        """Return itself."""
        return self

    def set(self, name: str, value: Value) -> None:
        """Do nothing."""

    def event(self, name: str) -> None:
        """Do nothing."""

    def failed(self, reason: str) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


NO_SPAN = NoSpan()
"""It has no state."""


class NoTracer:
    """Implements `Tracer` where traces are off."""

    num_exported = 0
    num_dropped = 0

    def serve(self, name: str, headers: Iterable[Header], age_s: float = 0.0) -> Span:
        """Return the empty span."""
        return NO_SPAN

    def close(self) -> None:
        """Do nothing."""


NO_TRACER = NoTracer()
"""It has no state."""


def traces_url(endpoint: str) -> str:
    """Return where spans are posted: `endpoint` itself, or the usual path of a collector that is named without one.

    Raises:
        TracesError: it is no HTTP URL.
    """
    try:
        parts = urlsplit(endpoint)
        is_usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or parts.username is not None or parts.fragment or not endpoint.isprintable() or " " in endpoint:
        raise TracesError("is not an http:// or https:// URL, such as http://collector:4318/v1/traces")
    return endpoint if parts.path not in {"", "/"} or parts.query else endpoint.rstrip("/") + _TRACES_PATH


def make_tracer(endpoint: str | None, ratio: float, resource: Mapping[str, str], logger: logging.Logger) -> Tracer:
    """Return what sends spans to `endpoint`, or what makes none where there is no endpoint.

    Args:
        endpoint: URL of an OTLP/HTTP collector.
        ratio: share of the requests without a trace of their own for which one is begun, 0 to 1.
        resource: what all spans of this process say, by OpenTelemetry's names.
        logger: is told of lost spans.

    Raises:
        TracesError: it is no URL, or OpenTelemetry's packages are missing.
    """
    if endpoint is None:
        return NO_TRACER
    url = traces_url(endpoint)
    try:
        from pagefleet_protocol.otlp_traces import OtlpTracer  # noqa: PLC0415 - half a second and 20 MB
    except ImportError:
        distribution = resource.get("service.name", "pagefleet-protocol")
        raise TracesError(f"needs OpenTelemetry's packages: pip install '{distribution}[traces]'") from None
    return OtlpTracer(url, ratio, resource, logger)

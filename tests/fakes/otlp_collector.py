"""A collector of traces on a free port: OTLP over HTTP, in threads of its own. No test in here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

SERVER, CLIENT = WireSpan.SPAN_KIND_SERVER, WireSpan.SPAN_KIND_CLIENT


@dataclass(frozen=True)
class Got:
    """One span as it came. Ids in hexadecimal digits."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[str]
    failure: str | None
    """None: it did not fail."""
    seconds: float


@dataclass
class Collector:
    """Keeps every span."""

    status: int = 200
    """Of its answers; spans of a request that it answers with another are not kept."""
    spans: list[Got] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path and headers."""
    held: threading.Event = field(default_factory=threading.Event)
    """Answers wait for it."""
    url: str = ""

    def until(self, condition: Callable[[list[Got]], object], within: float = 60.0) -> list[Got]:
        """Wait for spans, which come by themselves within a second or two."""
        deadline = time.monotonic() + within
        while not condition(self.spans):
            assert time.monotonic() < deadline, f"the collector has {self.spans}"
            time.sleep(0.01)
        return self.spans

    def take(self, body: bytes) -> None:
        for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = {one.key: one.value.string_value for one in batch.resource.attributes}["service.name"]
            for scope in batch.scope_spans:
                self.spans += [_got(service, span) for span in scope.spans]


def _got(service: str, span: WireSpan) -> Got:
    return Got(
        service,
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        {one.key: _value(one.value) for one in span.attributes},
        [event.name for event in span.events],
        span.status.message if span.status.code == 2 else None,
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Run one; its `url` has no path, as people write it."""
    made = Collector()
    made.held.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.requests.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
            made.held.wait(60)
            if made.status == 200:
                made.take(body)
            with contextlib.suppress(OSError):  # who asked may have given up
                self.send_response(made.status)
                self.send_header("content-length", "0")
                self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.held.set()
        server.shutdown()
        server.server_close()
        thread.join()

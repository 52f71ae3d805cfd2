"""Spans: whose part they are, what leaves for a collector, and that nobody waits for one."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from pagefleet_protocol import otlp_traces
from pagefleet_protocol.otlp_traces import OtlpTracer, Outbox
from pagefleet_protocol.trace_collector import TracesError, make_tracer, traces_url
from pagefleet_protocol.tracing import NO_SPAN, NO_TRACER, Span, Tracer

from tests.example_counts import examples
from tests.fakes.otlp_collector import CLIENT, SERVER, Collector, collector

LOGGER = logging.getLogger("pagefleet_test.traces")
RESOURCE = {"service.name": "pagefleet-test"}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = [(b"traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01".encode())]
NOT_SAMPLED = [(b"traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00".encode())]
A_SPAN = ReadableSpan("a span")


@pytest.fixture(name="site")
def fixture_site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(otlp_traces, "_CLOSE_S", 60.0)  # a busy machine takes its time
    with collector() as made:
        yield made


def of(site: Collector, ratio: float = 1.0) -> Tracer:
    return make_tracer(site.url, ratio, RESOURCE, LOGGER)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://[::1]/mine", "https://[::1]/mine"),
        ("https://c/v1/traces?tenant=a", "https://c/v1/traces?tenant=a"),
        ("http://c/?tenant=a", "http://c/?tenant=a"),
    ],
)
def test_where_spans_are_posted(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint",
    ["", "c:4318", "grpc://c:4317", "http://", "http://c:0", "http://c:99999", "http://u:p@c", "http://c/#x",
     "http://c/a b", "http://c\n", "http://[::1"],
)  # fmt: skip
def test_what_is_no_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(TracesError, match=r"^is not an http:// or https:// URL"):
        make_tracer(endpoint, 1.0, RESOURCE, LOGGER)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pagefleet_protocol.otlp_traces", None)
    with pytest.raises(TracesError, match=r"pip install 'pagefleet-router\[traces\]'"):
        make_tracer("http://c", 1.0, {"service.name": "pagefleet-router"}, LOGGER)


def test_off_costs_no_package_and_says_nothing() -> None:
    tracer = make_tracer(None, 1.0, RESOURCE, LOGGER)
    assert tracer is NO_TRACER
    span = tracer.serve("/x", SAMPLED)
    part: Span = span.part("y")
    assert (part, span.is_kept, span.context) == (NO_SPAN, False, None)
    for one in (span, part):
        one.set("a", 1)
        one.event("b")
        one.failed("c")
        one.end()
    tracer.close()
    assert (tracer.num_exported, tracer.num_dropped) == (0, 0)
    code = "import sys, pagefleet_router.app; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_a_request_and_its_parts_are_in_the_callers_trace(site: Collector) -> None:
    tracer = of(site)
    request = tracer.serve("/route", [*SAMPLED, (b"tracestate", b"a=b"), (b"tracestate", b"c=d")], age_s=2.5)
    request.set("number", 3)
    request.set("words", ["x", "y"])
    part = request.part("ask")
    part.event("asked")
    part.failed("reset")
    part.failed("later")
    context = dict(part.context or ())
    kept = [request.is_kept]
    part.end()
    request.end()
    request.end()
    assert [*kept, request.is_kept] == [True, False]
    tracer.close()
    below, above = site.spans
    assert (above.service, above.name, above.kind, above.parent_id) == ("pagefleet-test", "/route", SERVER, PARENT_ID)
    assert (below.name, below.kind, below.parent_id) == ("ask", CLIENT, above.span_id)
    assert {above.trace_id, below.trace_id} == {TRACE_ID}
    assert (above.attributes, below.events) == ({"number": 3, "words": ["x", "y"]}, ["asked"])
    assert (above.failure, below.failure) == (None, "reset"), "the first cause stays"
    assert above.seconds >= 2.5 > below.seconds
    assert context == {b"traceparent": f"00-{TRACE_ID}-{below.span_id}-01".encode(), b"tracestate": b"a=b,c=d"}
    assert (tracer.num_exported, tracer.num_dropped) == (2, 0)
    assert {path for path, _ in site.requests} == {"/v1/traces"}
    assert {head["content-type"] for _, head in site.requests} == {"application/x-protobuf"}


@pytest.mark.parametrize(
    "headers", [[], [*SAMPLED, *SAMPLED], [(b"traceparent", b"00-1-2-01")], [(b"tracestate", b"a=b")]]
)
def test_without_one_trace_of_the_caller_there_is_a_new_one(
    site: Collector, headers: list[tuple[bytes, bytes]]
) -> None:
    tracer = of(site)
    tracer.serve("a", headers).end()
    tracer.serve("b", headers).end()
    tracer.close()
    assert {span.parent_id for span in site.spans} == {""}
    assert len({span.trace_id for span in site.spans} - {TRACE_ID}) == 2


@pytest.mark.parametrize(
    ("headers", "ratio", "kept"), [(SAMPLED, 0.0, True), (NOT_SAMPLED, 1.0, False), ([], 0.0, False)]
)
def test_a_callers_trace_decides_and_the_ratio_of_the_rest(
    site: Collector, headers: list[tuple[bytes, bytes]], ratio: float, kept: bool
) -> None:
    tracer = of(site, ratio)
    span = tracer.serve("a", headers)
    assert span.is_kept is kept
    part = span.part("b")
    assert part.context is not None
    told = dict(part.context)[b"traceparent"]
    assert bool(int(told[-2:], 16) & 1) is kept, "who does a part decides alike"
    assert (told[3:35] == TRACE_ID.encode()) is bool(headers)
    part.end()
    span.end()
    tracer.close()
    assert len(site.spans) == (2 if kept else 0)
    assert (tracer.num_exported, tracer.num_dropped) == (len(site.spans), 0)


def test_headers_for_the_collector_come_from_the_environment(site: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a")
    tracer = of(site)
    tracer.serve("a", []).end()
    tracer.close()
    assert site.requests[0][1]["x-tenant"] == "a"


@pytest.fixture(name="quiet", scope="module")
def fixture_quiet() -> Iterator[Tracer]:
    tracer = OtlpTracer("http://127.0.0.1:1", 0.0, RESOURCE, LOGGER)
    yield tracer
    tracer.close()


PARENTS = st.one_of(
    st.binary(max_size=80),
    st.from_regex(rb"\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,9})?\Z"),
    st.just(NOT_SAMPLED[0][1]),
)
STATES = st.one_of(st.binary(max_size=80), st.from_regex(rb"\A([a-z0-9@*/_-]{1,9}=[ -~]{1,9},?){1,40}\Z"))


@given(parents=st.lists(PARENTS, max_size=2), states=st.lists(STATES, max_size=2))
@settings(deadline=None, max_examples=examples(50))
def test_no_header_of_a_client_breaks_anything(quiet: Tracer, parents: list[bytes], states: list[bytes]) -> None:
    headers = [(b"traceparent", value) for value in parents] + [(b"tracestate", value) for value in states]
    context = quiet.serve("a", headers).part("b").context
    assert context is not None
    for name, value in context:
        assert name in {b"traceparent", b"tracestate"}
        assert not set(value) & set(b"\r\n\0"), "it is written into a head"


def test_a_collector_that_refuses_costs_spans_and_one_line(site: Collector, caplog: pytest.LogCaptureFixture) -> None:
    site.status = 400
    tracer = of(site)
    for _ in range(3):
        tracer.serve("a", []).end()
    tracer.close()
    assert (tracer.num_exported, tracer.num_dropped, site.spans) == (0, 3, [])
    assert [record.name for record in caplog.records] == [LOGGER.name]


def test_a_collector_that_hangs_holds_nobody_up(site: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_traces, "_CLOSE_S", 1.0)
    site.held.clear()
    tracer = of(site)
    tracer.serve("a", []).end()
    tracer.close()
    span = tracer.serve("b", [])
    span.end()
    assert tracer.num_exported == 0
    assert tracer.num_dropped >= 1


class Sink(SpanExporter):
    """Takes spans, or not, as a test says."""

    def __init__(self) -> None:
        self.result = SpanExportResult.SUCCESS
        self.error: Exception | None = None
        self.taken = 0
        self.num_shutdowns = 0
        self.may_go = threading.Event()
        self.may_go.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_go.wait(60)
        if self.error is not None:
            raise self.error
        self.taken += len(spans)
        return self.result

    def shutdown(self) -> None:
        self.num_shutdowns += 1


def test_the_queue_is_bounded_and_what_does_not_fit_counts(caplog: pytest.LogCaptureFixture) -> None:
    sink, now = Sink(), [0.0]
    outbox = Outbox(sink, LOGGER, capacity=2, clock=lambda: now[0])
    assert [outbox.admit() for _ in range(4)] == [True, True, False, False]
    assert outbox.num_dropped == 2
    assert outbox.export([A_SPAN]) is SpanExportResult.SUCCESS
    assert [outbox.admit() for _ in range(2)] == [True, False]
    assert (outbox.num_exported, outbox.num_dropped, len(caplog.records)) == (1, 3, 1)
    now[0] = 59.0
    assert not outbox.admit()
    now[0] = 60.0
    assert not outbox.admit()
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == ["1", "4"], "a line a minute, all told"


def test_failed_batches_count_and_free_their_places() -> None:
    sink = Sink()
    outbox = Outbox(sink, LOGGER, capacity=3)
    assert all(outbox.admit() for _ in range(3))
    sink.result = SpanExportResult.FAILURE
    assert outbox.export([A_SPAN, A_SPAN]) is SpanExportResult.FAILURE
    sink.error = RuntimeError("a bug of the exporter")
    with pytest.raises(RuntimeError):
        outbox.export([A_SPAN])
    assert (outbox.num_exported, outbox.num_dropped) == (0, 3)
    assert all(outbox.admit() for _ in range(3))
    outbox.shutdown()
    outbox.shutdown()
    taken = sink.taken
    assert outbox.export([A_SPAN] * 3) is SpanExportResult.FAILURE
    assert not outbox.admit()
    assert (sink.taken, sink.num_shutdowns, outbox.num_dropped) == (taken, 1, 7)

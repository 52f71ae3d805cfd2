"""Spans of the router: one a request, one an engine that was asked, and the engine's own below that."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.server.tracing import make_engine_tracer
from pagefleet_protocol import trace_names as names
from pagefleet_router.app import make_router_tracer
from pagefleet_router.config import RouterConfig
from pagefleet_router.errors import ConfigError

from tests.fakes.faulty_engine import CHAT, Fleet, Seen, chat, fleet, post, run, stream, whole
from tests.fakes.inline_engine import script_core
from tests.fakes.otlp_collector import CLIENT, SERVER, Collector, Got, collector
from tests.fakes.stream_site import TOKENIZER, open_site, script_of

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = f"traceparent: 00-{TRACE_ID}-{PARENT_ID}-01\r\ntracestate: a=b\r\nbaggage: c=d\r\n"
SECRET = "the quick brown secret"
DEAD = "http://127.0.0.1:1"


@pytest.fixture(name="site")
def fixture_site() -> Iterator[Collector]:
    with collector() as made:
        yield made


def one(spans: list[Got], name: str) -> Got:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, spans
    return found[0]


async def reset(seen: Seen, writer: Any) -> None:
    writer.transport.abort()


def test_a_request_is_a_span_with_what_became_of_it(tmp_path: Path, site: Collector) -> None:
    async def check(f: Fleet) -> None:
        head = f"{CONTEXT}x-request-id: mine\r\n"
        assert (await f.ask(post(chat(SECRET), headers=head))).status == 200
        port.append(f.engines[0].port)
        seen = f.engines[0].seen[0]
        context.extend(value for name, value in seen.headers if name in {"traceparent", "tracestate", "baggage"})

    context: list[str] = []
    port: list[int] = []
    run(tmp_path, check, whole(), otlp_traces_endpoint=site.url)
    asked, request = one(site.spans, "ask engine"), one(site.spans, CHAT)
    assert (request.service, request.kind, request.trace_id) == ("pagefleet-router", SERVER, TRACE_ID)
    assert (request.parent_id, request.failure) == (PARENT_ID, None)
    about = dict(request.attributes)
    assert about.pop(names.INPUT_TOKENS) > 0
    assert about.pop(names.QUEUE_S) >= 0
    assert about == {
        names.METHOD: "POST", names.ROUTE: CHAT, names.REQUEST_ID: "mine", names.POLICY: "least-load",
        names.MODEL: "m", names.ENGINE: "e0", names.STATUS: 200, names.CACHED_TOKENS: 0, names.RETRIES: 0,
        names.PREFILL_BY: "none",
    }  # fmt: skip
    assert (asked.kind, asked.trace_id, asked.parent_id) == (CLIENT, TRACE_ID, request.span_id)
    assert (asked.attributes[names.ENGINE], asked.attributes[names.STATUS], asked.failure) == ("e0", 200, None)
    assert (asked.attributes[names.SERVER_ADDRESS], asked.attributes[names.SERVER_PORT]) == ("127.0.0.1", port[0])
    assert sorted(context) == sorted([f"00-{TRACE_ID}-{asked.span_id}-01", "a=b", "c=d"]), "the attempt's, once"
    assert SECRET not in repr(site.spans)


def test_every_attempt_is_a_span_and_tells_why_it_failed(tmp_path: Path, site: Collector) -> None:
    parents: set[str | None] = set()
    answers = [whole(503), whole(503), whole()]

    async def in_turn(seen: Seen, writer: Any) -> None:
        await answers.pop(0)(seen, writer)

    async def check(f: Fleet) -> None:
        assert (await f.ask(post(chat(), headers=CONTEXT))).status == 200
        parents.update(engine.seen[0].header("traceparent") for engine in f.engines)

    run(tmp_path, check, in_turn, in_turn, in_turn, otlp_traces_endpoint=site.url)
    request = one(site.spans, CHAT)
    attempts = [span for span in site.spans if span.name == "ask engine"]
    assert [span.failure for span in attempts] == ["status", "status", None]
    assert [span.attributes[names.STATUS] for span in attempts] == [503, 503, 200]
    assert {span.attributes[names.ENGINE] for span in attempts} == {"e0", "e1", "e2"}
    assert {span.parent_id for span in attempts} == {request.span_id}
    assert parents == {f"00-{TRACE_ID}-{span.span_id}-01" for span in attempts}
    assert request.attributes[names.RETRIES] == 2
    assert request.attributes[names.ENGINE] == attempts[-1].attributes[names.ENGINE]
    assert request.failure is None


def test_what_goes_wrong_in_the_end_is_the_requests_failure(tmp_path: Path, site: Collector) -> None:
    async def check(f: Fleet) -> None:
        assert (await f.ask(post(chat(), headers=CONTEXT))).status == 502
        f.engines[0].behave = stream([b"data: a\n\n"], then="reset")
        assert b"error" in (await f.ask(post(chat(stream=True), headers=CONTEXT))).body

    run(tmp_path, check, reset, otlp_traces_endpoint=site.url)
    whole_one, streamed = [span for span in site.spans if span.name == CHAT]
    assert whole_one.attributes[names.STATUS] == 502
    assert streamed.attributes[names.STATUS] == 200
    assert None not in {whole_one.failure, streamed.failure}


def test_a_client_that_leaves_ends_its_spans(tmp_path: Path, site: Collector) -> None:
    async def check(f: Fleet) -> None:
        client = await f.connect()
        await client.send(post(chat(stream=True), headers=CONTEXT))
        await client.head()
        client.close()

    run(tmp_path, check, stream([b"data: a\n\n"], then="silence"), otlp_traces_endpoint=site.url)
    assert one(site.spans, CHAT).attributes[names.STATUS] == 499
    assert one(site.spans, "ask engine").parent_id == one(site.spans, CHAT).span_id


def test_a_trace_that_nobody_keeps_is_passed_on_and_not_sent(tmp_path: Path, site: Collector) -> None:
    async def check(f: Fleet) -> None:
        await f.ask(post(chat(), headers=CONTEXT.replace("-01\r\n", "-00\r\n")))
        await f.ask(post(chat()))
        told.extend(str(seen.header("traceparent")) for seen in f.engines[0].seen)

    told: list[str] = []
    run(tmp_path, check, whole(), otlp_traces_endpoint=site.url, otlp_traces_sample=0.0)
    assert told[0].startswith(f"00-{TRACE_ID}-")
    assert [int(value[-2:], 16) & 1 for value in told] == [0, 0]
    assert (site.spans, site.requests) == ([], [])


def test_off_nothing_is_sent_and_the_clients_trace_is_its_own(tmp_path: Path, site: Collector) -> None:
    async def check(f: Fleet) -> None:
        await f.ask(post(chat(), headers=CONTEXT))
        assert f.engines[0].seen[0].header("traceparent") == f"00-{TRACE_ID}-{PARENT_ID}-01"
        assert f.engines[0].seen[0].header("tracestate") == "a=b"
        text = (await f.get("/metrics")).body.decode()
        assert 'pagefleet_router_trace_spans_total{outcome="exported"} 0.0' in text

    run(tmp_path, check, whole())
    assert site.requests == []


def test_without_its_collector_a_router_serves_and_counts(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        for _ in range(3):
            assert (await f.ask(post(chat()))).status == 200
        router.append(f.router)

    router: list[Any] = []
    run(tmp_path, check, whole(), otlp_traces_endpoint=DEAD)
    traces = router[0].front._services.traces
    families = {sample.labels["outcome"]: sample.value for metric in traces.collect() for sample in metric.samples}
    assert families == {"exported": 0, "dropped": 6}


def test_client_router_and_engine_are_in_one_trace(tmp_path: Path, site: Collector) -> None:
    async def scenario() -> None:
        tracer = make_engine_tracer(ServerConfig(otlp_traces_endpoint=site.url), "m")
        core = script_core(script_of("An answer of some tokens."), 400)
        async with open_site(core, TOKENIZER, tracer=tracer) as engine:

            async def relay(seen: Seen, writer: Any) -> None:
                await whole(200, await answer_of(engine.http, seen))(seen, writer)

            async with fleet(tmp_path, relay, otlp_traces_endpoint=site.url) as f:
                answer = await f.ask(
                    post(chat(SECRET, max_tokens=5), headers="content-type: application/json\r\n" + CONTEXT)
                )
                assert json.loads(answer.body)["usage"]["completion_tokens"] == 5
        tracer.close()

    uvloop.run(scenario())
    routers = next(span for span in site.spans if (span.service, span.name) == ("pagefleet-router", CHAT))
    asked = one(site.spans, "ask engine")
    engines = next(span for span in site.spans if span.service == "pagefleet-engine")
    assert {span.trace_id for span in site.spans} == {TRACE_ID}
    assert [span.parent_id for span in (routers, asked, engines)] == [PARENT_ID, routers.span_id, asked.span_id]
    assert engines.attributes[names.REQUEST_ID] == routers.attributes[names.REQUEST_ID]
    assert engines.attributes[names.OUTPUT_TOKENS] == 5
    assert SECRET not in repr(site.spans)


async def answer_of(http: httpx.AsyncClient, seen: Seen) -> bytes:
    method, path, _ = seen.line.split(" ")
    headers = [(name, value) for name, value in seen.headers if name != "content-length"]
    return (await http.request(method, path, headers=headers, content=seen.body)).content


def test_settings_that_cannot_work_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"engine": ("http://127.0.0.1:1",), "model_name": "m"}
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint is not an http:// or https:// URL"):
        RouterConfig(**engine, otlp_traces_endpoint="collector:4317")  # type: ignore[arg-type]
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=r"otlp_traces_sample is .*: give 0 to 1"):
            RouterConfig(**engine, otlp_traces_sample=share)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pagefleet_protocol.otlp_traces", None)
    with pytest.raises(ConfigError, match=r"pip install 'pagefleet-router\[traces\]'"):
        make_router_tracer(RouterConfig(**engine, otlp_traces_endpoint="http://c"))  # type: ignore[arg-type]

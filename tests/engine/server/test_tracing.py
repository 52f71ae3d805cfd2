"""Spans of the engine: what a generation request came to, whose trace it is in, and never a word of its text."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from pagefleet_engine.cli import read_configuration
from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.core.outputs import Waits
from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.errors import ConfigError, KVLoadFailed
from pagefleet_engine.server.route import TransferReader
from pagefleet_engine.server.tracing import make_engine_tracer
from pagefleet_protocol import trace_names as names
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.handoff import pack_tokens
from pagefleet_protocol.kv_handoff import KV_TRANSFER, KvTransfer

from tests.fakes.inline_engine import script_core
from tests.fakes.otlp_collector import SERVER, Collector, Got, collector
from tests.fakes.stream_site import ROUTES, TEXT, TOKENIZER, Site, open_site, script_of, shown

CHAT, COMPLETIONS = ROUTES
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
KEY, INCARNATION = FleetKey(b"fleet" * 8), "0" * 32
TRANSFER = "c" * 32


@pytest.fixture(name="collected")
def fixture_collected() -> Iterator[Collector]:
    with collector() as made:
        yield made


def run(site: Collector, check: Callable[[Site], Awaitable[None]], *, sample: float = 1.0) -> list[Got]:
    """Check a server; return its spans."""

    async def scenario() -> None:
        config = ServerConfig(otlp_traces_endpoint=site.url, otlp_traces_sample=sample)
        tracer = make_engine_tracer(config, "m")
        reader = TransferReader(KEY, (INCARNATION,))
        async with open_site(script_core(script_of(TEXT), 400), TOKENIZER, tracer=tracer, transfers=reader) as made:
            await check(made)
        tracer.close()
        assert tracer.num_dropped == 0

    asyncio.run(scenario())
    return site.spans


def leg(transfer: KvTransfer) -> dict[str, str]:
    return {**CONTEXT, KV_TRANSFER: transfer.encode(KEY, INCARNATION)}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_what_it_came_to(collected: Collector, route: str, stream: bool) -> None:
    async def check(site: Site) -> None:
        body = site.fields(route, stream=stream, max_tokens=6)
        for _ in range(2):
            assert (await site.http.post(route, content=body, headers=CONTEXT)).status_code == 200

    first, second = run(collected, check)
    assert (first.service, first.name, first.kind) == ("pagefleet-engine", route, SERVER)
    assert (first.trace_id, first.parent_id, first.failure) == (TRACE_ID, PARENT_ID, None)
    assert first.events == [names.QUEUED, names.FIRST_TOKEN]
    about = dict(first.attributes)
    assert 0 <= about.pop(names.FIRST_TOKEN_S) <= first.seconds + 1e-3
    num_prompt = about.pop(names.INPUT_TOKENS)
    assert num_prompt > 4
    assert about == {
        names.METHOD: "POST", names.ROUTE: route, names.REQUEST_ID: "mine", names.STATUS: 200,
        names.OUTPUT_TOKENS: 6, names.FINISH_REASONS: ["length"], names.CACHED_TOKENS: 0,
    }  # fmt: skip
    assert 0 < second.attributes[names.CACHED_TOKENS] < num_prompt
    assert Site.prompt not in repr(collected.spans)


def test_choices_and_prompts_are_counted_once(collected: Collector) -> None:
    async def check(site: Site) -> None:
        body = {"model": "m", "prompt": [[5] * 9, [6] * 7], "n": 2, "max_tokens": 3, "temperature": 1}
        assert (await site.http.post(COMPLETIONS, content=json.dumps(body))).status_code == 200

    (span,) = run(collected, check)
    assert (span.attributes[names.INPUT_TOKENS], span.attributes[names.OUTPUT_TOKENS]) == (16, 12)
    assert span.attributes[names.FINISH_REASONS] == ["length"] * 4
    assert span.attributes[names.CACHED_TOKENS] == 0, "what the second choice finds is of the first"


@pytest.mark.parametrize(
    ("name", "transfer", "num_tokens"),
    [
        ("prefill", KvTransfer("prefill", TRANSFER, "d" * 32), 1),
        ("decode", KvTransfer("decode", TRANSFER, "e" * 32, "127.0.0.1:9", "recompute"), 4),
    ],
)
def test_a_leg_of_a_transfer_says_which(collected: Collector, name: str, transfer: KvTransfer, num_tokens: int) -> None:
    async def check(site: Site) -> None:
        body = site.fields(CHAT, stream=False, max_tokens=4)
        assert (await site.http.post(CHAT, content=body, headers=leg(transfer))).status_code == 200

    (span,) = run(collected, check)
    assert (span.attributes[names.LEG], span.attributes[names.TRANSFER_ID]) == (name, TRANSFER)
    assert (span.parent_id, span.attributes[names.OUTPUT_TOKENS]) == (PARENT_ID, num_tokens)


def test_a_continued_stream_says_what_it_goes_on_from(collected: Collector) -> None:
    async def check(site: Site) -> None:
        script = script_of(TEXT)[:4]
        body = site.fields(CHAT, max_tokens=8)
        assert (await site.send(CHAT, body, shown(len(script), 1), pack_tokens(script))).status_code == 200

    (span,) = run(collected, check)
    assert (span.attributes[names.RESUMED_TOKENS], span.attributes[names.OUTPUT_TOKENS]) == (4, 4)


def test_the_wait_for_kv_is_told(collected: Collector) -> None:
    async def check(site: Site) -> None:
        site.engine.generate = waited  # type: ignore[method-assign]
        assert (await site.http.post(CHAT, content=site.fields(CHAT))).status_code == 200

    async def waited(asked: Generation) -> Chunks:
        yield 0, Chunk("a", [1], num_cached_tokens=4, waits=Waits(1.0, 2.0, 0.25))
        yield 0, Chunk("b", [2], finish_reason="stop")

    (span,) = run(collected, check)
    assert span.attributes[names.KV_WAIT_S] == 0.25
    assert (span.attributes[names.CACHED_TOKENS], span.attributes[names.FINISH_REASONS]) == (4, ["stop"])


def test_what_fails_says_how(collected: Collector) -> None:
    async def check(site: Site) -> None:
        assert (await site.http.post(CHAT, content=b"{}")).status_code == 400
        site.engine.generate = refuse  # type: ignore[method-assign]
        answer = await site.http.post(CHAT, content=site.fields(CHAT, stream=False))
        assert answer.status_code == 503

    async def refuse(*_: Any, **__: Any) -> Any:
        for chunk in list[Any]():
            yield chunk
        raise KVLoadFailed("It did not come.")

    mistake, lost = run(collected, check)
    assert (mistake.attributes[names.STATUS], mistake.failure, mistake.events) == (400, None, [])
    assert (lost.attributes[names.STATUS], lost.failure, lost.events) == (503, "KVLoadFailed", [names.QUEUED])
    assert (lost.attributes[names.OUTPUT_TOKENS], lost.attributes[names.FINISH_REASONS]) == (0, [])


def test_only_generation_is_traced_and_only_what_is_sampled(collected: Collector) -> None:
    async def check(site: Site) -> None:
        for path in ("/readyz", "/metrics", "/v1/models", "/nowhere"):
            await site.http.get(path, headers=CONTEXT)
        await site.http.post("/tokenize", content=b'{"model":"m","prompt":"a"}', headers=CONTEXT)
        body = site.fields(CHAT, stream=False, max_tokens=2)
        assert (await site.http.post(CHAT, content=body)).status_code == 200

    assert run(collected, check, sample=0.0) == []
    assert collected.requests == []


def test_settings_that_cannot_work_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["builtin://tiny", "--otlp-traces-endpoint", "https://c/mine", "--otlp-traces-sample", "0.25"]
    server = read_configuration(flags, {})[1]
    assert (server.otlp_traces_endpoint, server.otlp_traces_sample) == ("https://c/mine", 0.25)
    assert ServerConfig().otlp_traces_endpoint is None
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint is not an http:// or https:// URL"):
        ServerConfig(otlp_traces_endpoint="c:4317")
    with pytest.raises(ConfigError, match=r"otlp_traces_sample is 2\.0: give 0 to 1"):
        ServerConfig(otlp_traces_sample=2.0)
    monkeypatch.setitem(sys.modules, "pagefleet_protocol.otlp_traces", None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint needs .* pip install 'pagefleet-engine\[traces\]'"):
        make_engine_tracer(server, "m")

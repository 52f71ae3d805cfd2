"""Pods are asked, and nothing they answer can hurt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from pagefleet_operator.autoscale.fleet_numbers import parse_fleet_metrics
from pagefleet_operator.handlers.pod_http import MAX_ANSWER_BYTES, HttpPods
from pagefleet_operator.plan.kv_link import KvEngineSeen, read_kv_engine
from pagefleet_protocol.model_facts import Progress

METRICS = b"""# HELP pagefleet_router_fleet_engines Engines.
pagefleet_router_fleet_engines 2.0
pagefleet_router_fleet_requests_running 3
pagefleet_router_fleet_kv_usage_ratio 0.25 1700000000
pagefleet_router_fleet_generated_tokens_total NaN
pagefleet_router_fleet_engines{engine="x"} 9
pagefleet_router_fleet_requests_waiting many
pagefleet_router_requests_total 4
"""


def ask(answer: web.Response, question: Callable[[HttpPods], Awaitable[Any]]) -> tuple[Any, list[str]]:
    """Ask a pod that answers so; returns what came of it, and the paths that were asked for."""
    asked: list[str] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        asked.append(request.path)
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    async def scenario() -> Any:
        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pods = HttpPods(runner.addresses[0][1])
        try:
            return await question(pods)
        finally:
            await pods.close()
            await runner.cleanup()

    return asyncio.run(scenario()), asked


def test_a_download_tells_how_far_it_is() -> None:
    body = b'{"phase":"downloading","bytes_done":1,"bytes_total":2,"files_done":0,"files_total":1}'
    told, asked = ask(web.Response(body=body), lambda pods: pods.progress("127.0.0.1"))
    assert told == Progress("downloading", 1, 2, 0, 1)
    assert asked == ["/progress"]


def test_a_router_tells_what_its_fleet_does() -> None:
    told, asked = ask(web.Response(body=METRICS), lambda pods: pods.fleet_metrics("127.0.0.1"))
    assert asked == ["/metrics"]
    assert told == {
        "pagefleet_router_fleet_engines": 2.0,
        "pagefleet_router_fleet_requests_running": 3.0,
        "pagefleet_router_fleet_kv_usage_ratio": 0.25,
    }


FACTS = {
    "incarnation": "0" * 32,
    "model": "qwen",
    "scope": "s",
    "block_size": 16,
    "num_blocks": 9,
    "max_model_len": 99,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "vocab_size": 10,
}
KV = {"role": "decode", "port": 8102, "compatibility": "ab" * 32, "bytes_per_token": 64}
PEERS = b"""pagefleet_engine_kv_transfer_peers{state="alive"} 2.0
pagefleet_engine_kv_transfer_peers{model_name="m",state="dead"} 1
pagefleet_engine_kv_transfer_peers{state="late"} many
pagefleet_engine_kv_transfer_peers 7
"""


@pytest.mark.parametrize(
    ("facts", "metrics", "seen"),
    [
        (FACTS | {"kv_transfer": KV}, PEERS, KvEngineSeen("a", "decode", "ab" * 32, {"alive": 2, "dead": 1})),
        (FACTS | {"kv_transfer": KV}, None, KvEngineSeen("a", "decode", "ab" * 32)),
        (FACTS, PEERS, KvEngineSeen("a", "both", "")),
        (FACTS | {"kv_transfer": KV | {"port": 0}}, PEERS, None),
        (None, PEERS, None),
    ],
)
def test_what_an_engine_says_of_its_transfer(
    facts: dict[str, Any] | None, metrics: bytes | None, seen: KvEngineSeen | None
) -> None:
    assert read_kv_engine("a", json.dumps(facts).encode() if facts else None, metrics) == seen


def test_an_engine_is_asked_for_facts_and_metrics() -> None:
    body = json.dumps(FACTS | {"kv_transfer": KV}).encode()
    told, asked = ask(web.Response(body=body), lambda pods: pods.kv_engine("a", "127.0.0.1"))
    assert told == KvEngineSeen("a", "decode", "ab" * 32)
    assert sorted(asked) == ["/internal/v1/facts", "/metrics"]


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=500),
        web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
        web.Response(body=b"<html>"),
        web.Response(body=b'{"phase":"asleep"}'),
        web.Response(body=b" " * (MAX_ANSWER_BYTES + 2)),
    ],
)
def test_what_is_no_progress_is_none(answer: web.Response) -> None:
    told, asked = ask(answer, lambda pods: pods.progress("127.0.0.1"))
    assert told is None
    assert asked == ["/progress"]


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1", "no address"])
def test_a_pod_that_is_not_there_tells_nothing(ip: str) -> None:
    async def scenario() -> None:
        pods = HttpPods(1)
        assert await pods.progress(ip) is None
        assert await pods.fleet_metrics(ip) is None
        await pods.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "text", [b"", b"\xff\xfe", b"pagefleet_router_fleet_engines", b"pagefleet_router_fleet_engines inf"]
)
def test_what_is_no_metric_is_left_out(text: bytes) -> None:
    assert parse_fleet_metrics(text) == {}

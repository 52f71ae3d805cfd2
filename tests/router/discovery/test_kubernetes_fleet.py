"""A router that finds its engines through EndpointSlices: serving, readiness, addresses that change hands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from pagefleet_router.app import Router
from pagefleet_router.config import RouterConfig
from pagefleet_router.discovery.kubernetes import KubernetesSource, ServiceRef, WatchTiming
from pagefleet_router.discovery.slice_api import ApiAccess

from tests.fakes.faulty_engine import FAST_MONITOR, Behaviour, FaultyEngine, Fleet, chat, fleet, post, stream, whole
from tests.fakes.slice_server import Refusal, SliceServer, leaving, make_slice, pod, slice_server

EVENT = b'data: {"n": 1}\n\n'
FAST = WatchTiming(watch=60, silence=30, least=0.01, longest=0.05)
PREFIX_PROMPT = "w" * 2100


def run(folder: Path, scenario: Callable[[Fleet, SliceServer], Awaitable[None]], *behaviours: Behaviour) -> None:
    async def with_fleet() -> None:
        async with slice_server() as server, kubernetes_fleet(folder, server, *behaviours) as f:
            await scenario(f, server)

    uvloop.run(with_fleet())


@contextlib.asynccontextmanager
async def kubernetes_fleet(folder: Path, server: SliceServer, *behaviours: Behaviour) -> AsyncIterator[Fleet]:
    """Start engines that no slice names yet, and a router."""
    engines = [FaultyEngine(behave) for behave in behaviours]
    for engine in engines:
        await engine.start()
    config = RouterConfig(kubernetes_service="qwen-engine", model_name="m", model_alias=("gpt-4o", "o/n"), port=0)
    source = KubernetesSource(ApiAccess(server.url, None, None), ServiceRef("ns", "qwen-engine", "m"), FAST)
    made = Fleet(Router(config, None, FAST_MONITOR, source, rng=random.Random(0)), 0, engines, folder)
    try:
        async with made.router.running() as made.port:
            yield made
    finally:
        for client in made.clients:
            client.close()
        for engine in engines:
            await engine.kill()
        await asyncio.sleep(0.01)


def put(server: SliceServer, engine: FaultyEngine, *endpoints: dict[str, Any]) -> None:
    """Name an engine in a slice of its own: a slice has one port."""
    server.put(make_slice(f"s{engine.port}", *endpoints, port=engine.port))


async def answering(f: Fleet, times: int = 8) -> set[str]:
    """Return which engines answer."""
    return {(await f.ask(post(chat()))).headers["x-pagefleet-engine"] for _ in range(times)}


def test_requests_follow_the_pods(tmp_path: Path) -> None:
    async def scenario(f: Fleet, server: SliceServer) -> None:
        put(server, f.engines[0], pod("pod-a"))
        await f.until(lambda: f.num_usable() == 1)
        assert await answering(f) == {"pod-a"}
        put(server, f.engines[1], pod("pod-b"))
        await f.until(lambda: f.num_usable() == 2)
        put(server, f.engines[0], leaving("pod-a"))
        await f.until(lambda: f.num_usable() == 1)
        assert await answering(f) == {"pod-b"}
        assert (await f.get("/readyz")).json == {"status": "ready", "engines": 1}
        put(server, f.engines[1], pod("pod-b", ready=False))
        await f.until(lambda: f.num_usable() == 0)
        answer = await f.get("/readyz")
        assert (answer.status, answer.error["code"]) == (503, "no_engine_ready")

    run(tmp_path, scenario, whole(), whole())


def test_serving_does_not_need_the_api_server(tmp_path: Path) -> None:
    async def scenario(f: Fleet, server: SliceServer) -> None:
        put(server, f.engines[0], pod("pod-a"))
        await f.until(lambda: f.num_usable() == 1)
        await server.stop()
        client = await f.connect()
        for _ in range(20):
            await client.send(post(chat(stream=True)))
            assert (await client.answer()).body == EVENT * 3
            await asyncio.sleep(0.01)
        assert (await f.get("/readyz")).status == 200
        put(server, f.engines[0], pod("pod-b"))
        await server.start()
        await f.until(lambda: [one.id for one in f.router.table.snapshot.engines] == ["pod-b"])
        await f.until(lambda: f.num_usable() == 1)
        assert await answering(f) == {"pod-b"}

    run(tmp_path, scenario, stream([EVENT] * 3))


def test_a_stream_outlives_its_pods_endpoint(tmp_path: Path) -> None:
    async def scenario(f: Fleet, server: SliceServer) -> None:
        put(server, f.engines[0], pod("pod-a"))
        await f.until(lambda: f.num_usable() == 1)
        client = await f.connect()
        await client.send(post(chat(stream=True)))
        head = await client.head()
        put(server, f.engines[0], leaving("pod-a"))
        await f.until(lambda: f.num_usable() == 0)
        server.delete(f"s{f.engines[0].port}")
        await f.until(lambda: not f.router.table.snapshot.engines)
        answer = await client.rest(head)
        assert (answer.body, answer.cut) == (EVENT * 15, False)

    run(tmp_path, scenario, stream([EVENT] * 15, gap=0.02))


def test_a_router_that_never_saw_a_list_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(f: Fleet, server: SliceServer) -> None:
        server.refusal = Refusal(403)
        await f.until(lambda: "403" in (f.router.table.unlisted or ""))
        answer = await f.get("/readyz")
        assert (answer.status, answer.error["code"]) == (503, "no_engine_known")
        assert "may not list and watch endpointslices; give it a Role" in answer.error["message"]
        assert (await f.get("/livez")).status == 200, "a restart would not help"
        await f.until(lambda: len(server.seen) > 3)
        server.refusal = None
        await f.until(lambda: f.router.table.unlisted is None)
        assert (await f.get("/readyz")).error["code"] == "no_engine_ready", "the list is known, and it is empty"

    run(tmp_path, scenario)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1


def test_an_address_that_changes_hands_starts_afresh(tmp_path: Path) -> None:
    async def scenario(f: Fleet, server: SliceServer) -> None:
        put(server, f.engines[0], pod("old"))
        await f.until(lambda: f.num_usable() == 1)
        for _ in range(2):
            assert (await f.ask(post(chat(PREFIX_PROMPT)))).status == 200
        assert (hits := f.router.metrics.prefix_hits) > 0
        old = f.router.table.snapshot.engines[0]
        pool = f.router.pools.pool(old.endpoint.url)
        assert len(pool.idle) == 1
        f.router.table.set_ejected("old", True)
        put(server, f.engines[0], pod("new"))
        await f.until(lambda: f.num_usable() == 1)
        new = f.router.table.snapshot.engines[0]
        assert (new.id, new.endpoint.url, new.ejected) == ("new", old.endpoint.url, False)
        assert new.tally is not old.tally
        assert pool.closed, "connections to the old pod lead nowhere"
        assert (await f.ask(post(chat(PREFIX_PROMPT)))).headers["x-pagefleet-engine"] == "new"
        assert f.router.metrics.prefix_hits == hits, "the new pod has nothing cached"

    run(tmp_path, scenario, whole())


def test_aliases_lead_to_the_same_engines_and_bodies_stay_as_they_came(tmp_path: Path) -> None:
    async def scenario(f: Fleet, server: SliceServer) -> None:
        assert (await f.get("/v1/models")).json["data"] == [], "nothing is promised before there is an engine"
        put(server, f.engines[0], pod("pod-a"))
        await f.until(lambda: f.num_usable() == 1)
        assert [one["id"] for one in (await f.get("/v1/models")).json["data"]] == ["m", "gpt-4o", "o/n"]
        for name in ("m", "gpt-4o", "o/n"):
            assert (await f.get(f"/v1/models/{name}")).json["id"] == name
            body = b'{ "messages": [{"role":"user","content":"%b"}],\n "model":"%b" }' % (b"w" * 2100, name.encode())
            assert (await f.ask(post(body))).status == 200
            assert f.engines[0].seen[-1].body == body
        assert f.router.metrics.prefix_hits == 2 * 512, "a prompt is cached whatever name it came with"
        answer = await f.ask(post({**chat(), "model": "gpt-4"}))
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")

    run(tmp_path, scenario, whole())


def test_a_model_comes_before_an_alias_of_its_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), model_name="m", model_alias=("gpt-4o", "m")) as f:
            assert f.router.table.snapshot.names == ("m", "gpt-4o")
            assert (await f.ask(post({**chat(), "model": "gpt-4o"}))).status == 200
            assert (await f.ask(post({"prompt": "x"}, "/v1/completions"))).status == 200, "one model needs no name"

    uvloop.run(scenario())


def figures(running: float, waiting: float, usage: float, tokens: float | None) -> str:
    lines = [f"requests_running {running}", f"requests_waiting {waiting}", f"kv_usage_ratio {usage}"]
    lines += [] if tokens is None else [f"generation_tokens_total {tokens}"]
    return "".join(f"pagefleet_engine_{line}\n" for line in lines)


async def fleet_figures(f: Fleet) -> tuple[float, ...]:
    """Return engines, running, waiting, KV usage and tokens of the fleet."""
    found: dict[str, float] = {}
    for line in (await f.get("/metrics")).body.decode().splitlines():
        if line.startswith("pagefleet_router_fleet_"):
            name, _, value = line.partition(" ")
            found[name.removeprefix("pagefleet_router_fleet_")] = float(value)
    names = ("engines", "requests_running", "requests_waiting", "kv_usage_ratio", "generated_tokens_total")
    return tuple(found[name] for name in names)


async def until_figures(f: Fleet, *expected: float) -> None:
    seen: tuple[float, ...] = ()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while (seen := await fleet_figures(f)) != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert seen == expected


def test_figures_of_the_whole_fleet(tmp_path: Path) -> None:
    async def scenario(f: Fleet, server: SliceServer) -> None:
        a, b = f.engines
        await until_figures(f, 0, 0, 0, 0, 0)
        a.metrics, b.metrics = figures(3, 1, 0.5, 1000), figures(2, 4, 0.25, 50)
        put(server, a, pod("pod-a"))
        put(server, b, pod("pod-b"))
        await until_figures(f, 2, 5, 5, 0.375, 0)
        a.metrics = figures(3, 1, 0.5, 1100)
        await until_figures(f, 2, 5, 5, 0.375, 100)
        b.metrics = figures(2, 4, 0.25, 20)
        await until_figures(f, 2, 5, 5, 0.375, 120)
        b.ready = 503
        await f.until(lambda: f.num_usable() == 1)
        b.metrics = figures(1, 0, 0.25, 30)
        await until_figures(f, 2, 4, 1, 0.375, 130)
        await b.kill()
        await until_figures(f, 1, 3, 1, 0.5, 130)
        put(server, a)
        await until_figures(f, 0, 0, 0, 0, 130)
        a.metrics = figures(0, 0, 0, 5000)
        put(server, a, pod("pod-a"))
        await until_figures(f, 1, 0, 0, 0, 130)
        a.metrics = figures(1, 0, 0, None)
        await until_figures(f, 1, 1, 0, 0, 130)

    run(tmp_path, scenario, whole(), whole())

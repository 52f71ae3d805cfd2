"""The gate of a real router: waiting, holding, limits, storms. Engines are programmed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, encode_facts
from pagefleet_router.admission.model_gate import RAMP_FIRST

from tests.fakes.faulty_engine import Answer, Behaviour, FaultyEngine, Fleet, Seen, chat, fleet, post, whole

CAPACITY = 9
"""Of an engine that runs one request at once: eight more stand ready there."""
SMALL = EngineFacts(
    incarnation="1" * 32, model="m", scope="s", block_size=16, num_blocks=100, max_model_len=256, max_num_seqs=1,
    max_num_batched_tokens=512, vocab_size=300,
)  # fmt: skip


class Gated:
    """An engine's behaviour: answers wait until the test opens."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.num_open = self.most_open = 0

    async def __call__(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self.opened.wait()
            await whole()(seen, writer)
        finally:
            self.num_open -= 1


def run(
    folder: Path, scenario: Callable[[Fleet], Awaitable[None]], *behaviours: Behaviour, **settings: Any
) -> None:  # fmt: skip
    async def with_fleet() -> None:
        async with fleet(folder, *behaviours, **settings) as f:
            await scenario(f)

    uvloop.run(with_fleet())


async def make_small(f: Fleet) -> None:
    """Let the engines say that they run one request at once."""
    for engine in f.engines:
        engine.incarnation = SMALL.incarnation
        engine.internal[FACTS_PATH] = encode_facts(SMALL)
    await f.until(lambda: all(one.facts == SMALL for one in f.router.table.snapshot.engines))


async def add_engine(f: Fleet, behave: Behaviour) -> FaultyEngine:
    """Start an engine and list it."""
    engine = FaultyEngine(behave)
    await engine.start()
    f.engines.append(engine)
    f.write_endpoints(*(Endpoint(f"e{i}", one.url, "m") for i, one in enumerate(f.engines)))
    return engine


def ask_many(f: Fleet, num: int) -> list[asyncio.Task[Answer]]:
    return [asyncio.create_task(f.ask(post(chat()))) for _ in range(num)]


def test_requests_beyond_the_engines_room_wait_and_beyond_the_queue_are_429(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        gated = f.engines[0].behave = Gated()
        await make_small(f)
        asked = ask_many(f, CAPACITY + 2)
        await f.until(lambda: gated.num_open == CAPACITY and f.router.gate.num_waiting == 2)
        refused = await f.ask(post(chat()))
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert refused.error["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        text = (await f.get("/metrics")).body
        assert b'pagefleet_router_requests_queued{model="m"} 2.0' in text
        assert b'pagefleet_router_admission_refusals_total{code="queue_full"} 1.0' in text
        gated.opened.set()
        assert {(await one).status for one in asked} == {200}
        assert gated.most_open == CAPACITY
        assert b"pagefleet_router_admission_wait_seconds_count 2.0" in (await f.get("/metrics")).body
        f.router.gate.check_integrity()

    run(tmp_path, scenario, whole(), queue_size=2)


def test_a_waiting_client_that_leaves_makes_room_for_another(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        gated = f.engines[0].behave = Gated()
        await make_small(f)
        asked = ask_many(f, CAPACITY)
        await f.until(lambda: gated.num_open == CAPACITY)
        client = await f.connect()
        await client.send(post(chat()))
        await f.until(lambda: f.router.gate.num_waiting == 1)
        client.close()
        await f.until(lambda: f.router.gate.num_waiting == 0)
        asked += ask_many(f, 1)
        await f.until(lambda: f.router.gate.num_waiting == 1)
        gated.opened.set()
        assert {(await one).status for one in asked} == {200}
        assert len(f.engines[0].seen) == CAPACITY + 1

    run(tmp_path, scenario, whole(), queue_size=1)


def test_a_request_that_waits_too_long_is_429(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        gated = f.engines[0].behave = Gated()
        await make_small(f)
        asked = ask_many(f, CAPACITY)
        await f.until(lambda: gated.num_open == CAPACITY)
        refused = await f.ask(post(chat()))
        assert (refused.status, refused.error["code"]) == (429, "queue_timeout")
        gated.opened.set()
        assert {(await one).status for one in asked} == {200}

    run(tmp_path, scenario, whole(), queue_timeout=0.1)


def test_a_model_without_engines_is_known_and_its_requests_are_held(tmp_path: Path) -> None:
    """F18: of a herd that comes before the first engine, as many as may wait are held, and none of them is lost."""

    async def scenario(f: Fleet) -> None:
        await f.until(lambda: f.router.table.unlisted is None)
        ready = await f.get("/readyz")
        assert (ready.status, ready.json) == (200, {"status": "ready", "engines": 0})
        assert [card["id"] for card in (await f.get("/v1/models")).json["data"]] == ["m", "alias"]
        asked = ask_many(f, 40)
        await f.until(lambda: f.router.gate.num_waiting == 40)
        refused = await f.ask(post(chat()))
        assert (refused.status, refused.error["code"]) == (503, "no_engine_ready")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await f.ask(post({**chat(), "model": "other"}))).status == 404
        text = (await f.get("/metrics")).body
        assert b'pagefleet_router_requests_held{model="m"} 40.0' in text
        assert b'pagefleet_router_requests_queued{model="m"} 0.0' in text
        gated = Gated()
        await add_engine(f, gated)
        await f.until(lambda: gated.num_open >= RAMP_FIRST)
        gated.opened.set()
        assert {(await one).status for one in asked} == {200}

    settings = {"cold_start_timeout": 600.0, "model_name": "m", "model_alias": ("alias",), "queue_size": 40}
    run(tmp_path, scenario, **settings)


def test_a_model_is_remembered_when_its_last_engine_goes(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        assert (await f.ask(post(chat()))).status == 200
        f.write_endpoints()
        await f.until(lambda: not f.router.table.snapshot.engines)
        asked = ask_many(f, 1)
        await f.until(lambda: f.router.gate.num_waiting == 1)
        f.write_endpoints(Endpoint("e0", f.engines[0].url, "m"))
        assert (await asked[0]).status == 200

    run(tmp_path, scenario, whole(), cold_start_timeout=600.0)


def test_without_holding_nobody_waits_for_engines(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        await f.until(lambda: f.router.table.unlisted is None)
        assert (await f.get("/readyz")).status == 503
        refused = await f.ask(post(chat()))
        assert (refused.status, refused.error["code"]) == (503, "no_engine_ready")

    run(tmp_path, scenario, model_name="m")


def test_holding_ends_with_503_when_no_engine_comes(tmp_path: Path) -> None:
    async def scenario(f: Fleet) -> None:
        await f.until(lambda: f.router.table.unlisted is None)
        refused = await f.ask(post(chat()))
        assert (refused.status, refused.error["code"]) == (503, "no_engine_ready")
        assert int(refused.headers["retry-after"]) >= 1

    run(tmp_path, scenario, model_name="m", cold_start_timeout=0.1)


def test_limits_and_keys_change_with_the_file(tmp_path: Path) -> None:
    """F41: keys are rotated without a restart, old and new beside each other; so are their limits."""
    keys = tmp_path / "keys"
    keys.write_text("old tenant=t rpm=2\n")

    async def ask(f: Fleet, key: str) -> Answer:
        return await f.ask(post(chat(), headers=f"authorization: Bearer {key}\r\n"))

    async def until_status(f: Fleet, key: str, status: int) -> None:
        async with asyncio.timeout(60):
            while (await ask(f, key)).status != status:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def scenario(f: Fleet) -> None:
        assert [(await ask(f, "old")).status for _ in range(2)] == [200, 200]
        refused = await ask(f, "old")
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        keys.write_text("old tenant=t rpm=1000\nnew tenant=t rpm=1000\n")
        await until_status(f, "new", 200)
        assert (await ask(f, "old")).status == 200
        keys.write_text("new tenant=t rpm=1000\n")
        await until_status(f, "old", 401)
        assert (await ask(f, "new")).status == 200

    run(tmp_path, scenario, whole(), api_key_file=keys)


@pytest.mark.parametrize("num_engines", [1, 3])
def test_a_retry_storm_stays_within_the_budget_and_ends_with_its_cause(tmp_path: Path, num_engines: int) -> None:
    """F17: every engine answers 503 to all; what engines get beyond what clients sent is bounded."""

    async def scenario(f: Fleet) -> None:
        offered = 300
        for _ in range(offered // 50):
            answers = await asyncio.gather(*ask_many(f, 50))
            assert {answer.status for answer in answers} <= {502, 503}
            assert all("error" in answer.json for answer in answers)
        assert sum(len(engine.seen) for engine in f.engines) <= 1.2 * offered + 20
        for engine in f.engines:
            engine.behave = whole()
        async with asyncio.timeout(60):
            while {answer.status for answer in await asyncio.gather(*ask_many(f, 10))} != {200}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert f.router.gate.num_waiting == 0
        assert all(gate.num_in == 0 for gate in f.router.gate.gates.values())

    run(tmp_path, scenario, *[whole(503, b'{"error":{}}')] * num_engines)

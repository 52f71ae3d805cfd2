"""The real router before real prefill and decode engines with the embedded model: every answer is known by heart."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.fleet_key import FleetKey

from tests.fakes.faulty_engine import post
from tests.fakes.kv_serving import ServedEngine
from tests.fakes.route_process import RouteProcess, route_process, until, write_endpoints
from tiny.dataset import Exchange, load_knowledge

pytestmark = pytest.mark.fleet
KEY = FleetKey(b"k" * 40)
MOST = 240
"""Questions until a router has to have split one: it does so by cost, and this machine may have other things to do."""


@dataclass
class Engines:
    folder: Path
    prefill: ServedEngine
    decode: ServedEngine


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("pairs")
    key_file = folder / "fleet-key"
    key_file.write_bytes(KEY.secret)
    prefill = ServedEngine(folder / "p0.log", key_file, "prefill")
    started = [prefill]
    try:
        prefill.started()
        assert prefill.facts.kv_transfer is not None
        peers = f"127.0.0.1:{prefill.facts.kv_transfer.port}"
        started.append(ServedEngine(folder / "d0.log", key_file, "decode", ["--kv-peers", peers]))
        started[1].started()
        yield Engines(folder, *started)
    finally:
        for engine in started:
            engine.stop()


def questions() -> Sequence[Exchange]:
    return sorted(load_knowledge().exchanges(), key=lambda one: -len(str(one.messages)))[:60]


async def ask(router: RouteProcess, exchange: Exchange) -> None:
    """Ask something that nobody has cached, and check the answer."""
    body = {"model": "tiny", "messages": list(exchange.messages), "temperature": 0, "cache_salt": secrets.token_hex(8)}
    answer = await router.ask(post(body, headers="content-type: application/json\r\n"))
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["message"]["content"] == exchange.answer


def flags(engines: Engines) -> list[str]:
    file = engines.folder / "endpoints.json"
    write_endpoints(file, Endpoint("p0", engines.prefill.url, "tiny"), Endpoint("d0", engines.decode.url, "tiny"))
    key = str(engines.folder / "fleet-key")
    return ["--endpoints-file", str(file), "--fleet-key-file", key, "--pd-threshold", "16", "--access-log"]


def test_prompts_computed_elsewhere_are_answered_by_heart(engines: Engines) -> None:
    async def scenario() -> None:
        async with route_process(*flags(engines)) as router:
            await router.until_ready(2)
            before, asked = engines.decode.figure("received_blocks_total"), 0

            async def is_split() -> bool:
                """Whether K/V came, of a prompt whose end was heard of before the answer's first byte."""
                received = engines.decode.figure("received_blocks_total") > before
                return received and await router.metric("pd_handover_seconds_count") > 0

            while not await is_split():
                assert asked < MOST, "no prompt was computed elsewhere"
                batch = [questions()[number % 60] for number in range(asked, asked + 12)]
                await asyncio.gather(*(ask(router, exchange) for exchange in batch))
                asked += len(batch)
            assert await router.metric("pd_requests_total", choice="remote") > 0
        await until(lambda: engines.decode.at_baseline and engines.prefill.at_baseline)

    asyncio.run(scenario())


def test_a_prefill_engine_that_dies_costs_no_answer(engines: Engines) -> None:
    async def scenario() -> None:
        async with route_process(*flags(engines)) as router:
            await router.until_ready(2)
            asking = [asyncio.ensure_future(ask(router, exchange)) for exchange in questions()[:24]]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            engines.prefill.kill()
            await asyncio.gather(*asking)
            await asyncio.gather(*(ask(router, exchange) for exchange in questions()[24:36]))
        await until(lambda: engines.decode.at_baseline)

    asyncio.run(scenario())
    assert engines.decode.is_alive

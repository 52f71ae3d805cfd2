"""Endpoints that are not what the list says (F16), and lists that nobody should have written: a router's process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from pagefleet_protocol.endpoints import Endpoint, encode_endpoints
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, encode_facts

from tests.fakes.faulty_engine import FaultyEngine, whole
from tests.fakes.kv_publisher import KvPublisher, publishing
from tests.fakes.route_process import ProgrammedFleet, programmed_fleet, replace_file, until, write_endpoints

pytestmark = pytest.mark.fleet
FACTS = EngineFacts(
    incarnation="1" * 32, model="m", scope="s", block_size=16, num_blocks=1000, max_model_len=256, max_num_seqs=8,
    max_num_batched_tokens=512, vocab_size=300,
)  # fmt: skip
OURS = whole(200, b"ours", "x-pagefleet-model: m\r\n")


def run(folder: Path, check: Callable[[ProgrammedFleet], Awaitable[None]], num_engines: int = 2) -> None:
    async def scenario() -> None:
        async with programmed_fleet(folder, [OURS] * num_engines, "--policy", "round-robin") as fleet:
            await check(fleet)

    asyncio.run(scenario())


def test_an_address_that_passed_to_an_engine_of_another_model_gets_nothing(tmp_path: Path) -> None:
    """F16: what a stranger answers reaches nobody; the address counts again when the right engine is back."""

    async def check(fleet: ProgrammedFleet) -> None:
        old = fleet.engines[0]
        await old.kill()
        strange = FaultyEngine(whole(200, b"a secret of theirs", "x-pagefleet-model: other\r\n"))
        strange.internal[FACTS_PATH] = encode_facts(msgspec.structs.replace(FACTS, model="other", incarnation="2" * 32))
        strange.incarnation, strange.port = "2" * 32, old.port
        await strange.start()
        try:
            for _ in range(10):
                answers = await fleet.router.ask_many(6)
                assert {(answer.status, answer.body) for answer in answers} == {(200, b"ours")}

            async def is_found_out() -> bool:
                return await fleet.router.num_in_state("ready") == 1

            await until(is_found_out)
            await until(lambda: any("answers for another model, 'other'" in line for line in fleet.router.log))
        finally:
            await strange.kill()
        await old.start()
        await fleet.router.until_ready(2)
        assert {answer.status for answer in await fleet.router.ask_many(6)} == {200}

    run(tmp_path, check)


def test_another_incarnation_at_the_same_address_has_nothing_of_the_old_ones_cache(tmp_path: Path) -> None:
    """F16: what the old one said of its cache is forgotten with it, and what the new one says counts."""

    async def check(fleet: ProgrammedFleet, publisher: KvPublisher) -> None:
        (engine,) = fleet.engines

        def introduce() -> None:
            facts = msgspec.structs.replace(FACTS, incarnation=publisher.incarnation, kv_events_port=publisher.port)
            engine.internal[FACTS_PATH] = encode_facts(facts)
            engine.incarnation = publisher.incarnation

        async def knows(blocks: int) -> bool:
            live = await fleet.router.metric("kv_engines_followed")
            return live == 1 and await fleet.router.metric("kv_blocks") == blocks

        introduce()
        publisher.tell(range(300))
        await until(lambda: knows(300))
        publisher.restart()
        publisher.tell([1, 2])
        introduce()
        await until(lambda: knows(2))
        publisher.tell([3])
        await until(lambda: knows(3))
        assert (await fleet.router.ask()).status == 200

    async def with_publisher(fleet: ProgrammedFleet) -> None:
        async with publishing(KvPublisher(random.Random(0))) as publisher:
            await check(fleet, publisher)

    run(tmp_path, with_publisher, num_engines=1)


def test_lists_that_cannot_be_meant_change_nothing(tmp_path: Path) -> None:
    async def check(fleet: ProgrammedFleet) -> None:
        ours = [Endpoint(f"e{i}", engine.url, "m") for i, engine in enumerate(fleet.engines)]
        stranger = FaultyEngine(whole(200, b"theirs"))
        await stranger.start()
        theirs = Endpoint("x", stranger.url, "m")
        whole_file = encode_endpoints((*ours, theirs))
        wrong = {
            "cut": whole_file[:-5],
            "empty": b"",
            "no UTF-8": whole_file.replace(b'"x"', b'"\xff"'),
            "twice": encode_endpoints((*ours, msgspec.structs.replace(theirs, id="e0"))),
            "another version": whole_file.replace(b'"version": 1', b'"version": 9'),
            "more fields": whole_file.replace(b'"version": 1', b'"version": 1, "also": 1'),
            "no URL": encode_endpoints((*ours, msgspec.structs.replace(theirs, url="file:///etc/passwd"))),
            "a path": encode_endpoints((*ours, msgspec.structs.replace(theirs, url=stranger.url + "/v1?a=b"))),
            "credentials": encode_endpoints((*ours, msgspec.structs.replace(theirs, url="http://u:p@127.0.0.1:80"))),
            "a header in an id": encode_endpoints((*ours, msgspec.structs.replace(theirs, id="x\r\nset-cookie: a"))),
            "deep": b"[" * 100_000,
        }
        try:
            for name, content in wrong.items():
                fleet.router.log.clear()
                replace_file(fleet.file, content)
                await until(lambda: any("the last list stays in force" in line for line in fleet.router.log))
                assert all(len(line) < 2000 for line in fleet.router.log), name
                answers = await fleet.router.ask_many(4)
                assert {(answer.status, answer.body) for answer in answers} == {(200, b"ours")}, name
            assert stranger.num_asked.total() + len(stranger.seen) == 0
            replace_file(fleet.file, whole_file)
            await fleet.router.until_ready(3)
        finally:
            await stranger.kill()

    run(tmp_path, check)


def test_a_router_among_its_own_engines_gets_nothing(tmp_path: Path) -> None:
    """Or each request would come back to it, for ever."""

    async def check(fleet: ProgrammedFleet) -> None:
        (engine,) = fleet.engines
        itself = f"http://127.0.0.1:{fleet.router.port}"
        write_endpoints(fleet.file, Endpoint("e0", engine.url, "m"), Endpoint("e1", itself, "m"))
        await until(lambda: any("a router answers there" in line for line in fleet.router.log))
        answers = [await fleet.router.ask() for _ in range(12)]
        assert {answer.headers["x-pagefleet-engine"] for answer in answers} == {"e0"}
        assert len(engine.seen) == 12
        assert await fleet.router.metric("arrivals_total") == 12, "each came once"

    run(tmp_path, check, num_engines=1)

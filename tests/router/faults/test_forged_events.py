"""An engine that lies about its cache costs the others nothing: a router's process between a liar and an honest one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, encode_facts
from pagefleet_protocol.kv_events import (
    MAX_BATCH_BYTES,
    TOPIC,
    Cleared,
    Done,
    DumpPart,
    EventBatch,
    Removed,
    Stored,
    encode,
    pack_keys,
)

from tests.fakes.faulty_engine import FaultyEngine, whole
from tests.fakes.kv_publisher import KvPublisher, block, publishing
from tests.fakes.lying_publisher import LyingPublisher
from tests.fakes.route_process import ProgrammedFleet, programmed_fleet, until

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc"),
]
LIAR, OTHER = "a" * 32, "b" * 32
HONEST_BLOCKS = 300
MOST_MB = 700
"""That a router may grow by for an engine that claims room for everything: two million blocks are kept of it."""


def introduce(engine: FaultyEngine, incarnation: str, port: int, num_blocks: int) -> None:
    facts = EngineFacts(
        incarnation=incarnation, model="m", scope="s", block_size=16, num_blocks=num_blocks, max_model_len=256,
        max_num_seqs=64, max_num_batched_tokens=512, vocab_size=300, kv_events_port=port,
    )  # fmt: skip
    engine.internal[FACTS_PATH] = encode_facts(facts)
    engine.incarnation = incarnation


def private_mb(pid: int) -> float:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "VmSwap")) / 1024


def random_keys(size: int) -> bytes:
    return os.urandom(size // 8 * 8)


@contextlib.asynccontextmanager
async def beside_a_liar(
    folder: Path, liar: LyingPublisher, num_blocks: int = 10**15
) -> AsyncIterator[tuple[ProgrammedFleet, KvPublisher]]:
    """Start both; at the end the honest engine's events are followed as before, and all requests were answered."""
    async with (
        publishing(KvPublisher(random.Random(0))) as honest,
        programmed_fleet(folder, [whole(), whole()], "--policy", "round-robin") as fleet,
    ):
        introduce(fleet.engines[1], honest.incarnation, honest.port, 1000)
        honest.tell(range(HONEST_BLOCKS))
        await until(lambda: followed(fleet, HONEST_BLOCKS))
        before = private_mb(fleet.router.process.pid)
        with liar:
            introduce(fleet.engines[0], LIAR, liar.port, num_blocks)
            yield fleet, honest
            assert (await fleet.router.get("/livez")).status == 200
            assert {answer.status for answer in await fleet.router.ask_many(20)} == {200}
            assert min(fleet.shares) > 0, "its requests are another matter"
            assert private_mb(fleet.router.process.pid) - before < MOST_MB
        honest.tell(removed=range(HONEST_BLOCKS - 2))
        fleet.list_engines("http://127.0.0.1:9", fleet.engines[1].url)
        await until(lambda: followed(fleet, 2))


async def followed(fleet: ProgrammedFleet, blocks: int) -> bool:
    counts = [await fleet.router.metric(f"kv_{name}") for name in ("engines_followed", "blocks")]
    return counts == [1, blocks]


def endless_dump() -> Iterator[bytes]:
    while True:
        yield encode(DumpPart(LIAR, 5, random_keys(128 * 1024)))


def dump_that_begins_anew() -> Iterator[bytes]:
    for number in itertools.count():
        yield encode(DumpPart(LIAR, number, random_keys(128 * 1024)))


def test_a_dump_without_end_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with beside_a_liar(tmp_path, LyingPublisher(lambda: iter(()), endless_dump)) as (fleet, _):

            async def given_up() -> bool:
                assert (await fleet.router.get("/livez")).status == 200
                assert (await fleet.router.ask()).status == 200
                return any("claims more blocks than it has" in line for line in fleet.router.log)

            await until(given_up, 120)

    asyncio.run(scenario())


def test_a_dump_that_begins_anew_for_ever_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        liar = LyingPublisher(lambda: iter(()), dump_that_begins_anew)
        async with beside_a_liar(tmp_path, liar) as (fleet, _):

            async def has_gone_on() -> bool:
                assert (await fleet.router.ask()).status == 200
                return liar.num_answered > 300 or "claims more blocks" in "".join(fleet.router.log)

            await until(has_gone_on, 120)

    asyncio.run(scenario())


def no_end(rng: random.Random) -> Iterator[list[bytes]]:
    """Batches of every wrong kind."""
    kinds: list[Callable[[], bytes]] = [
        lambda: encode(EventBatch(LIAR, rng.choice([-(2**63), 2**64 - 1, 0, 7, 5, 3]), [Stored(random_keys(800))])),
        lambda: encode(EventBatch(OTHER, 1, [Stored(random_keys(800))])),
        lambda: encode(EventBatch("x" * 500_000, 1, [])),
        lambda: encode(EventBatch(LIAR, 6, [Cleared()] * 200_000)),
        lambda: encode(EventBatch(LIAR, 6, [Stored(b"1234567")])),
        lambda: encode(EventBatch(LIAR, rng.randrange(10**6), [Removed(pack_keys(map(block, range(HONEST_BLOCKS))))])),
        lambda: encode(EventBatch(LIAR, rng.randrange(10**6), [Stored(pack_keys(map(block, range(HONEST_BLOCKS))))])),
        lambda: encode(DumpPart(LIAR, 1, random_keys(800))),
        lambda: rng.randbytes(rng.randrange(2000)),
        lambda: b"\x94" * 100_000,
        lambda: msgspec.msgpack.encode(["b", LIAR, 1, [["s", "text"]]]),
        lambda: msgspec.msgpack.encode({"incarnation": LIAR}),
        lambda: rng.randbytes(MAX_BATCH_BYTES - 100),
    ]
    while True:
        data = rng.choice(kinds)()
        yield rng.choice(
            [[TOPIC, data], [TOPIC, data], [TOPIC, data], [TOPIC], [TOPIC, data, data], [TOPIC + b"x", data]]
        )


def test_batches_of_every_wrong_kind_are_counted_and_change_nothing_for_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        rng = random.Random(3)
        liar = LyingPublisher(lambda: no_end(rng), lambda: iter([encode(Done(LIAR, rng.choice([0, 5, 2**64 - 1])))]))
        async with beside_a_liar(tmp_path, liar, num_blocks=2000) as (fleet, honest):

            async def dropped_many() -> bool:
                assert (await fleet.router.get("/livez")).status == 200
                assert (await fleet.router.ask()).status == 200
                return await fleet.router.metric("kv_events_dropped_total") > 200

            await until(dropped_many, 120)
            assert honest.num_questions <= 2, "its events are followed all the time"

    asyncio.run(scenario())

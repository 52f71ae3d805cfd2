"""Routers that follow an engine's events over real sockets: they converge without talking to each other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
import zmq
from pagefleet_kv.config import KvEventsConfig
from pagefleet_kv.events.publisher import KvEventPublisher
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import CacheFacts
from pagefleet_protocol.fleet_key import FleetKey, read_fleet_key
from pagefleet_protocol.kv_events import TOPIC, EventBatch, Stored, encode, pack_keys, routing_key
from pagefleet_router.engines.endpoints import EndpointTable, cache_id
from pagefleet_router.events.fleet_caches import EventSubscriptions
from pagefleet_router.prefix.exact import ExactIndex

from tests.fakes.free_ports import free_ports
from tests.fakes.kv_publisher import KvPublisher, block, publishing
from tests.router.signals.test_engine_facts import facts

NUM_BLOCKS = 400


@dataclass
class Follower:
    """The part of a router that follows events."""

    key: FleetKey | None = None
    table: EndpointTable = field(default_factory=EndpointTable)
    index: ExactIndex = field(default_factory=ExactIndex)
    live: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.subscriptions = EventSubscriptions(self.table, self.index, self.live.__setitem__, self.key)

    def know(self, incarnation: str, port: int, num_blocks: int = NUM_BLOCKS, host: str = "127.0.0.1") -> None:
        if self.table.engine("e") is None:
            self.table.replace([Endpoint("e", f"http://{host}:1", "m")])
        self.table.set_facts("e", facts(incarnation, kv_events_port=port, num_blocks=num_blocks))

    def known(self) -> set[int]:
        return {n for n in range(NUM_BLOCKS) if self.index.match(["e"], [routing_key(block(n))]) == [1]}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def run(
    check: Callable[[KvPublisher, Sequence[Follower]], Awaitable[None]], loss: float = 0.0, num_followers: int = 1
) -> None:
    async def scenario() -> None:
        followers = [Follower() for _ in range(num_followers)]
        try:
            async with publishing(KvPublisher(random.Random(0), loss)) as publisher:
                await check(publisher, followers)
        finally:
            for follower in followers:
                await follower.subscriptions.stop()

    uvloop.run(scenario())


def test_two_routers_end_with_what_the_engine_has() -> None:
    async def check(publisher: KvPublisher, followers: Sequence[Follower]) -> None:
        rng = random.Random(1)
        for incarnation in range(2):
            for follower in followers:
                follower.know(publisher.incarnation, publisher.port)
            for _ in range(40):
                some, others = rng.sample(range(NUM_BLOCKS), 40), rng.sample(range(NUM_BLOCKS), 30)
                publisher.tell(some, others, cleared=rng.random() < 0.05)
                await asyncio.sleep(0.005)
            await until(lambda: all(one.live.get("e", False) and one.known() == publisher.cached for one in followers))
            assert publisher.cached, "there was something to agree about"
            publisher.lose()
            await until(lambda: all(one.known() == publisher.cached for one in followers))
            if not incarnation:
                publisher.restart()
                publisher.tell([1, 2, 3])
        for follower in followers:
            follower.index.check_integrity()
        assert all(one.subscriptions.counts.num_gaps for one in followers), "batches were lost on the way"

    run(check, loss=0.3, num_followers=2)


def test_each_data_rank_is_followed_and_all_of_them_end_together() -> None:
    """Each has its own numbers, gaps and answers; a rank that dies takes its engine with it."""

    async def scenario() -> None:
        follower = Follower()
        publishers = KvPublisher(random.Random(2), 0.3), KvPublisher(random.Random(3))
        async with publishing(publishers[0]) as one, publishing(publishers[1]) as other:
            other.restart()  # another incarnation than the first one's
            other.tell(range(300, 310))

            def know(*told: tuple[str, KvPublisher]) -> None:
                caches = tuple(
                    CacheFacts(incarnation=incarnation, num_blocks=NUM_BLOCKS, kv_events_port=publisher.port)
                    for incarnation, publisher in told
                )
                both = facts(caches[0].incarnation, num_blocks=2 * NUM_BLOCKS, data_ranks=caches)
                follower.table.set_facts("e", both)

            def has(rank: int) -> set[int]:
                name = cache_id("e", rank)
                return {n for n in range(NUM_BLOCKS) if follower.index.match([name], [routing_key(block(n))]) == [1]}

            follower.table.replace([Endpoint("e", "http://127.0.0.1:1", "m")])
            know((one.incarnation, one), (other.incarnation, other))
            for number in range(0, 200, 10):
                one.tell(range(number, number + 10), range(number - 40, number - 30))
                await asyncio.sleep(0.005)
            await until(lambda: has(0) == one.cached and has(1) == other.cached)
            one.lose()
            both = {cache_id("e", 0): True, cache_id("e", 1): True}
            await until(lambda: has(0) == one.cached and follower.live == both)
            assert follower.subscriptions.counts.num_gaps, "batches of the first were lost on the way"

            know(("8" * 32, one), ("9" * 32, other))  # it began anew, and these do not yet tell of that
            assert not any(follower.live.values())
            assert not has(0) | has(1)
            follower.table.set_facts("e", None)
            assert len(follower.index) == 0
        await follower.subscriptions.stop()

    uvloop.run(scenario())


def test_garbage_and_forgeries_change_nothing() -> None:
    async def check(publisher: KvPublisher, followers: Sequence[Follower]) -> None:
        (follower,) = followers
        follower.know(publisher.incarnation, publisher.port)
        publisher.tell([1, 2])
        await until(lambda: follower.known() == {1, 2})
        forged = EventBatch("f" * 32, 1, [Stored(pack_keys([block(7)]))])
        partial = EventBatch(publisher.incarnation, 10**6, [Stored(b"123")])
        wrong: list[list[bytes]] = [
            [TOPIC, b"garbage"], [TOPIC], [TOPIC, encode(forged)], [TOPIC, encode(partial)],
            [TOPIC, encode(forged), b"more"], [TOPIC + b"x", encode(forged)], [TOPIC, b"\x91" * 5000],
        ]  # fmt: skip
        for frames in wrong:
            publisher.send(frames)
        await until(lambda: follower.subscriptions.counts.num_dropped >= len(wrong))
        publisher.tell([3])
        await until(lambda: follower.known() == {1, 2, 3})
        assert follower.subscriptions.counts.num_dropped == len(wrong)
        assert follower.subscriptions.counts.num_gaps == 0

    run(check)


def test_a_liar_loses_its_place() -> None:
    async def check(publisher: KvPublisher, followers: Sequence[Follower]) -> None:
        (follower,) = followers
        follower.know(publisher.incarnation, publisher.port, num_blocks=5)
        publisher.tell(range(5))
        await until(lambda: follower.live.get("e", False) and follower.known() == set(range(5)))
        publisher.tell([6])
        await until(lambda: not follower.live["e"])
        assert len(follower.index) == 0
        follower.know("9" * 32, publisher.port)
        await until(lambda: follower.subscriptions.counts.num_dropped > 0)
        assert not follower.live["e"], "what is published there is another incarnation's"

    run(check)


def test_an_engine_that_left_is_forgotten() -> None:
    async def check(publisher: KvPublisher, followers: Sequence[Follower]) -> None:
        (follower,) = followers
        follower.know(publisher.incarnation, publisher.port)
        publisher.tell([1])
        await until(lambda: follower.live.get("e", False) and follower.known() == {1})
        follower.table.replace([])
        assert (follower.live, follower.known()) == ({"e": False}, set())
        follower.know(publisher.incarnation, publisher.port)
        await until(lambda: follower.known() == {1})

    run(check)


def test_nobody_elsewhere_is_listened_to_without_a_key(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        follower = Follower()
        follower.know("1" * 32, 5, host="10.0.0.1")
        assert not follower.subscriptions._tasks
        assert "give --fleet-key-file" in caplog.text
        await follower.subscriptions.stop()

    uvloop.run(scenario())


@pytest.mark.parametrize("same", [True, False])
def test_only_who_has_the_fleet_key_hears_an_engine(tmp_path: Path, same: bool) -> None:
    file = tmp_path / "key"
    file.write_text("k" * 64)

    async def scenario() -> None:
        follower = Follower(read_fleet_key(file) if same else FleetKey(b"x" * 64))
        port = free_ports(2)
        with KvEventPublisher(KvEventsConfig("127.0.0.1", port, str(file)), "1" * 32) as publisher:
            publisher.cache_events.stored([block(1), block(2)])
            publisher.flush()
            follower.know("1" * 32, port)
            if same:
                await until(lambda: follower.live.get("e", False) and follower.known() == {1, 2})
                publisher.cache_events.removed([block(1)])
                publisher.flush()
                await until(lambda: follower.known() == {2})
            else:
                await until(lambda: publisher.num_dropped > 1)
                assert follower.subscriptions.counts.num_messages == 0
            await follower.subscriptions.stop()

    uvloop.run(scenario())


def test_sockets_are_closed() -> None:
    async def scenario() -> None:
        follower = Follower()
        for serial in range(3):
            follower.know(f"{serial:032x}", 9)
            await asyncio.sleep(0)
        context = follower.subscriptions._context
        assert isinstance(context, zmq.Context)
        await follower.subscriptions.stop()
        assert context.closed

    uvloop.run(scenario())

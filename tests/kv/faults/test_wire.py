"""A network that delays, damages, cuts and repeats, peers that say nothing, and noise: no token is wrong for it."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from tests.fakes.kv_pair import MIDWAY, Pair
from tests.fakes.kv_relay import FaultKind
from tests.fakes.kv_serving import until

pytestmark = pytest.mark.fleet
IN_HEADER = 20


def test_a_slow_network_changes_nothing(pair: Pair) -> None:
    async def scenario() -> None:
        await pair.link()
        failures = pair.decode.figure("failures_total")
        pair.control.arm("slow")
        pair.data.arm("slow")
        async with pair.questions() as ask:
            asked = [ask() for _ in range(8)]
            assert all([await one.num_passed() > 0 for one in asked])
        assert pair.decode.figure("failures_total") == failures

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        ("flip", IN_HEADER),
        ("flip", MIDWAY),
        ("drop", MIDWAY),
        ("repeat", MIDWAY),
        ("swap", MIDWAY),
        ("cut", IN_HEADER),
        ("cut", MIDWAY),
    ],
)
def test_damage_costs_time_and_no_wrong_token(pair: Pair, fault: FaultKind, at: int) -> None:
    async def scenario() -> None:
        failures = pair.decode.figure("failures_total")
        pair.data.arm(fault, at)
        async with pair.questions() as ask:
            while not pair.data.struck:  # who was lost is dialled again after a while
                asked = [ask(), ask(on_failure="fail"), ask()]
                for one in (asked[0], asked[2]):
                    await one.num_passed()  # checks the answer
                reply = await asked[1].decode
                if reply.status_code == 200:  # it went before the damage, or after
                    await asked[1].num_passed()
                else:
                    assert reply.json()["error"]["code"] == "kv_load_failed"
            pair.data.arm("none")
        await until(lambda: pair.decode.figure("failures_total") > failures)

    asyncio.run(scenario())


@pytest.mark.parametrize("relay", ["control", "data"])
def test_a_peer_that_accepts_and_says_nothing_is_given_up(pair: Pair, relay: str) -> None:
    async def scenario() -> None:
        harmed = pair.control if relay == "control" else pair.data
        await pair.link()
        harmed.arm("hang")
        harmed.cut()  # it connects again, to silence
        async with pair.questions() as ask:
            asked = [ask(), ask()]
            assert [await one.num_passed() for one in asked] == [0, 0]
            harmed.arm("none")
        await pair.link()

    asyncio.run(scenario())


def test_noise_on_both_ports_harms_nobody(pair: Pair) -> None:
    drawn = random.Random(5)
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01CURVE".ljust(64, b"\x00")
    starts = (
        b"",
        greeting,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01",
        b"PFKD\x00\x01",
        b"PFKV\x00\x01",
        b"PFKC\x00\x01",
    )

    async def scenario() -> None:
        await pair.link()
        refused, noisy = pair.prefill.figure("refused_connections_total"), []
        for count in range(60):
            raw = socket.create_connection(("127.0.0.1", pair.port + count % 2))
            noisy.append(raw)
            raw.sendall(starts[count % len(starts)] + drawn.randbytes(drawn.randrange(1, 5000)))
            if count % 3 == 0:
                raw.close()  # others stay, half open
        async with pair.questions() as ask:
            asked = [ask() for _ in range(6)]
            assert all([await one.num_passed() > 0 for one in asked])
        await until(lambda: pair.prefill.figure("refused_connections_total") > refused)
        for raw in noisy:
            raw.close()
        assert pair.prefill.is_alive
        assert pair.decode.is_alive

    asyncio.run(scenario())

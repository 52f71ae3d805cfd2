"""Thousands of requests through one pair, whose clients leave when they like: all blocks come back, memory is flat.

PAGEFLEET_KV_REQUESTS=10000 says how many there are; without it, as many as are quick.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.fakes.kv_pair import Ask, Pair
from tests.fakes.kv_serving import Asked, ServedEngine

pytestmark = pytest.mark.fleet
NUM_REQUESTS = int(os.environ.get("PAGEFLEET_KV_REQUESTS", "120"))
AT_ONCE = 24
CHOICES = 3
WARM = 4_000
"""Requests of which the first half has every page touched and every buffer made."""
MOST_GROWTH_KIB = 48 * 1024
"""Of one engine over the second half: allocators are not exact, a leak of blocks or of buffers is more."""


def memory_kib(engine: ServedEngine) -> int:
    """Memory of its own of a server and its core."""
    return sum(
        int(line.split()[1])
        for pid in (engine.process.pid, engine.core_pid)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )


async def one_request(asked: Asked, drawn: random.Random) -> str:
    """See a request through, or leave at some point; returns what became of it."""
    leaves = drawn.random() < 0.4
    if leaves:
        await asyncio.wait([asked.decode], timeout=drawn.random() * 0.3)
        who = drawn.choice(("client", "client", "client", "router"))  # a router that gives up the prompt alone
        if who == "client":
            asked.drop()
        else:
            asked.prefill.cancel()
    try:
        answers = await asked.answers()
    except asyncio.CancelledError:
        return "left"
    assert answers == [asked.exchange.answer] * CHOICES
    return "answered"


@pytest.mark.timeout(3600)
def test_every_block_comes_back(pair: Pair) -> None:
    drawn = random.Random(9)
    ended: Counter[str] = Counter()

    async def asker(ask: Ask, numbers: list[int]) -> None:
        while numbers:
            numbers.pop()
            ended[await one_request(ask(n=CHOICES), drawn)] += 1

    async def some(count: int) -> None:
        async with pair.questions() as ask:  # which waits until nothing is held on either side
            numbers = list(range(count))
            await asyncio.gather(*(asker(ask, numbers) for _ in range(AT_ONCE)))

    began = time.monotonic()
    asyncio.run(some(NUM_REQUESTS // 2))
    halfway = [memory_kib(engine) for engine in (pair.prefill, pair.decode)]
    asyncio.run(some(NUM_REQUESTS - NUM_REQUESTS // 2))
    growth = [memory_kib(engine) - was for engine, was in zip((pair.prefill, pair.decode), halfway, strict=True)]
    received = pair.decode.figure("received_blocks_total")
    print(
        f"{NUM_REQUESTS} requests in {time.monotonic() - began:.0f} s, {dict(ended)}; "
        f"{received:.0f} blocks received; memory {halfway} KiB halfway, then {growth} more"
    )
    assert sum(ended.values()) == NUM_REQUESTS
    assert min(ended["left"], ended["answered"]) > 0
    assert received > 0
    if NUM_REQUESTS >= WARM:
        assert max(growth) < MOST_GROWTH_KIB
    assert httpx.get(f"{pair.decode.url}/livez", timeout=60).status_code == 200

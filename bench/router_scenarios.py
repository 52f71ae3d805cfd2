"""What is measured of a router: each scenario starts from a fresh router over fresh or reset engines."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.http_load import ClientConnection, Pool, Sample, closed_loop, open_loop, raw_request
from bench.routers import MODEL, RunningRouter, raise_open_files

PATH = "/v1/chat/completions"
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """A router and the engines behind it."""

    router: RunningRouter
    engine_ports: Sequence[int]

    def through(self) -> Pool:
        """Connections to the router."""
        return Pool("127.0.0.1", self.router.port)

    def direct(self) -> Pool:
        """Connections to one engine."""
        return Pool("127.0.0.1", self.engine_ports[0])

    def raw(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Requests with these bodies."""
        return [raw_request(f"127.0.0.1:{self.router.port}", PATH, body) for body in bodies]

    def engines(self, path: str) -> list[dict[str, int]]:
        """Ask every engine."""
        urls = [f"http://127.0.0.1:{port}{path}" for port in self.engine_ports]
        return [json.load(urllib.request.urlopen(url, timeout=10)) for url in urls]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A name, how the engines behave, and what is done."""

    name: str
    run: Callable[[Place], Coroutine[Any, Any, Figures]]
    engine_options: tuple[str, ...] = ()

    def engines_command(self) -> list[str]:
        """Return the command line of the engines."""
        return [sys.executable, str(Path(__file__).with_name("fake_engine.py")), *self.engine_options]


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def chat_bodies(count: int, shared_chars: int, own_chars: int, stream: bool = False, seed: int = 0) -> list[bytes]:
    """Chat requests whose prompts share one of 20 prefixes."""
    rng = random.Random(seed)

    def text(num_chars: int) -> str:
        return "".join(rng.choices("abcdefgh ijklmnop", k=num_chars))

    prefixes = [text(shared_chars) for _ in range(20)]
    return [
        json.dumps(
            {
                "model": MODEL,
                "stream": stream,
                "messages": [{"role": "user", "content": rng.choice(prefixes) + text(own_chars)}],
            }
        ).encode()
        for _ in range(count)
    ]


def times(samples: list[Sample], of: Callable[[Sample], float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds.

    Raises:
        RuntimeError: an answer was no 200.
    """
    bad = [s.status for s in samples if s.status != 200]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(samples)} answers were not 200, e.g. {bad[0]}")
    values = [of(s) * 1000 for s in samples]
    return percentile(values, 0.5), percentile(values, 0.99)


async def short(place: Place) -> Figures:
    """32 clients that ask again at once, then one alone."""
    requests = place.raw(chat_bodies(400, 20, 40))
    figures = await _closed(place, requests, 3.0)
    alone = [
        times(await closed_loop(pool, requests, 1, 1.5), lambda s: s.total)
        for pool in (place.through(), place.direct())
    ]
    figures["alone, added ms p50"] = alone[0][0] - alone[1][0]
    figures["alone, added ms p99"] = alone[0][1] - alone[1][1]
    figures["memory after, MB"] = place.router.resident_bytes() / 1e6
    return figures


async def prefixes(place: Place) -> Figures:
    """10 kB prompts, 6 kB of it out of 20 beginnings; an engine remembers 8."""
    place.engines("/reset")
    requests = place.raw(chat_bodies(2000, 6000, 4000))
    figures = await _closed(place, requests, 3.0)
    stats = place.engines("/stats")
    total = sum(one["requests"] for one in stats)
    figures["hits, %"] = 100 * sum(one["hits"] for one in stats) / total
    figures["busiest engine / mean"] = max(one["requests"] for one in stats) / (total / len(stats))
    return figures


async def streams(place: Place) -> Figures:
    """500 streams/s of 16 chunks."""
    requests = place.raw(chat_bodies(400, 20, 40, stream=True))
    await open_loop(place.through(), requests, 500, 0.5)
    before, started = place.router.cpu_seconds(), time.perf_counter()
    through = await open_loop(place.through(), requests, 500, 4.0)
    used, elapsed = place.router.cpu_seconds() - before, time.perf_counter() - started
    direct = await open_loop(place.direct(), requests, 500, 4.0)
    first, base = times(through, lambda s: s.first_byte), times(direct, lambda s: s.first_byte)
    pause, base_pause = times(through, lambda s: s.longest_pause), times(direct, lambda s: s.longest_pause)
    return {
        "first byte, added ms p50": first[0] - base[0],
        "first byte, added ms p99": first[1] - base[1],
        "longest pause, added ms p99": pause[1] - base_pause[1],
        "cores used": used / elapsed,
    }


async def long_prompts(place: Place) -> Figures:
    """Prompts of 400 kB, one after the other."""
    requests = place.raw(chat_bodies(40, 200_000, 200_000))
    pools = (place.through(), place.direct())
    found = []
    for pool in pools:
        await closed_loop(pool, requests, 1, 0.5)
        found.append(times(await closed_loop(pool, requests, 1, 3.0), lambda s: s.total))
    return {
        "added ms p50": found[0][0] - found[1][0],
        "added ms p99": found[0][1] - found[1][1],
        "memory after, MB": place.router.resident_bytes() / 1e6,
    }


MOST_OPEN = 10_000


async def open_streams(place: Place) -> Figures:
    """Many streams that stay open while little comes; then all clients leave at once."""
    await asyncio.sleep(1.0)
    at_rest = place.router.resident_bytes()
    [request] = place.raw(chat_bodies(1, 20, 40, stream=True))
    loop = asyncio.get_running_loop()
    clients: list[ClientConnection] = []
    num_reading = 0
    num_open = min(MOST_OPEN, raise_open_files() // 2 - 100)  # a router has two sockets for each
    for _ in range(num_open // 100):
        for _ in range(100):
            _, client = await loop.create_connection(ClientConnection, "127.0.0.1", place.router.port)
            client.request(request).add_done_callback(lambda done: done.exception())
            clients.append(client)
        await asyncio.sleep(0.02)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and num_reading < num_open // 100 * 100:
        await asyncio.sleep(0.5)
        num_reading = sum(client.has_begun for client in clients)
    await asyncio.sleep(5.0)
    held = place.router.resident_bytes()
    for client in clients:
        client.close()
    clients.clear()
    await asyncio.sleep(2.0)
    left = sum(one["open_streams"] for one in place.engines("/stats"))
    await asyncio.sleep(3.0)
    return {
        "streams open": num_reading,
        "kB each": (held - at_rest) / 1000 / max(1, num_reading),
        "memory at rest, MB": at_rest / 1e6,
        "memory after they closed, MB": place.router.resident_bytes() / 1e6,
        "open upstream 2 s after clients left": left,
    }


async def _closed(place: Place, requests: Sequence[bytes], seconds: float) -> Figures:
    await closed_loop(place.through(), requests, 32, 0.5)
    before, started = place.router.cpu_seconds(), time.perf_counter()
    samples = await closed_loop(place.through(), requests, 32, seconds)
    elapsed, used = time.perf_counter() - started, place.router.cpu_seconds() - before
    times(samples, lambda s: s.total)
    return {"requests/s": len(samples) / elapsed, "requests per CPU-second": len(samples) / used}


SCENARIOS = (
    Scenario("short", short),
    Scenario("prefixes", prefixes, ("--prefix-bytes", "6000")),
    Scenario("streams", streams),
    Scenario("long prompts", long_prompts),
    Scenario("open streams", open_streams, ("--chunks", "1000", "--gap", "10")),
)

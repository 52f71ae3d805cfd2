"""The prefix policy against simulated engines: prefixes stay where they are cached, and no engine gets everything."""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import pytest
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.engines.rates import EngineRates
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.prefix.knowledge import BYTES_PER_TOKEN, ApproximatePrefixes, hash_pieces
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.auto import Auto
from pagefleet_router.scheduling.in_flight import InFlight

PREFIX_PIECES = 12


@dataclass
class Engine:
    """An engine that remembers `capacity` prefixes, least recently used first out."""

    view: EngineView
    capacity: int
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def hit(self, prefix: int) -> bool:
        found = prefix in self.cached
        self.cached[prefix] = None
        self.cached.move_to_end(prefix)
        while len(self.cached) > self.capacity:
            self.cached.popitem(last=False)
        return found


@dataclass
class Outcome:
    hit_rate: float
    imbalance: float
    """The busiest engine's requests over the mean."""
    counts: Counter[str]


def simulate(
    num_prefixes: int,
    num_engines: int = 4,
    capacity: int = 8,
    clients: int = 32,
    num_requests: int = 6000,
    seed: int = 0,
    think: float = 0.0,
    own_pieces: int = 8,
    prefix_pieces: int = PREFIX_PIECES,
) -> Outcome:
    rng = random.Random(seed)
    now = 0.0
    policy = Auto(ApproximatePrefixes(PrefixIndex(100_000)), random.Random(seed), lambda: now)
    common = EngineRates()
    views = [
        EngineView(Endpoint(f"e{i}", "http://x:1", "m"), ready=True, rates=EngineRates(common))
        for i in range(num_engines)
    ]
    engines = {view.id: Engine(view, capacity) for view in views}
    prefixes = [rng.randbytes(512 * prefix_pieces) for _ in range(num_prefixes)]
    ends: list[tuple[float, int, InFlight]] = []
    starts = [(think * rng.expovariate(1.0), client) for client in range(clients)]
    heapq.heapify(starts)
    counts: Counter[str] = Counter()
    hits = 0
    for number in range(num_requests):
        before = now
        now, client = heapq.heappop(starts)
        if int(now) > int(before):
            for one in views:
                one.rates.refresh(now)
        while ends and ends[0][0] <= now:
            end, _, over = heapq.heappop(ends)
            over.answering(end)
            over.end(end)
        prefix = rng.randrange(num_prefixes)
        text = prefixes[prefix] + rng.randbytes(512 * own_pieces)
        view = RequestView("m", hash_pieces(("m",), text), len(text) // BYTES_PER_TOKEN)
        choice = policy.choose(view, views)
        engine = engines[choice.engine.id]
        attempt = InFlight(view, choice, now)
        policy.sent(view, engine.view)
        hit = engine.hit(prefix)
        hits += hit
        counts[choice.engine.id] += 1
        computed = own_pieces + (0 if hit else prefix_pieces)
        took = (0.05 + 0.002 * computed * engine.view.tally.num_requests) * rng.uniform(0.7, 1.3)
        heapq.heappush(ends, (now + took, number, attempt))
        heapq.heappush(starts, (now + took + think * rng.expovariate(1.0) if think else now + took, client))
    return Outcome(hits / num_requests, max(counts.values()) / (num_requests / num_engines), counts)


@pytest.mark.parametrize("clients", [4, 32], ids=["few", "all at once, cold"])
def test_twenty_prefixes_stay_where_they_are_cached(clients: int) -> None:
    outcome = simulate(num_prefixes=20, clients=clients, num_requests=2500)
    assert outcome.hit_rate >= 0.98
    assert outcome.imbalance <= 1.2


@pytest.mark.parametrize("clients", [2, 4, 32, 128])
def test_a_shared_system_prompt_does_not_pin_all_traffic_to_one_engine(clients: int) -> None:
    outcome = simulate(num_prefixes=1, clients=clients, num_requests=2000)
    assert outcome.imbalance <= 1.3
    assert outcome.hit_rate >= 0.99


def test_one_conversation_stays_with_its_engine() -> None:
    outcome = simulate(num_prefixes=1, clients=1, num_requests=40, think=10.0)
    assert len(outcome.counts) == 1


def test_a_prefix_as_long_as_a_book_pins_nothing_either() -> None:
    outcome = simulate(num_prefixes=1, clients=32, num_requests=400, prefix_pieces=200)
    assert outcome.imbalance <= 1.5
    assert outcome.hit_rate >= 0.98

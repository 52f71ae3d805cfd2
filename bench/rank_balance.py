"""How data ranks share prompts out: `Balance` before ranks that are simulated, in virtual time. Needs no model.

    python bench/rank_balance.py

Each rank computes in steps: so many tokens of prompts, and one token of each answer. A step takes a fixed time and some
for each token. What a request needs of K/V is reserved while it runs; prefixes stay cached as far as there is room
beside that. Clients ask again as soon as they have an answer.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from dataclasses import dataclass, field

from pagefleet_engine.client import balance
from pagefleet_engine.client.balance import Balance, RankRoom, Seat
from pagefleet_protocol.block_hash import PrefixScope

STEP_S, TOKEN_S = 0.012, 60e-6
STEP_TOKENS = 2048
SUFFIX = 256


@dataclass(frozen=True)
class Load:
    """Who asks for what, of what."""

    ranks: int = 4
    clients: int = 96
    requests: int = 1500
    prefixes: int = 40
    skew: float = 1.0
    """Of Zipf's law, by which prefixes are chosen."""
    prefix_len: int = 2048
    output_len: int = 200
    """On average; outputs are as long as they happen to be."""
    seats: int = 64
    kv_tokens: int = 40 * 1024


@dataclass
class Asked:
    """A request on its way."""

    seat: Seat
    prefix: int
    uncached: int
    outputs: int
    kv: int = 0


@dataclass
class Rank:
    """One core."""

    load: Load
    waiting: list[Asked] = field(default_factory=list)
    running: list[Asked] = field(default_factory=list)
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    is_busy: bool = False

    def admit(self) -> int:
        """Let those run for whom there is room, in their order; returns how many of them lack their prefix."""
        load, computed = self.load, 0
        while self.waiting and len(self.running) < load.seats:
            asked = self.waiting[0]
            hit = load.prefix_len if asked.prefix in self.cached else 0
            kv = asked.uncached + asked.outputs - hit
            if self.running and self._held + kv > load.kv_tokens:
                break
            computed += not hit
            self.running.append(self.waiting.pop(0))
            asked.uncached, asked.kv = asked.uncached - hit, kv
            self.cached[asked.prefix] = None
            self.cached.move_to_end(asked.prefix)
            while len(self.cached) > 1 and len(self.cached) * load.prefix_len + self._held / 2 > load.kv_tokens:
                self.cached.popitem(last=False)
        return computed

    @property
    def _held(self) -> int:
        return sum(asked.kv for asked in self.running)

    def step(self) -> tuple[float, list[Asked]]:
        """Return the seconds of a step, and who has all then."""
        decoding = [asked for asked in self.running if not asked.uncached]
        room = left = STEP_TOKENS - len(decoding)
        for asked in self.running:
            if asked.uncached:
                new = min(asked.uncached, left)
                asked.uncached, left = asked.uncached - new, left - new
                if not asked.uncached:
                    asked.seat.has_begun()
        for asked in decoding:
            asked.outputs -= 1
        ended = [asked for asked in decoding if asked.outputs <= 0]
        self.running = [asked for asked in self.running if asked not in ended]
        return STEP_S + TOKEN_S * (len(decoding) + room - left), ended


def simulate(load: Load, seed: int, *, by_turns: bool = False) -> tuple[float, float]:
    """Return requests a second, and the share of requests whose prefix was computed."""
    rnd, number = random.Random(seed), 0
    ranks = [Rank(load) for _ in range(load.ranks)]
    shared = Balance([RankRoom(load.seats, load.kv_tokens)] * load.ranks)
    weights = [(1 + prefix) ** -load.skew for prefix in range(load.prefixes)]
    events: list[tuple[float, int]] = []

    def ask(now: float) -> None:
        nonlocal number
        (prefix,), suffix = rnd.choices(range(load.prefixes), weights), rnd.randrange(SUFFIX // 2, 2 * SUFFIX)
        own = rnd.randrange(2**30)
        tokens = [*range(prefix * 8191, prefix * 8191 + load.prefix_len), *range(own, own + suffix)]
        seat = shared.place(tokens, 1, PrefixScope(""), number % load.ranks if by_turns else None)
        outputs = 1 + int(rnd.expovariate(1 / load.output_len))
        rank, number = ranks[seat.rank], number + 1
        rank.waiting.append(Asked(seat, prefix, len(tokens), outputs))
        if not rank.is_busy:
            rank.is_busy = True
            heapq.heappush(events, (now, seat.rank))

    for _ in range(load.clients):
        ask(0.0)
    now, computed = 0.0, 0
    while events:
        now, index = heapq.heappop(events)
        rank = ranks[index]
        computed += rank.admit()
        rank.is_busy = bool(rank.running)
        if not rank.is_busy:
            continue
        seconds, ended = rank.step()
        heapq.heappush(events, (now + seconds, index))
        for asked in ended:
            asked.seat.leave()
            if number < load.requests:
                ask(now + seconds)
    return load.requests / now, computed / load.requests


LOADS = {
    "40 prefixes": Load(),
    "one prefix": Load(prefixes=1),
    "100, skewed": Load(prefixes=100, skew=1.3),
    "short prefixes": Load(prefix_len=256),
    "few clients": Load(clients=12),
    "long answers": Load(clients=160, output_len=600),
}


def main() -> None:
    """Print a table: each load by turns, and by weights."""
    print("load             weights     requests/s  prefixes computed")
    for name, load in LOADS.items():
        for weight in (0, 1, 2, 4, 6):
            balance.RECOMPUTE = weight
            figures = [simulate(load, seed, by_turns=not weight) for seed in range(3)]
            rate, computed = (sum(column) / len(column) for column in zip(*figures, strict=True))
            print(f"{name:16} {f'recompute {weight}' if weight else 'by turns':11} {rate:10.2f} {computed:18.0%}")


if __name__ == "__main__":
    main()

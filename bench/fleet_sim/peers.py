"""Policies of other routers, written from what they publish; no line of theirs. llm-d's weights are those of its
guides (prefix 3, queue 2, KV 2, cold 2), and of its benchmark for the estimated scorer.

They see the engines' metrics, where they use them, as of the last 50 ms (llm-d's period); counts of running requests
are the router's own. llm-d: docs of llm-d-router (precise and approximate prefix cache scorers, no-hit-LRU, guides
"optimized baseline" and "precise prefix cache aware"), and of llm-d-kv-cache (benchmarking/73-capacity). SGLang:
sgl-model-gateway, cache_aware. AIBrix: readme of its prefix-cache plugin and the defaults of its code.
production-stack: its prefixaware router, and PR 1035 (loadaware). KubeAI: docs on prefix-aware load balancing.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

from bench.fleet_sim.engine import SimEngine
from bench.fleet_sim.jobs import BLOCK, Job


class History:
    """For each engine the blocks it was sent, the last `capacity` of them."""

    def __init__(self, num_engines: int, capacity: int) -> None:
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]
        self._capacity = capacity

    def match(self, engine: int, blocks: Sequence[int]) -> int:
        """Return how many leading blocks it was sent."""
        known = self._known[engine]
        for number, key in enumerate(blocks):
            if key not in known:
                return number
        return len(blocks)

    def record(self, engine: int, blocks: Sequence[int]) -> None:
        """Note what it is sent."""
        known = self._known[engine]
        for key in blocks:
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._capacity:
            known.popitem(last=False)


class Peer:
    """Any engine. The others choose by what this one counts and reads: its own requests, and metrics."""

    poll_s = 0.05

    def __init__(self, num_engines: int, num_blocks: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num = num_engines
        self.running = [0] * num_engines
        self.waiting = [0] * num_engines
        self.kv_usage = [0.0] * num_engines
        self.history = History(num_engines, num_blocks)

    def route(self, job: Job, now: float) -> int:
        """See SimRouter."""
        engine = self.pick(job, now)
        self.running[engine] += 1
        self.history.record(engine, self.seen(job))
        return engine

    def seen(self, job: Job) -> Sequence[int]:
        """Return the blocks of a prompt that the policy looks at."""
        return job.blocks

    def pick(self, job: Job, now: float) -> int:
        """Return the engine for a request."""
        return self.rng.randrange(self.num)

    def first_token(self, job: Job, now: float) -> None:
        """See SimRouter."""

    def finished(self, job: Job, now: float) -> None:
        """See SimRouter."""
        self.running[job.engine] -= 1

    def stored(self, engine: int, keys: Sequence[int], now: float) -> None:
        """See SimRouter."""

    def removed(self, engine: int, keys: Sequence[int], now: float) -> None:
        """See SimRouter."""

    def poll(self, engine: SimEngine, now: float) -> None:
        """See SimRouter."""
        self.waiting[engine.number] = engine.num_waiting
        self.kv_usage[engine.number] = engine.kv_usage

    def best(self, score: Callable[[int], float]) -> int:
        """Return the engine of the highest score, any of them if there are several."""
        scores = [score(engine) for engine in range(self.num)]
        highest = max(scores)
        return self.rng.choice([engine for engine in range(self.num) if scores[engine] == highest])

    def least_loaded(self) -> int:
        """Return the engine with the fewest requests."""
        return self.best(lambda engine: -self.running[engine])


class LlmdApproximate(Peer):
    """Weighted scores in 0..1, the highest wins: matched share of the prompt, queue, KV in use.

    As of 2026: blocks as large, and as many, as the engines say that they have.
    """

    prefix_weight, queue_weight, kv_weight = 3.0, 2.0, 2.0

    def matched(self, engine: int, job: Job) -> int:
        """Return the leading blocks that it is believed to have."""
        return self.history.match(engine, self.seen(job))

    def pick(self, job: Job, now: float) -> int:
        """See Peer."""
        matched = [self.matched(engine, job) for engine in range(self.num)]
        num_blocks = len(self.seen(job))
        least, most = min(self.waiting), max(self.waiting)

        def score(engine: int) -> float:
            queue = 1.0 if most == least else (most - self.waiting[engine]) / (most - least)
            share = matched[engine] / num_blocks
            weighted = self.prefix_weight * share + self.queue_weight * queue
            return weighted + self.kv_weight * (1.0 - self.kv_usage[engine]) + self.cold_score(engine, matched)

        engine = self.best(score)
        self.chosen(engine, matched, now)
        return engine

    def cold_score(self, engine: int, matched: Sequence[int]) -> float:
        """Return what a scorer for cold requests adds."""
        return 0.0

    def chosen(self, engine: int, matched: Sequence[int], now: float) -> None:
        """Note the choice."""


class LlmdEstimated(LlmdApproximate):
    """The approximate scorer as llm-d measured it beside its precise one: the default of its day.

    Equal weights; it looks at the first 256 pieces of 64 characters, and remembers 31,250 of them for each engine,
    whatever that has: 4,096 and 500,000 tokens at four characters each. The share is that of the pieces it looks at.
    """

    prefix_weight, queue_weight, kv_weight = 1.0, 1.0, 1.0
    _MOST_MATCHED = 256 * 16 // BLOCK

    def __init__(self, num_engines: int, num_blocks: int, seed: int) -> None:
        super().__init__(num_engines, num_blocks, seed)
        self.history = History(num_engines, 31_250 * 16 // BLOCK)

    def seen(self, job: Job) -> Sequence[int]:
        """See Peer."""
        return job.blocks[: self._MOST_MATCHED]


class LlmdNoHitLru(LlmdApproximate):
    """The optimized baseline: cold requests prefer the engine that got one the longest ago."""

    def __init__(self, num_engines: int, num_blocks: int, seed: int) -> None:
        super().__init__(num_engines, num_blocks, seed)
        self._cold_order = list(range(num_engines))

    def cold_score(self, engine: int, matched: Sequence[int]) -> float:
        """See LlmdApproximate."""
        if any(matched):
            return 0.0
        return 2.0 * (1.0 - self._cold_order.index(engine) / max(1, self.num - 1))

    def chosen(self, engine: int, matched: Sequence[int], now: float) -> None:
        """See LlmdApproximate."""
        if not any(matched):
            self._cold_order.remove(engine)
            self._cold_order.append(engine)


class LlmdPrecise(LlmdApproximate):
    """The same with what the engines' events say, and for 2 s with what they were sent."""

    def __init__(self, num_engines: int, num_blocks: int, seed: int) -> None:
        super().__init__(num_engines, num_blocks, seed)
        self._cached: list[set[int]] = [set() for _ in range(num_engines)]
        self._sent: list[dict[int, float]] = [{} for _ in range(num_engines)]
        self._now = 0.0

    def matched(self, engine: int, job: Job) -> int:
        """See LlmdApproximate."""
        cached, sent = self._cached[engine], self._sent[engine]
        for number, key in enumerate(job.blocks):
            if key not in cached and sent.get(key, -9.0) + 2.0 < self._now:
                return number
        return len(job.blocks)

    def route(self, job: Job, now: float) -> int:
        """See SimRouter."""
        self._now = now
        engine = super().route(job, now)
        self._sent[engine].update(dict.fromkeys(job.blocks, now))
        return engine

    def stored(self, engine: int, keys: Sequence[int], now: float) -> None:
        """See SimRouter."""
        self._cached[engine].update(keys)

    def removed(self, engine: int, keys: Sequence[int], now: float) -> None:
        """See SimRouter."""
        self._cached[engine].difference_update(keys)
        for key in keys:
            self._sent[engine].pop(key, None)


class SglangCacheAware(Peer):
    """A tree that keeps what was sent; unless loads differ by over 32 and a tenth, or less than half matches."""

    def __init__(self, num_engines: int, num_blocks: int, seed: int) -> None:
        super().__init__(num_engines, num_blocks, seed)
        self.history = History(num_engines, 10**9)  # 10,000 nodes hold more than these traces

    def pick(self, job: Job, now: float) -> int:
        """See Peer."""
        most, least = max(self.running), min(self.running)
        if most - least > 32 and most > 1.1 * least:
            return self.least_loaded()
        matched = [self.history.match(engine, job.blocks) for engine in range(self.num)]
        if max(matched) > 0.5 * len(job.blocks):
            return self.best(matched.__getitem__)
        return self.least_loaded()


class AibrixPrefixCache(Peer):
    """Least loaded if loads differ by over 8, else the best match among those within mean + deviation."""

    def __init__(self, num_engines: int, num_blocks: int, seed: int) -> None:
        super().__init__(num_engines, num_blocks, seed)
        self.history = History(num_engines, 200_000)

    def pick(self, job: Job, now: float) -> int:
        """See Peer."""
        if max(self.running) - min(self.running) > 8:
            return self.least_loaded()
        limit = fmean(self.running) + pstdev(self.running)
        calm = [engine for engine in range(self.num) if self.running[engine] <= limit]
        matched = {engine: self.history.match(engine, job.blocks) for engine in calm}
        most = max(matched.values())
        if not most:
            return self.least_loaded()
        best = [engine for engine in calm if matched[engine] == most]
        return min(best, key=lambda engine: (self.running[engine], self.rng.random()))


class StackPrefixAware(Peer):
    """production-stack: any of those that share the longest part, whatever their load; forgets nothing."""

    def __init__(self, num_engines: int, num_blocks: int, seed: int) -> None:
        super().__init__(num_engines, num_blocks, seed)
        self.history = History(num_engines, 10**9)

    def pick(self, job: Job, now: float) -> int:
        """See Peer."""
        return self.best(lambda engine: self.history.match(engine, job.blocks))


class StackLoadAware(StackPrefixAware):
    """production-stack since PR 1035: matched share less the load beside the mean."""

    def pick(self, job: Job, now: float) -> int:
        """See Peer."""
        mean = fmean(self.running)

        def score(engine: int) -> float:
            share = self.history.match(engine, job.blocks) / len(job.blocks)
            return share - (self.running[engine] - mean) / max(1.0, mean)

        return self.best(score)


class KubeAiPrefixHash(Peer):
    """Consistent hashing with bounded loads (125 %) over the first 100 characters, 256 virtual nodes each."""

    def __init__(self, num_engines: int, num_blocks: int, seed: int) -> None:
        super().__init__(num_engines, num_blocks, seed)
        ring = random.Random(0)
        self._ring = sorted((ring.getrandbits(62), engine) for engine in range(num_engines) for _ in range(256))

    def pick(self, job: Job, now: float) -> int:
        """See Peer."""
        limit = 1.25 * (sum(self.running) + 1) / self.num
        start = bisect_left(self._ring, (job.blocks[0], 0))
        for offset in range(len(self._ring)):
            engine = self._ring[(start + offset) % len(self._ring)][1]
            if self.running[engine] + 1 <= limit:
                return engine
        return self.least_loaded()


PEERS: dict[str, type[Peer]] = {
    "llm-d precise": LlmdPrecise,
    "llm-d approximate": LlmdApproximate,
    "llm-d estimated (2025)": LlmdEstimated,
    "llm-d no-hit-LRU": LlmdNoHitLru,
    "SGLang cache_aware": SglangCacheAware,
    "AIBrix prefix-cache": AibrixPrefixCache,
    "production-stack prefixaware": StackPrefixAware,
    "production-stack loadaware": StackLoadAware,
    "KubeAI PrefixHash": KubeAiPrefixHash,
    "random": Peer,
}

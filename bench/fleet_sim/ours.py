"""This repository's router in the simulation: its own classes, driven by the simulated clock."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_router.config import PolicyName
from pagefleet_router.engines.endpoints import EndpointTable, EngineView
from pagefleet_router.prefix.exact import ExactIndex
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.prefix.knowledge import ApproximatePrefixes, PrefixKnowledge
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.in_flight import InFlight
from pagefleet_router.scheduling.policies import make_policy
from pagefleet_router.scheduling.selection import candidates

from bench.fleet_sim.engine import EngineModel, SimEngine
from bench.fleet_sim.jobs import BLOCK, Job

MODEL = "m"
_BLOCKS_PER_PIECE = 2
"""A piece of 512 bytes is 128 tokens."""


class ExactPrefixes:
    """The index of events, asked as a router asks it whose engines all publish."""

    def __init__(self, index: ExactIndex) -> None:
        self._index = index

    def cached_tokens(self, engines: Sequence[EngineView], request: RequestView) -> list[int]:
        """See PrefixKnowledge."""
        matched = self._index.match([engine.id for engine in engines], request.blocks)
        most = (request.num_tokens - 1) // BLOCK
        return [min(count, most) * BLOCK for count in matched]

    def cached_by_rank(self, engine: EngineView, request: RequestView) -> list[int]:
        """See PrefixKnowledge."""
        return self.cached_tokens((engine,), request)

    def sent(self, engine: EngineView, request: RequestView, rank: int | None = None) -> None:
        """See PrefixKnowledge."""
        self._index.sent(engine.id, request.blocks)

    def lost(self, engine_id: str) -> None:
        """See PrefixKnowledge."""
        self._index.clear(engine_id)


class OurRouter:
    """One process of the router.

    Args:
        policy: which of its policies.
        exact: whether engines publish events.
        models: the engines.
        seed: for ties.
    """

    poll_s = 1.0

    def __init__(self, policy: PolicyName, exact: bool, models: Sequence[EngineModel], seed: int) -> None:
        self._now = 0.0
        self._ids = [f"e{number}" for number in range(len(models))]
        self._numbers = {engine_id: number for number, engine_id in enumerate(self._ids)}
        self._index = ExactIndex()
        self._exact = exact
        self.table = EndpointTable(clock=lambda: self._now)
        self.table.replace([Endpoint(engine_id, f"http://{engine_id}:1", MODEL) for engine_id in self._ids])
        for engine_id, model in zip(self._ids, models, strict=True):
            self.table.set_ready(engine_id, True)
            self.table.set_facts(engine_id, facts_of(model))
            self._index.join(engine_id, 2 * model.num_blocks)
        knowledge: PrefixKnowledge = ExactPrefixes(self._index)
        if not exact:
            knowledge = ApproximatePrefixes(PrefixIndex(262_144))
        self.policy = make_policy(policy, knowledge, lambda: self._now, random.Random(seed))
        self._attempts: dict[int, InFlight] = {}

    def route(self, job: Job, now: float) -> int:
        """See SimRouter."""
        self._now = now
        pieces = tuple(job.blocks[_BLOCKS_PER_PIECE - 1 :: _BLOCKS_PER_PIECE])
        view = RequestView(
            MODEL,
            pieces,
            job.num_tokens,
            blocks=array("Q", job.blocks) if self._exact else (),
            block_size=BLOCK,
            session=None if job.session is None else hash((job.session,)),
            stream=True,
        )
        choice = self.policy.choose(view, candidates(self.table.snapshot, view, ()))
        self._attempts[job.number] = InFlight(view, choice, now)
        self.policy.sent(view, choice.engine)
        return self._numbers[choice.engine.id]

    def first_token(self, job: Job, now: float) -> None:
        """See SimRouter."""
        self._attempts[job.number].answering(now)

    def finished(self, job: Job, now: float) -> None:
        """See SimRouter."""
        self._attempts.pop(job.number).end(now)

    def stored(self, engine: int, keys: Sequence[int], now: float) -> None:
        """See SimRouter."""
        self._index.add(self._ids[engine], keys)

    def removed(self, engine: int, keys: Sequence[int], now: float) -> None:
        """See SimRouter."""
        self._index.remove(self._ids[engine], keys)

    def poll(self, engine: SimEngine, now: float) -> None:
        """See SimRouter."""
        self._now = now
        self._index.tick(now)
        engine_id = self._ids[engine.number]
        view = self.table.engine(engine_id)
        assert view is not None
        view.rates.refresh(now)
        self.table.set_load(engine_id, engine.num_running, engine.num_waiting, engine.kv_usage, engine.num_generated)


def facts_of(model: EngineModel) -> EngineFacts:
    """Return what such an engine says of itself."""
    return EngineFacts(
        incarnation="0" * 32,
        model=MODEL,
        scope=MODEL,
        block_size=BLOCK,
        num_blocks=model.num_blocks,
        max_model_len=131_072,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_batched_tokens,
        vocab_size=1_000,
    )

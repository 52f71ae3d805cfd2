"""Who computes a prompt, where a model's engines are made for one part: the engine that answers, or another one.

Everything is compared in seconds (`pair_cost`), so that P/D is used where it pays, request by request: it does not for
a prompt that is mostly cached where it is answered, nor on an idle fleet with a slow network. Pure but for ties.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.prefix.knowledge import PrefixKnowledge
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.cost import local_seconds, remote_seconds
from pagefleet_router.scheduling.kv_links import KvLinks
from pagefleet_router.scheduling.policy import Choice, Policy, Score
from pagefleet_router.scheduling.selection import pick_random_lowest, with_room

RECOMPUTE = 4
"""What a token counts for that a data rank does not have yet, beside those that it has to compute already: as where an
engine chooses the rank itself."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to have a request answered."""

    choice: Choice
    seconds: float


class Pairing:
    """Chooses one engine or two.

    Args:
        policy: chooses among engines for one part, and among those for both.
        knowledge: of the engines' caches.
        threshold: uncached prompt tokens below which the engine that answers computes them.
        free: whether the decode engine of a pair is chosen by cost; False: it is the policy's, as under a rule like
            sessions.
        clock: that of the tallies.
        rng: for ties.
    """

    def __init__(
        self, policy: Policy, knowledge: PrefixKnowledge, threshold: int, free: bool, clock: Callable[[], float],
        rng: random.Random,
    ) -> None:  # fmt: skip
        self._policy = policy
        self._knowledge = knowledge
        self._threshold = threshold
        self._free = free
        self._clock = clock
        self._rng = rng

    def choose(
        self, request: RequestView, engines: Sequence[EngineView], prefills: Sequence[EngineView], links: KvLinks
    ) -> Choice:
        """Return the cheapest way.

        Args:
            request: one that `may_split`.
            engines: that may answer it, at least one.
            prefills: that may compute its prompt for another.
            links: which of them pass K/V to which.
        """
        whole = self._policy.choose(request, engines)
        if not prefills or not self._is_long(request, whole):
            return whole
        options = list(self._options(request, whole, engines, prefills, links))
        choice = min(options, key=lambda option: option.seconds).choice
        if choice.prefill is None:
            return choice
        answers = self._at_rank(choice, request)
        return Choice(answers.engine, answers.cached_tokens, self._at_rank(choice.prefill, request), answers.rank)

    def explain(
        self, request: RequestView, engines: Sequence[EngineView], prefills: Sequence[EngineView], links: KvLinks
    ) -> tuple[Score, ...]:
        """Return how each way looks that is compared, and the other engines if each did all."""
        now = self._clock()
        whole = self._policy.choose(request, engines)
        asked = prefills if self._is_long(request, whole) else ()
        options = list(self._options(request, whole, engines, asked, links))
        seen = {option.choice.engine.id for option in options if option.choice.prefill is None}
        others = [engine for engine in engines if engine.id not in seen]
        for engine, hit in zip(others, self._knowledge.cached_tokens(others, request), strict=True):
            choice = Choice(engine, hit)
            options.append(Option(choice, local_seconds(choice, request.num_tokens, now)))
        return tuple(_score(option, now) for option in options)

    def _at_rank(self, choice: Choice, request: RequestView) -> Choice:
        """Return the choice of an engine with the data rank that takes the prompt where it costs least.

        Engines choose ranks themselves, but an engine that asks another one for K/V has to know which of its ranks.
        """
        engine = choice.engine
        if len(engine.cache_ids) == 1:
            return choice
        cached = self._knowledge.cached_by_rank(engine, request)
        busy = engine.tally.rank_tokens
        costs = [RECOMPUTE * (request.num_tokens - own) + busy[rank] for rank, own in enumerate(cached)]
        rank = self._rng.choice([rank for rank, cost in enumerate(costs) if cost == min(costs)])
        return Choice(engine, cached[rank], rank=rank)

    def _is_long(self, request: RequestView, whole: Choice) -> bool:
        return request.num_tokens - whole.cached_tokens >= max(self._threshold, 1)

    def _options(
        self,
        request: RequestView,
        whole: Choice,
        engines: Sequence[EngineView],
        prefills: Sequence[EngineView],
        links: KvLinks,
    ) -> Iterator[Option]:
        now, tokens = self._clock(), request.num_tokens
        yield Option(whole, local_seconds(whole, tokens, now))
        both = [engine for engine in engines if engine.role == "both"]
        if both and whole.engine.role != "both":
            colocated = self._policy.choose(request, both)
            yield Option(colocated, local_seconds(colocated, tokens, now))
        answering = engines if self._free else (whole.engine,)
        groups = (links.groups(decodes, made, now) for decodes, made in _matches(answering, prefills))
        for decodes, partners in itertools.chain.from_iterable(groups):
            prefill = self._policy.choose(request, with_room(partners))
            cached = self._knowledge.cached_tokens(decodes, request)
            ways = [
                Choice(engine, hit, prefill)
                for engine, hit in zip(decodes, cached, strict=True)
                if engine.id != prefill.engine.id
            ]
            if ways:
                costs = [remote_seconds(prefill, way, tokens, now) for way in ways]
                engine = pick_random_lowest([way.engine for way in ways], costs, self._rng)
                yield Option(next(way for way in ways if way.engine is engine), min(costs))


def _score(option: Option, now: float) -> Score:
    choice, computes = option.choice, option.choice.computes
    queued = computes.engine.tally.queued(now)
    if choice.prefill is None:
        return Score(choice.engine.id, option.seconds, choice.cached_tokens, queued, choice.engine.role)
    reason = f"{computes.cached_tokens} tokens cached at the prefill engine"
    return Score(choice.engine.id, option.seconds, choice.cached_tokens, queued, reason, computes.engine.id)


def _matches(
    decodes: Sequence[EngineView], prefills: Sequence[EngineView]
) -> Iterator[tuple[list[EngineView], list[EngineView]]]:
    """Yield, for each kind of K/V, engines that can go on from it and engines that can compute it for them.

    One of the two at least is made for its part: engines for both are not known to ask each other. A revision that is
    tried out pairs with itself alone, or its figures would be those of the other one, too.
    """
    kinds = {kind: None for engine in decodes if (kind := _kind(engine)) is not None}
    for kind in kinds:
        partners = [engine for engine in prefills if _kind(engine) == kind]
        made = [engine for engine in partners if engine.role == "prefill"]
        fitting = [engine for engine in decodes if _kind(engine) == kind and (made or engine.role == "decode")]
        if partners and fitting:
            yield fitting, made or partners


def _kind(engine: EngineView) -> tuple[str, bool] | None:
    facts = engine.facts
    if facts is None or facts.kv_transfer is None:
        return None
    return facts.kv_transfer.compatibility, engine.endpoint.on_trial is not None

"""Chooses engines for requests, and turns what became of them into ejections, readiness and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
from pagefleet_protocol import headers
from pagefleet_protocol.fault_book import FaultBook

from pagefleet_router.engines.endpoints import EndpointTable, EngineView
from pagefleet_router.errors import Failure
from pagefleet_router.exchange.engine_answer import EngineError
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.in_flight import InFlight
from pagefleet_router.scheduling.kv_links import KvLinks
from pagefleet_router.scheduling.outliers import OutlierDetector
from pagefleet_router.scheduling.pairing import Pairing
from pagefleet_router.scheduling.policy import Choice, Policy, Score
from pagefleet_router.scheduling.retry_budget import RetryBudget
from pagefleet_router.scheduling.selection import candidates
from pagefleet_router.telemetry.faults import EJECTED, FAILURES
from pagefleet_router.telemetry.metrics import RouterMetrics
from pagefleet_router.wire.client_request import ClientRequest

logger = logging.getLogger(__name__)

_NOT_BUDGETED = frozenset(
    {Failure.REFUSED, Failure.RESET, Failure.ENDING, Failure.STOPPING, Failure.STRANGER, Failure.HANDOFF}
)
"""The work at the old engine is gone, so a retry replaces it and adds no load. The budget is against engines that are
there but fail: retries are what would keep them down."""
_KEY_PAUSE_S = 30.0
"""For so long an engine that does not believe this router is told of no transfer, unless it began anew."""
_NOT_THERE = frozenset({Failure.REFUSED, Failure.STRANGER})


@dataclass(slots=True)
class Dispatcher:
    """What all requests share when they look for an engine."""

    table: EndpointTable
    policy: Policy
    budget: RetryBudget
    outliers: OutlierDetector
    metrics: RouterMetrics
    clock: Callable[[], float]
    on_refused: Callable[[str], None]
    """Called with the id of an engine that ends, or is not at its address."""
    pairing: Pairing | None = None
    """None: every request goes to one engine."""
    faults: FaultBook | None = None
    """Where what goes wrong is noted for the console; None: there is none."""
    links: KvLinks = field(default_factory=KvLinks)
    _disbelieved: dict[str, str] = field(default_factory=dict, init=False)
    """Of engines that do not believe this router, by id: the incarnation of which the log says so."""

    def choose(self, view: RequestView, tried: Collection[str]) -> Choice | None:
        """Return an engine that was not tried yet; None when there is none."""
        engines = candidates(self.table.snapshot, view, tried)
        if not engines:
            return None
        if view.may_split and self.pairing is not None:
            return self.pairing.choose(view, engines, self.prefills(view, tried), self.links)
        return self.policy.choose(view, engines)

    def choose_whole(self, view: RequestView, tried: Collection[str]) -> Choice | None:
        """Return an engine that computes the prompt, too."""
        engines = candidates(self.table.snapshot, view, tried)
        return self.policy.choose(view, engines) if engines else None

    def prefills(self, view: RequestView, tried: Collection[str]) -> Sequence[EngineView]:
        """Return the engines that may compute a prompt for others and were not tried yet."""
        if self.pairing is None or not view.may_split or view.model is None:
            return ()
        return [one for one in self.table.snapshot.prefills.get(view.model, ()) if one.id not in tried]

    def explain(self, view: RequestView, tried: Collection[str]) -> tuple[Score, ...]:
        """Return how the engines look that `choose` would choose from now: ask before `begin` changes that."""
        engines = candidates(self.table.snapshot, view, tried)
        prefills = self.prefills(view, tried)
        if engines and prefills and self.pairing is not None:
            return self.pairing.explain(view, engines, prefills, self.links)
        return self.policy.explain(view, engines) if engines else ()

    def choose_again(self, view: RequestView, tried: Collection[str], failure: Failure) -> tuple[Choice | None, bool]:
        """Return an engine for a retry, if there is one and the budget allows it, and whether the budget counts it."""
        choice = self.choose(view, tried)
        if choice is None:
            return None, False
        counted = failure not in _NOT_BUDGETED
        if counted and not self.budget.try_retry():
            self.metrics.retries_denied += 1
            return None, False
        self.metrics.retries[failure.value] += 1
        return choice, counted

    def begin(self, view: RequestView, choice: Choice) -> InFlight:
        """Note that an engine is about to get a request."""
        return InFlight(view, choice, self.clock())

    def sent(self, view: RequestView, choice: Choice) -> None:
        """Note what an engine has been given: apart from `begin`, so that the request need not wait for it."""
        computes = choice.computes
        self.policy.sent(view, computes.engine, computes.rank)  # one that takes K/V has it only when it answers
        metrics, tokens = self.metrics, view.num_tokens
        metrics.pairs.choices[choice.kind] += 1
        hits = min(computes.cached_tokens, tokens)
        metrics.prefix_queries += tokens
        metrics.prefix_hits += hits
        if view.model is not None:
            metrics.prompt_tokens[view.model] += tokens - hits

    def succeeded(self, engine: EngineView, status: int = 200) -> None:
        """Note a whole answer below 500."""
        self.outliers.succeeded(engine.id)
        self.metrics.revisions.answered(engine, self.table.trials, status)

    def failed(self, engine: EngineView, failure: Failure) -> None:
        """Note that an engine gave no good answer."""
        self.metrics.failures[failure.value] += 1
        if self.faults is not None:
            self.faults.note(FAILURES[failure], engine.id)
        self.metrics.revisions.failed(engine, self.table.trials, failure)
        if failure is Failure.OWN:
            return  # until another engine shows that it can be answered
        if self.table.engine(engine.id) is None:
            return  # it left: nobody would ever take back what is noted now
        if failure in _NOT_THERE:
            self.policy.lost(engine.id)
            self.on_refused(engine.id)
        model = engine.endpoint.model
        if self.outliers.failed(engine.id, self.clock(), model, self.table.num_engines(model)):
            self.metrics.ejections += 1
            if self.faults is not None:
                self.faults.note(EJECTED, engine.id)
            self.table.set_ejected(engine.id, True)
            logger.warning("engine %s is ejected after failures in a row", engine.id)

    def is_stuck(self, engine: EngineView) -> bool:
        """Whether an engine is known to make no progress, though it has work."""
        now = self.table.engine(engine.id)
        return now is not None and now.stuck

    def ending(self, engine: EngineView) -> None:
        """Note that an engine takes no more requests. Of one that is not ours the same may mean that it is busy."""
        if engine.facts is not None:
            self.on_refused(engine.id)

    def restarted(self, engine: EngineView) -> None:
        """Note that an engine answered as another incarnation than its facts are of: they and its cache are gone."""
        now = self.table.engine(engine.id)
        if now is not None and now.facts is not None and now.facts == engine.facts:
            self.policy.lost(engine.id)
            self.table.set_facts(engine.id, None)

    def disbelieved(self, engine: EngineView, error: EngineError) -> None:
        """Say, once in an engine's life, that it refuses transfers of K/V of which this router tells it.

        Args:
            engine: as it was asked.
            error: what it said.
        """
        if error.fault == "not_believed":  # else it may be the request
            self.links.leave_alone(engine, self.clock() + _KEY_PAUSE_S)
        incarnation = "" if engine.facts is None else engine.facts.incarnation
        if self._disbelieved.get(engine.id) == incarnation:
            return
        self._disbelieved[engine.id] = incarnation
        logger.warning(
            "engine %s refuses what this router says of a transfer of K/V (%.300r): prompts are computed without it. "
            "If its fleet key is another, give this router and all engines the same --fleet-key-file and restart them",
            engine.id, error.message,
        )  # fmt: skip

    def healthy(self, engine_id: str) -> None:
        """Take a good probe as a reason to end an ejection whose time is over, and to review what is learned."""
        engine = self.table.engine(engine_id)
        if engine is not None:
            engine.rates.refresh(self.clock())
        if self.outliers.probed(engine_id, self.clock()):
            self.table.set_ejected(engine_id, False)
            logger.info("engine %s is back after its ejection", engine_id)

    def forget(self, engine_id: str) -> None:
        """Drop what is known of an engine that left."""
        self.policy.lost(engine_id)
        self.outliers.forget(engine_id)
        self.links.forget(engine_id)
        self.metrics.pairs.forget(engine_id)
        self._disbelieved.pop(engine_id, None)


MAX_ENGINES = 64
MAX_BYTES = 6000
"""Widely used clients and proxies refuse an answer with a longer line of a header (8 kB)."""
_EXPLAIN = headers.EXPLAIN.encode()


def wants_explanation(request: ClientRequest) -> bool:
    """Whether a client asks for the scores."""
    return request.fields.get(_EXPLAIN) == b"1"


def explanation(scores: Sequence[Score]) -> bytes:
    """Return the header's line: JSON in ASCII, of the best engines, as many as a header can hold."""
    best = sorted(scores, key=lambda score: score.seconds)[:MAX_ENGINES]
    rows = [
        {
            "engine": score.engine_id,
            "seconds": round(score.seconds, 6),
            "cached_tokens": score.cached_tokens,
            "queued_tokens": score.queued_tokens,
            "reason": score.reason,
            **({"prefill": score.prefill_id} if score.prefill_id else {}),
        }
        for score in best
    ]
    texts, size = [], 0
    for row in rows:
        # Outside strings JSON is ASCII, so that what is not can be escaped wherever it stands.
        text = "".join(one if one < "\x7f" else "".join(_escaped(one)) for one in msgspec.json.encode(row).decode())
        size += len(text) + 1
        if size > MAX_BYTES:
            break
        texts.append(text)
    return f"{headers.EXPLAIN}: [{','.join(texts)}]\r\n".encode()


def _escaped(char: str) -> list[str]:
    units = char.encode("utf-16-be")
    return [f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2)]

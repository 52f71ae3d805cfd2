"""What attempts became, by revision, while one is tried out: what the operator compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from pagefleet_protocol import metric_names as names
from pagefleet_protocol.endpoints import OnTrial
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.errors import Failure
from pagefleet_router.telemetry.histogram import SecondsHistogram

_NO_FAULT = frozenset({Failure.OWN, Failure.STOPPING})
"""The request's, or nobody's: the engine was told to stop."""

Trials = Mapping[str, OnTrial]
"""By model what is tried out, see `Snapshot.trials`."""


class RevisionCounts:
    """Of one revision."""

    __slots__ = ("first_token", "outcomes", "token_seconds")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.first_token = SecondsHistogram()
        self.token_seconds = SecondsHistogram()


class RevisionMetrics:
    """Counts from when a revision begins to be tried out until another one is; before and between it counts nothing."""

    def __init__(self) -> None:
        self._counts: dict[str, RevisionCounts] = {}

    def answered(self, engine: EngineView, trials: Trials, status: int) -> None:
        """Count a whole answer below 500."""
        counts = self._of(engine, trials)
        if counts is not None:
            counts.outcomes["refused" if status >= 400 else "answered"] += 1

    def failed(self, engine: EngineView, trials: Trials, failure: Failure) -> None:
        """Count an attempt without a good answer."""
        counts = self._of(engine, trials)
        if counts is not None and failure not in _NO_FAULT:
            counts.outcomes["failed"] += 1

    def first_token(self, engine: EngineView, trials: Trials, seconds: float) -> None:
        """Note how long a stream's first byte took, from when the engine was asked."""
        counts = self._of(engine, trials)
        if counts is not None:
            counts.first_token.observe(seconds)

    def between_tokens(self, engine: EngineView, trials: Trials, seconds: float) -> None:
        """Note a stream's mean time between two reads."""
        counts = self._of(engine, trials)
        if counts is not None:
            counts.token_seconds.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        outcomes = CounterMetricFamily(
            names.ROUTER_REVISION_REQUESTS.removesuffix("_total"), "Attempts.", labels=("revision", "outcome")
        )
        first = HistogramMetricFamily(names.ROUTER_REVISION_FIRST_TOKEN, "Until the first byte.", labels=("revision",))
        token = HistogramMetricFamily(names.ROUTER_REVISION_TOKEN, "Between two reads.", labels=("revision",))
        for revision, counts in self._counts.items():
            for outcome, count in counts.outcomes.items():
                outcomes.add_metric((revision, outcome), count)
            first.add_metric((revision,), counts.first_token.buckets(), counts.first_token.total)
            token.add_metric((revision,), counts.token_seconds.buckets(), counts.token_seconds.total)
        yield from (outcomes, first, token)

    def _of(self, engine: EngineView, trials: Trials) -> RevisionCounts | None:
        trial = trials.get(engine.endpoint.model) if trials else None
        if trial is None:
            return None
        if trial.revision not in self._counts:
            self._counts = {trial.revision: RevisionCounts(), names.STABLE: RevisionCounts()}
        return self._counts[names.STABLE if engine.endpoint.on_trial is None else trial.revision]

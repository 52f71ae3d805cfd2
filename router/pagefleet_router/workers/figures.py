"""The figures of all workers as those of one router: whichever is scraped answers for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagefleet_protocol import metric_names as names
from pagefleet_protocol.workers.exposition import Rule, add_up, merge
from pagefleet_protocol.workers.siblings import FIGURES, Siblings
from prometheus_client.core import CounterMetricFamily, Metric

_LEARNED = frozenset({names.ROUTER_PREFILL_RATE, names.ROUTER_DECODE_RATE, names.ROUTER_TRANSFER_RATE})
"""Means over those processes that say something."""
_SEEN_ALIKE = frozenset(
    {
        "pagefleet_router_endpoints",
        "pagefleet_router_engine_requests_running",
        "pagefleet_router_engine_requests_waiting",
        "pagefleet_router_engine_kv_usage_ratio",
        "pagefleet_router_kv_blocks",
        "pagefleet_router_kv_engines_followed",
        names.ROUTER_ROLE_ENGINES,
        names.ROUTER_ROLE_REQUESTS,
        names.ROUTER_ROLE_WAITING,
        names.ROUTER_ROLE_KV_USAGE,
    }
)
"""What engines say of themselves: the word of the process that answers."""
_FLEET = "pagefleet_router_fleet_"
_LARGEST = frozenset({names.ROUTER_FLEET_GENERATED_TOKENS})
"""Counted by each for the whole fleet since it looks: the one that has looked for longest is right."""


def rule_of(family: str) -> Rule:
    """Return how a family's values become one."""
    if family in _LARGEST:
        return "largest"
    if family in _LEARNED:
        return "mean"
    return "own" if family in _SEEN_ALIKE or family.startswith(_FLEET) else add_up(family)


class WorkersFigures:
    """Asks the other workers for theirs.

    Args:
        own: returns the exposition of this one.
        siblings: the others.
    """

    def __init__(self, own: Callable[[], bytes], siblings: Siblings) -> None:
        self._own = own
        self._siblings = siblings

    async def gather(self) -> bytes:
        """Return the exposition of all workers that answer in time."""
        return merge(self._own(), await self._siblings.ask(FIGURES), rule_of)

    def collect(self) -> Iterator[Metric]:
        """Yield what this worker counts of the others."""
        text = "Times that a process of this router did not tell its figures in time."
        yield CounterMetricFamily("pagefleet_router_silent_workers", text, value=self._siblings.num_silent)

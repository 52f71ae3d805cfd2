"""What the routers of a service counted of both revisions since a step of a trial began."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pagefleet_protocol import metric_names as names
from pagefleet_protocol.inference_status import CanaryStatus

from pagefleet_operator.autoscale.router_page import count_of
from pagefleet_operator.plan.canary import Latency, RevisionFigures, Step, TrialFigures, step_of

_SAMPLE = re.compile(r"(pagefleet_router_revision_[a-z_]+)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(revision|outcome|le)="([^"]*)"')
_Counts = Mapping[tuple[str, str, str], float]
"""By name, revision and outcome."""


class TrialWindow:
    """Keeps each router's counters of when the step began, and of now. One that begins anew counts from nothing."""

    def __init__(self) -> None:
        self._step: Step | None = None
        self._first: dict[str, _Counts] = {}
        self._last: dict[str, _Counts] = {}

    @property
    def is_followed(self) -> bool:
        """Whether something is tried out."""
        return self._step is not None

    def follow(self, status: CanaryStatus | None) -> None:
        """Begin to count anew where the trial is at another step."""
        if step_of(status) != self._step:
            self._step = step_of(status)
            self._first = dict(self._last)

    def hear(self, router: str, page: bytes) -> None:
        """Take in a router's page of metrics."""
        counts = _read(page)
        if router not in self._last:
            self._first[router] = counts  # what it counted before anybody listened may be of another step
        elif any(counts.get(name, 0.0) < value for name, value in self._first[router].items()):
            self._first[router] = {}
        self._last[router] = counts

    def keep_only(self, routers: frozenset[str]) -> None:
        """Forget routers that are gone, with what they counted."""
        for gone in self._last.keys() - routers:
            del self._last[gone]
            self._first.pop(gone, None)

    def figures(self) -> TrialFigures | None:
        """Return what was counted since; None: no router says anything of the revision that is tried out."""
        revision = self._step[0] if self._step else ""
        if not any(key[1] == revision for counts in self._last.values() for key in counts):
            return None
        return TrialFigures(self._of(revision), self._of(names.STABLE), self._step)

    def _of(self, revision: str) -> RevisionFigures:
        def count(name: str, outcome: str = "") -> float:
            key = (name, revision, outcome)
            return sum(now.get(key, 0.0) - self._first[router].get(key, 0.0) for router, now in self._last.items())

        def latency(name: str) -> Latency:
            return Latency(round(count(f"{name}_count")), count(f"{name}_sum"))

        return RevisionFigures(
            answered=round(count(names.ROUTER_REVISION_REQUESTS, "answered")),
            refused=round(count(names.ROUTER_REVISION_REQUESTS, "refused")),
            failed=round(count(names.ROUTER_REVISION_REQUESTS, "failed")),
            first_token=latency(names.ROUTER_REVISION_FIRST_TOKEN),
            between_tokens=latency(names.ROUTER_REVISION_TOKEN),
        )


def _read(page: bytes) -> _Counts:
    found = {}
    for line in page.decode(errors="replace").splitlines():
        sample = _SAMPLE.fullmatch(line)
        labels = dict(_LABEL.findall(sample[2])) if sample else {}
        if sample is None or "le" in labels or sample[1].endswith("_created"):
            continue
        value = count_of(sample[3])
        if value is not None:
            found[sample[1], labels.get("revision", ""), labels.get("outcome", "")] = value
    return found

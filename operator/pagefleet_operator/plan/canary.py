"""Whether a new revision that is tried out goes on, replaces the old one, or goes back; and why.

Stateless: from the status before and from what routers counted since the step began. A revision that went back stays
back until another one is wanted. Missing figures are waited for, and then are a reason to go back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, sqrt
from typing import Literal

from pagefleet_protocol.canary import Canary, CanaryAnalysis
from pagefleet_protocol.inference_status import CanaryStatus

Phase = Literal["Starting", "Analysing", "Promoted", "RolledBack"]
CONFIDENCE = 1.96
"""Standard deviations: a share counts as greater where chance alone would make it so in one of forty trials."""
LEAST_HITS = 3
"""Requests that must have ended badly: one or two may be their clients' mistakes."""
LEAST_DELAY_S = 0.005
"""A longer time to the first token that nobody notices; between two tokens a fifth of it."""


@dataclass(frozen=True, slots=True)
class Latency:
    """What was measured."""

    count: int = 0
    seconds: float = 0.0
    """In all."""

    @property
    def mean(self) -> float:
        return self.seconds / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class RevisionFigures:
    """What became of the requests that one revision got."""

    answered: int = 0
    refused: int = 0
    failed: int = 0
    first_token: Latency = Latency()
    between_tokens: Latency = Latency()

    @property
    def requests(self) -> int:
        return self.answered + self.refused + self.failed


Step = tuple[str, str, int]
"""Of a trial: revision, phase and number."""


@dataclass(frozen=True, slots=True)
class TrialFigures:
    """What routers counted of both revisions in the same time."""

    new: RevisionFigures = RevisionFigures()
    old: RevisionFigures = RevisionFigures()
    step: Step | None = None
    """Since whose beginning it was counted."""


def step_of(status: CanaryStatus | None) -> Step | None:
    """Return the step that a trial is at."""
    return (status.revision, status.phase, status.step) if status else None


@dataclass(frozen=True, slots=True)
class TrialSeen:
    """What is so now."""

    revision: str
    """The wanted one."""
    now: datetime
    engines: tuple[tuple[int, int], ...]
    """Of engines for whole requests, or of each part: how many the service is to have, and how many of the new revision
    answer."""
    figures: TrialFigures | None = None
    """None: no router says any."""
    trouble: str = ""
    """Why engines of the new revision do not answer."""
    hopeless: bool = False
    """Whether that will not pass."""


def engines_on_trial(canary: Canary, status: CanaryStatus, replicas: int) -> int:
    """Return how many engines of the new revision a step has, besides all of the old one; of two parts, of each."""
    if status.phase in ("Promoted", "RolledBack"):
        return 0
    return _engines(canary, status.step, replicas)


def next_status(canary: Canary, progress_s: int, before: CanaryStatus | None, seen: TrialSeen) -> CanaryStatus:
    """Return what becomes of the trial now.

    Args:
        progress_s: what a step's engines have to get ready.
        before: the last status, be it of another revision.
    """
    if before is None or before.revision != seen.revision:
        return _status(canary, seen, "Starting", 1, 0)
    if before.phase in ("Promoted", "RolledBack"):
        return before
    if seen.hopeless:
        return _back(before, seen, f"its engines fail: {seen.trouble}")
    if before.phase == "Starting":
        return _started(canary, progress_s, before, seen)
    return _analysed(canary, before, seen)


def _analysed(canary: Canary, before: CanaryStatus, seen: TrialSeen) -> CanaryStatus:
    """Compare, and go on once the step has had its time and its requests."""
    step, rules = canary.plan[min(before.step, len(canary.plan)) - 1], canary.analysis
    counted = seen.figures if seen.figures and seen.figures.step == step_of(before) else None
    age_s, figures = _age_s(before, seen.now), counted or TrialFigures()
    has_waited = age_s >= step.seconds + rules.patience
    enough = LEAST_HITS if has_waited else max(1, rules.min_requests // 2)
    if worse := next(_worse(rules, figures, enough), None):
        return _back(before, seen, worse)
    if figures.new.requests < rules.min_requests:
        return _back(before, seen, _too_little(rules, counted)) if has_waited else before
    if age_s < step.seconds or (not has_waited and _is_unmeasured(figures, enough)):
        return before
    if before.step >= len(canary.plan):
        return _status(canary, seen, "Promoted", before.step, before.percent, _compared(figures))
    return _status(canary, seen, "Starting", before.step + 1, before.percent)


def _started(canary: Canary, progress_s: int, before: CanaryStatus, seen: TrialSeen) -> CanaryStatus:
    """Begin to send requests once all engines of the step answer."""
    wanted = min(before.step, len(canary.plan))
    if all(ready >= _engines(canary, wanted, replicas) for replicas, ready in seen.engines):
        return _status(canary, seen, "Analysing", wanted, canary.plan[wanted - 1].percent)
    if _age_s(before, seen.now) >= progress_s:
        why = f": {seen.trouble}" if seen.trouble else ""
        return _back(before, seen, f"its engines were not ready within rollout.progressSeconds{why}")
    return before


def _engines(canary: Canary, step: int, replicas: int) -> int:
    percent = canary.plan[min(step, len(canary.plan)) - 1].percent
    return max(1, ceil(percent * replicas / 100))


def _is_unmeasured(figures: TrialFigures, enough: int) -> bool:
    """Whether the new revision had too few streams to be compared by, of which the old one had enough."""
    new, old = figures.new, figures.old
    both = (new.first_token, old.first_token), (new.between_tokens, old.between_tokens)
    return any(here.count < enough <= there.count for here, there in both)


def _worse(rules: CanaryAnalysis, figures: TrialFigures, enough: int) -> Iterator[str]:
    """Yield in what the new revision is worse than it may be; latencies where both were measured often enough."""
    new, old = figures.new, figures.old
    for what, mine, others, more in (
        ("fail", new.failed, old.failed, rules.max_errors),
        ("are refused", new.refused, old.refused, rules.max_refusals),
    ):
        before = others / old.requests if old.requests else 0.0
        if mine >= LEAST_HITS and at_least(mine, new.requests) > before + more / 100:
            yield f"{mine} of its {new.requests} requests {what}, of the old revision's {100 * before:.1f} %"
    for what, here, there, percent, least in (
        ("first tokens take", new.first_token, old.first_token, rules.max_ttft, LEAST_DELAY_S),
        ("tokens take", new.between_tokens, old.between_tokens, rules.max_itl, LEAST_DELAY_S / 5),
    ):
        if min(here.count, there.count) >= enough and here.mean > there.mean * (1 + percent / 100) + least:
            yield f"its {what} {here.mean:.3f} s, the old revision's {there.mean:.3f} s"


def at_least(hits: int, trials: int) -> float:
    """Return the share that is at least behind so many hits: the lower end of Wilson's interval."""
    if not hits:
        return 0.0
    share, z2 = hits / trials, CONFIDENCE**2
    middle = share + z2 / (2 * trials)
    spread = CONFIDENCE * sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return (middle - spread) / (1 + z2 / trials)


def _too_little(rules: CanaryAnalysis, figures: TrialFigures | None) -> str:
    if figures is None:
        return "no router said what became of its requests"
    return f"it had {figures.new.requests} requests of the {rules.min_requests} that it takes to compare them"


def _compared(figures: TrialFigures) -> str:
    new, old = figures.new, figures.old
    parts = [f"{new.failed} of {new.requests} requests failed, of the old revision's {old.failed} of {old.requests}"]
    if new.first_token.count and old.first_token.count:
        parts.append(f"first tokens took {new.first_token.mean:.3f} s and {old.first_token.mean:.3f} s")
    if new.between_tokens.count and old.between_tokens.count:
        parts.append(f"tokens {new.between_tokens.mean:.4f} s and {old.between_tokens.mean:.4f} s")
    return "; ".join(parts)


def _status(canary: Canary, seen: TrialSeen, phase: Phase, step: int, percent: int, found: str = "") -> CanaryStatus:
    steps = len(canary.plan)
    wanted = canary.plan[min(step, steps) - 1]
    words: dict[Phase, str] = {
        "Starting": f"step {step} of {steps}: engines of the new revision start, "
        f"{sum(_engines(canary, step, each) for each, _ in seen.engines)} for {wanted.percent} % of the requests",
        "Analysing": f"step {step} of {steps}: the new revision gets {wanted.percent} % of the requests for "
        f"{wanted.seconds} s, and at least {canary.analysis.min_requests}",
        "Promoted": f"the new revision is no worse, and replaces the old one: {found}",
    }
    return CanaryStatus(
        revision=seen.revision, phase=phase, step=step, percent=percent, message=words[phase], since=_text(seen.now)
    )


def _back(before: CanaryStatus, seen: TrialSeen, why: str) -> CanaryStatus:
    after = "The old one serves on; correct the spec, or undo the edit"
    message = f"the new revision went back at step {before.step}: {why}. {after}"
    changed = {"phase": "RolledBack", "percent": 0, "message": message, "since": _text(seen.now)}
    return before.model_copy(update=changed)


def _age_s(status: CanaryStatus, now: datetime) -> float:
    try:
        since = datetime.fromisoformat(status.since)
    except ValueError:
        return 0.0
    since = since.replace(tzinfo=UTC) if since.tzinfo is None else since
    return (now.astimezone(UTC) - since).total_seconds()


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

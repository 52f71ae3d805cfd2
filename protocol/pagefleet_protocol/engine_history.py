"""What an engine did in the last minute, from its metrics: rates of counters, percentiles of a histogram."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pagefleet_protocol import metric_names as names
from pagefleet_protocol.console_state import Seconds
from pagefleet_protocol.exposition import metric_mark, sample_values

MARK_S = 5.0
"""Between two looks at all counters."""
WINDOW_S = 60.0
_COUNTERS = (
    names.ENGINE_PROMPT_TOKENS,
    names.ENGINE_GENERATION_TOKENS,
    names.ENGINE_PREFIX_CACHE_QUERIES_TOKENS,
    names.ENGINE_PREFIX_CACHE_HITS_TOKENS,
    names.ENGINE_NAN_REQUESTS,
    names.ENGINE_OUT_OF_MEMORY_STEPS,
)
_MARKS = tuple(map(metric_mark, _COUNTERS))
_BUCKET_MARK = b"\n" + names.ENGINE_FIRST_TOKEN_SECONDS.encode() + b"_bucket{"
_BUCKET = re.compile(rb'[^\n]*?le="([^"\n]+)"[^\n]*\} +([0-9.e+-]+)')


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's counters at one moment; those that it does not tell are 0."""

    at: float
    """Seconds, monotonic."""
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    queried_tokens: float = 0.0
    """Prompt tokens that were looked up in the prefix cache."""
    hit_tokens: float = 0.0
    nan_requests: float = 0.0
    out_of_memory_steps: float = 0.0
    first_token: tuple[tuple[float, float], ...] = ()
    """Cumulative counts by upper bound in seconds, ascending, the last bound infinite."""


@dataclass(frozen=True, slots=True)
class Recent:
    """The last seconds of an engine. None: there was nothing to measure."""

    prompt_tokens_s: float | None = None
    """Of the last five to ten seconds."""
    generated_tokens_s: float | None = None
    """Of the last five to ten seconds."""
    prefix_hit_ratio: float | None = None
    """Of the last minute."""
    ttft: Seconds | None = None
    """Of the last minute."""


def parse_counters(text: bytes, at: float) -> Counters:
    """Read an exposition; `at` is when it was asked for. What is no number is taken as not told."""
    text = b"\n" + text
    prompt, generated, queried, hit, nan, memory = (sum(map(_number, sample_values(text, mark))) for mark in _MARKS)
    buckets: dict[float, float] = {}
    for bound, count in _buckets(text):
        buckets[bound] = buckets.get(bound, 0.0) + count
    return Counters(at, prompt, generated, queried, hit, nan, memory, tuple(sorted(buckets.items())))


def _buckets(text: bytes) -> Iterator[tuple[float, float]]:
    at = text.find(_BUCKET_MARK)
    while at >= 0:
        at += len(_BUCKET_MARK)
        found = _BUCKET.match(text, at)
        if found is not None:
            bound = math.inf if found[1] == b"+Inf" else _number(found[1])
            yield bound, _number(found[2])
        at = text.find(_BUCKET_MARK, at)


def _number(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


class EngineHistory:
    """Remembers one engine's counters for a minute.

    An exposition is kept as it came, and only read every MARK_S seconds or when somebody wants to know: most of the
    time nobody does.
    """

    __slots__ = ("_latest", "_latest_at", "_marks")

    def __init__(self) -> None:
        self._marks: deque[Counters] = deque()
        self._latest = b""
        self._latest_at = -math.inf

    def note(self, text: bytes, at: float) -> Counters | None:
        """Take an exposition that came `at`; returns the counters where this was the time to read them."""
        self._latest, self._latest_at = text, at
        if self._marks and at - self._marks[-1].at < MARK_S:
            return None
        mark = parse_counters(text, at)
        if self._marks and mark.generated_tokens < self._marks[-1].generated_tokens:
            self._marks.clear()  # it began anew
        self._marks.append(mark)
        while len(self._marks) > 1 and at - self._marks[0].at > WINDOW_S:
            self._marks.popleft()
        return mark

    def recent(self) -> Recent:
        """Return what it did lately, as of the last exposition."""
        now = parse_counters(self._latest, self._latest_at)
        before = next((one for one in reversed(self._marks) if now.at - one.at >= max(MARK_S, 0.001)), None)
        if before is None:
            return Recent()
        long_before, seconds = self._marks[0], now.at - before.at
        queried = now.queried_tokens - long_before.queried_tokens
        return Recent(
            prompt_tokens_s=_rate(now.prompt_tokens - before.prompt_tokens, seconds),
            generated_tokens_s=_rate(now.generated_tokens - before.generated_tokens, seconds),
            prefix_hit_ratio=_ratio(now.hit_tokens - long_before.hit_tokens, queried),
            ttft=percentiles(long_before.first_token, now.first_token),
        )


def _rate(count: float, seconds: float) -> float | None:
    return round(count / seconds, 3) if count >= 0 else None  # less than before: it began anew


def _ratio(part: float, whole: float) -> float | None:
    return round(min(1.0, max(0.0, part / whole)), 4) if whole > 0 else None


def percentiles(
    before: tuple[tuple[float, float], ...], now: tuple[tuple[float, float], ...]
) -> Seconds | None:  # fmt: skip
    """Return the percentiles of what two states of a histogram differ in; None where that is nothing."""
    old = dict(before)
    counts = [(bound, count - old.get(bound, 0.0)) for bound, count in now]
    if not counts or counts[-1][1] <= 0:
        return None
    return Seconds(p50=_quantile(counts, 0.5), p95=_quantile(counts, 0.95))


def _quantile(counts: list[tuple[float, float]], share: float) -> float:
    """Interpolate within the bucket, as Prometheus does; what is over the last bound is taken as that."""
    rank = share * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound):
                return low
            inside = count - below
            return round(low + (bound - low) * ((rank - below) / inside if inside > 0 else 1.0), 4)
        low, below = bound, count
    return low

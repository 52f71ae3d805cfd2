"""How fast engines are, learned from their answers: robust means of logarithms that start from what siblings showed.

Logarithms, because rates are positive and wrong by factors; clipped, because a pause of a second says little.
"""

from __future__ import annotations

import math
from weakref import WeakSet

_START_EVIDENCE = 1.0
"""Samples that the siblings' estimate is worth against an engine's own."""
_MOST_EVIDENCE = 8.0
"""So that a new sample always weighs 1/9: twenty samples are enough to notice an engine that became ten times slower,
while samples that scatter by a factor of 1.6 move the estimate by an eighth."""
_SIBLING_EVIDENCE = 64.0
"""The same for what a model's engines have in common."""
_CLIP = 1.0
"""The furthest that a sample counts from the estimate, in powers of e."""
_HALF_LIFE_S = 300.0
"""Of an engine's evidence while nothing comes: an engine that nobody asks is given another chance."""
_RATE_TOKENS = 512
"""Waits for fewer tokens tell of the overhead, for more of the rate."""
_MIN_POLL_S = 0.2
_SAMPLE_GAP_S = 0.01
"""Whole answers are looked at a hundred times a second: more would say the same."""


class Estimate:
    """One positive number.

    Args:
        start: its value until there is a sample, if there is no `prior`.
        prior: what the siblings of this engine showed.
    """

    __slots__ = ("__weakref__", "_at", "_evidence", "_followers", "_log", "_prior", "value")

    def __init__(self, start: float, prior: Estimate | None = None) -> None:
        self.value: float = start if prior is None else prior.value
        """The estimate, finite and above zero; without samples of its own, that of the siblings."""
        self._prior = prior
        self._log = math.log(self.value)
        self._evidence = 0.0
        self._at = 0.0
        self._followers: WeakSet[Estimate] = WeakSet()
        """Those without samples of their own whose prior this is."""
        if prior is not None:
            prior._followers.add(self)

    @property
    def is_learned(self) -> bool:
        """Whether there was a sample, of this engine or of a sibling."""
        return self._evidence > 0.0 or (self._prior is not None and self._prior.is_learned)

    def observe(self, sample: float, now: float) -> None:
        """Take a sample into account; one that is no positive number is dropped."""
        if not 0.0 < sample < math.inf:
            return
        log = math.log(sample)
        if self._prior is not None:
            self._prior.observe(sample, now)
        if self._evidence:
            log = self._log + min(max(log - self._log, -_CLIP), _CLIP)
        elif self._prior is not None:
            self._prior._followers.discard(self)
        self._decay(now)
        self._log += (log - self._log) / (self._evidence + 1.0)
        limit = _SIBLING_EVIDENCE if self._prior is None else _MOST_EVIDENCE
        self._evidence = min(self._evidence + 1.0, limit)
        self._blend()

    def refresh(self, now: float) -> None:
        """Let old evidence fade; called now and then."""
        if self._prior is not None:
            self._decay(now)
            self._blend()

    def _decay(self, now: float) -> None:
        if self._prior is not None and self._evidence and now > self._at:
            self._evidence *= math.exp2((self._at - now) / _HALF_LIFE_S)
        self._at = now

    def _blend(self) -> None:
        log = self._log
        if self._prior is not None:
            weight = self._evidence + _START_EVIDENCE
            log = (log * self._evidence + math.log(self._prior.value) * _START_EVIDENCE) / weight
        self.value = math.exp(min(max(log, -20.0), 20.0))
        for follower in self._followers:
            follower.value = self.value


class EngineRates:
    """What is learned of one engine; lives as long as it does.

    Args:
        siblings: what the engines of its model have in common.
    """

    __slots__ = (
        "_finished_at", "_generated", "_generated_at", "_siblings", "_whole_at", "decode", "overhead", "prefill",
        "request_seconds",
    )  # fmt: skip

    def __init__(self, siblings: EngineRates | None = None) -> None:
        self.prefill: Estimate = Estimate(10_000.0, None if siblings is None else siblings.prefill)
        """Uncached prompt tokens a second. The start is near llm-d's default for an unknown engine (15,928)."""
        self.overhead: Estimate = Estimate(0.02, None if siblings is None else siblings.overhead)
        """Seconds to the first token of a prompt that needs next to no computation."""
        self.decode: Estimate = Estimate(100_000.0, None if siblings is None else siblings.decode)
        """Tokens a second that it generates for all requests together: too many to cost anything, until learned."""
        self.request_seconds: Estimate = Estimate(2.0, None if siblings is None else siblings.request_seconds)
        """How long a request takes from its sending to its end."""
        self._siblings = siblings
        self._finished_at = self._whole_at = -math.inf
        self._generated: float | None = None
        self._generated_at = 0.0

    def first_byte(self, num_tokens: int, seconds: float, now: float) -> None:
        """Learn from the beginning of a stream.

        Args:
            num_tokens: uncached ones that were waiting when it was sent, its own included.
            seconds: from then to the first byte.
            now: the time.
        """
        if num_tokens < _RATE_TOKENS:
            self.overhead.observe(max(seconds - num_tokens / self.prefill.value, 1e-4), now)
        elif seconds > 0.0:
            self.prefill.observe(num_tokens / max(seconds - self.overhead.value, 0.5 * seconds), now)

    def whole(self, num_tokens: int, seconds: float, now: float) -> None:
        """Learn from an answer that came as a whole: it says something only where it came sooner than expected.

        That is a lower bound and scatters, so that it teaches what the engines have in common: engines must not look
        different for it.
        """
        if now - self._whole_at < _SAMPLE_GAP_S:
            return
        common = self._siblings or self
        if seconds < common.overhead.value + num_tokens / common.prefill.value:
            self._whole_at = now
            common.first_byte(num_tokens, seconds, now)

    def finished(self, seconds: float, now: float) -> None:
        """Learn from a request that was answered."""
        if now - self._finished_at >= _SAMPLE_GAP_S:
            self._finished_at = now
            self.request_seconds.observe(seconds, now)

    def refresh(self, now: float) -> None:
        """Let old evidence fade, and follow the siblings as far as there is none; called every second or so."""
        for estimate in (self.prefill, self.overhead, self.decode, self.request_seconds):
            estimate.refresh(now)

    def polled(self, num_generated: float | None, num_running: float, now: float) -> None:
        """Learn from a poll: the engine's counter of generated tokens, and how many requests run.

        What was generated by an engine that had nothing to do for a part of the time says little, so that both this
        poll and the last one must have found requests running.
        """
        last, since = self._generated, now - self._generated_at
        if last is not None and num_generated is not None and since < _MIN_POLL_S:
            return
        self._generated = num_generated if num_running > 0 else None
        self._generated_at = now
        if last is not None and self._generated is not None:
            self.decode.observe((self._generated - last) / since, now)

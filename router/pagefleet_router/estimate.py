"""A positive number learned from samples: a robust mean of logarithms that starts from what siblings showed.

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

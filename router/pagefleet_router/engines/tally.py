"""What this router has sent to one engine: a live count, because a copy of it would always be late."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

_HALF_LIFE_S = 20.0
_MOST_OVER = 64
"""Of those that are kept, how many may be over although one before them is not."""
_SETTLE_S = 0.1
"""Weights that are this old are as good as current: they have lost a third of a percent."""


class Prefill:
    """The uncached prompt tokens of one request, while they wait or are computed."""

    __slots__ = ("tokens", "until")

    def __init__(self, tokens: int, until: float) -> None:
        self.tokens = tokens
        self.until = until
        """When they count no longer, whatever is heard of them."""


@dataclass(slots=True)
class Tally:
    """What was sent to one engine and has not come back yet, and how much was sent lately."""

    num_requests: int = 0
    num_tokens: int = 0
    """Uncached prompt tokens that are not known to be computed; see `queued`."""
    recent: float = 0.0
    """Requests ever sent, old ones weighing less (see `settle`)."""
    stored: float = 0.0
    """Uncached prompt tokens ever sent, which its cache had to make room for; old ones weigh less, as in `recent`."""
    recent_at: float = 0.0
    unpolled: int = 0
    """Uncached prompt tokens sent since the engine was last asked for its load, which does not show them."""
    rank_tokens: Counter[int] = field(default_factory=Counter)
    """What the requests for which the router chose them cost its data ranks: tokens, see `InFlight`."""
    _timed: deque[Prefill] = field(default_factory=deque)
    """Prefills whose end nobody will tell, in the order of their `until`."""

    def begin(self, tokens: int, now: float, until: float = math.inf) -> Prefill:
        """Count a request that is being sent.

        Args:
            tokens: uncached ones of its prompt.
            now: the time.
            until: when its prompt is probably computed, if nobody is going to tell.
        """
        prefill = Prefill(tokens, until)
        self.num_requests += 1
        self.num_tokens += tokens
        self.unpolled += tokens
        self.recent = self.settle(now) + 1.0
        self.stored += tokens
        if until < math.inf:
            self._timed.append(prefill)
            if len(self._timed) > 2 * self.num_requests + _MOST_OVER:
                self._timed = deque(one for one in self._timed if one.tokens)
        return prefill

    @property
    def num_timed(self) -> int:
        """How many prefills are kept because nobody may tell of their end."""
        return len(self._timed)

    def prefilled(self, prefill: Prefill) -> None:
        """Count a prompt as computed; once is as good as twice."""
        self.num_tokens -= prefill.tokens
        prefill.tokens = 0

    def end(self) -> None:
        """Count a request's end."""
        self.num_requests -= 1

    def queued(self, now: float) -> int:
        """Return the uncached tokens that a new request would find before it."""
        timed = self._timed
        while timed and timed[0].until <= now:
            self.prefilled(timed.popleft())
        return self.num_tokens

    def settle(self, now: float) -> float:
        """Return `recent` as of `now`, as `stored` is then too: a request's weight halves every 20 s."""
        if now - self.recent_at >= _SETTLE_S:
            weight = math.exp2((self.recent_at - now) / _HALF_LIFE_S)
            self.recent *= weight
            self.stored *= weight
            self.recent_at = now
        return self.recent

"""One request at one engine, from the moment it is sent until its answer is over: what the engine's tally counts.

What its answer shows of the engine's speed is learned here too.
"""

from __future__ import annotations

import math

from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.policy import Choice

OUTPUT_TOKENS = 256
"""What an open answer counts for at its data rank, as where an engine chooses the rank itself."""


class InFlight:
    """Counts itself at its engine when it is made; `over` ends that and may be called again."""

    __slots__ = ("_is_answered", "_is_over", "_num_waiting", "_prefill", "_rank_tokens", "choice", "sent_at", "view")

    def __init__(self, view: RequestView, choice: Choice, now: float) -> None:
        self.view = view
        self.choice = choice
        self.sent_at = now
        self._is_over = self._is_answered = False
        engine = choice.engine
        tokens = max(view.num_tokens - choice.cached_tokens, 0)
        self._num_waiting = tokens + engine.tally.queued(now)
        self._rank_tokens = OUTPUT_TOKENS + (0 if choice.prefill else tokens)
        self._count_at_rank(self._rank_tokens)
        until = math.inf
        if not view.stream and choice.prefill is None:
            # Its first byte comes with the last: nobody tells when the prompt is computed.
            until = now + engine.rates.overhead.value + self._num_waiting / engine.rates.prefill.value
        self._prefill = engine.tally.begin(tokens, now, until)
        if choice.prefill is not None:
            engine.tally.prefilled(self._prefill)  # these tokens need KV there, and are computed elsewhere

    def answering(self, now: float) -> None:
        """Note that an answer without an error has begun: of a stream, the prompt is computed."""
        if self._is_answered:
            return
        self._is_answered = True
        if self.view.stream and self.choice.prefill is None:
            engine = self.choice.engine
            engine.tally.prefilled(self._prefill)
            engine.rates.first_byte(self._num_waiting, now - self.sent_at, now)

    def end(self, now: float) -> None:
        """Note that nothing more comes, for whatever reason."""
        if self._is_over:
            return
        self._is_over = True
        engine = self.choice.engine
        engine.tally.prefilled(self._prefill)
        engine.tally.end()
        self._count_at_rank(-self._rank_tokens)
        if self._is_answered:
            seconds = now - self.sent_at
            engine.rates.finished(seconds, now)
            if not self.view.stream and self.choice.prefill is None:
                engine.rates.whole(self._num_waiting, seconds, now)

    def _count_at_rank(self, tokens: int) -> None:
        if self.choice.rank is not None:
            self.choice.engine.tally.rank_tokens[self.choice.rank] += tokens

"""One request at one engine, from the moment it is sent until its answer is over: what the engine's tally counts."""

from __future__ import annotations

from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.policy import Choice


class Attempt:
    """Counts itself at its engine when it is made; `over` ends that and may be called again."""

    __slots__ = ("_is_over", "_work", "choice", "sent_at", "view")

    def __init__(self, view: RequestView, choice: Choice, now: float) -> None:
        self.view = view
        self.choice = choice
        self.sent_at = now
        self._is_over = False
        self._work = len(view.pieces) - choice.num_matched
        choice.engine.tally.begin(self._work, now)

    def answering(self, now: float) -> None:
        """Note that the answer has begun: of a stream, the prompt is computed."""

    def over(self, now: float) -> None:
        """Note that nothing more comes, for whatever reason."""
        if not self._is_over:
            self._is_over = True
            self.choice.engine.tally.end(self._work)

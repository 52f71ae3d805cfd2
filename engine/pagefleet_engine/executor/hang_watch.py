"""Which rank hangs: a decision over the signs of all, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_engine.executor.vital_signs import Awaited, Signs

HANG_S = 8.0
"""Without a sign, at rest, or awaited by the other ranks of its stage, before a rank counts as hung."""
STAGE_HANG_S = 60.0
"""At work on one step: long prompts on a slow processor take many seconds."""
LOOK_S = 0.5
"""Between two looks."""
_LATE_S = 3.0


class HangWatch:
    """Judges the signs of ranks that serve, look by look.

    A look that comes late says nothing about the ranks: this process was stopped itself, maybe with all of them. Who
    waits for others does not hang, and who computes may take long. But ranks that divide layers among them compute the
    same for as long; and one that neither waits nor computes will never come out of its step. The stages of a pipeline
    are steps apart: where all of them seem to be at work, the first of those that are least far hangs, after long.

    Args:
        abreast: how many neighbours divide layers among them.

    Attributes:
        num_given: steps that were sent to all ranks, as their sender counts them.
    """

    def __init__(self, abreast: int) -> None:
        self._abreast = abreast
        self.num_given = 0
        self._looked_at = -_LATE_S
        self._watched_since = 0.0
        self._behind: dict[int, tuple[int, int, float]] = {}
        """Of ranks with a step to do that others have done: what each had launched and finished, and since when."""

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next look."""
        return now - self._looked_at >= LOOK_S

    def look(self, signs: Sequence[Signs], now: float) -> tuple[int, str] | None:
        """Return a rank that hangs and how that shows, if there is one."""
        if now - self._looked_at >= _LATE_S:
            self._watched_since = now
            self._behind = {}
        self._looked_at = now
        for rank, sign in enumerate(signs):
            first = rank - rank % self._abreast
            if (how := self._judge(rank, sign, signs[first : first + self._abreast], len(signs), now)) is not None:
                return rank, how
        return None

    def _judge(self, rank: int, sign: Signs, stage: Sequence[Signs], size: int, now: float) -> str | None:
        def seconds(since: float) -> float:
            return now - max(since, self._watched_since)

        if (silent := seconds(sign.stamped_at)) > HANG_S:
            return f"gave no sign of life for {silent:.0f} s"
        if sign.awaits is Awaited.NOBODY:
            busy = seconds(sign.awaits_since)
            if (idle := min(busy, seconds(sign.worked_at))) > HANG_S:
                return f"has done nothing within a step for {idle:.0f} s"
            awaited = [seconds(peer.awaits_since) for peer in stage if peer.awaits is Awaited.TENSOR]
            if (late := min(busy, max(awaited, default=0.0))) > HANG_S:
                return f"did not come to the other ranks of its stage for {late:.0f} s"
        is_left_behind = any(sign.launched < peer.launched for peer in stage)
        is_behind = is_left_behind or (self._abreast < size and sign.finished < self.num_given)
        launched, finished, since = self._behind.pop(rank, (-1, -1, now))
        if not is_behind or sign.awaits is Awaited.STAGE:
            return None
        if (launched, finished) != (sign.launched, sign.finished):
            since = now
        if now - since > (HANG_S if is_left_behind else STAGE_HANG_S):
            return f"did not come out of a step for {now - since:.0f} s"
        self._behind[rank] = (sign.launched, sign.finished, since)
        return None

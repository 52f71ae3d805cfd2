"""Which rank hangs: a decision over the signs of all, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_engine.executor.vital_signs import Awaited, Signs

HANG_S = 8.0
"""Without a sign, at rest, or awaited by the other ranks of its stage, before a rank counts as hung."""
STAGE_HANG_S = 60.0
"""At work where nobody knows how long it takes: long prompts on a slow processor take many seconds."""
LOOK_S = 0.5
"""Between two looks."""
_LATE_S = 3.0
_BUSY_SHARE = 0.5
"""Of one processor: a rank that gets less computes beside others, and who knows how long."""

_Place = tuple[int, int, int]


class HangWatch:
    """Judges the signs of ranks that serve, look by look.

    A look that comes late says nothing about the ranks: this process was stopped itself, maybe with all of them. Who
    waits for others does not hang, and who computes may take long. But ranks that divide layers among them compute the
    same for as long; and one that neither waits nor computes will never come out of its step. The stages of a pipeline
    are steps apart: of ranks that say how long a layer may take, one that computes longer hangs. So does one whose GPU
    has all that a step needs, from its host and the stage before, and takes longer than it says; of several the one
    that is least far, as the others may wait for it, and none while a later stage may not take what it sends. Else,
    where all of them seem to be at work, the first of those that are least far hangs, after long.

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
        self._behind: dict[int, tuple[_Place, float]] = {}
        """Of ranks with a step to do that others have done: how far each is, and since when."""
        self._busy: dict[int, tuple[_Place, float]] = {}
        """Of ranks that compute: how far each is, and what it had burnt by then."""
        self._on_device: dict[int, tuple[int, float]] = {}
        """Of ranks that look at a device with a step: how many it has computed, and since when."""

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next look."""
        return now - self._looked_at >= LOOK_S

    def look(self, signs: Sequence[Signs], now: float) -> tuple[int, str] | None:
        """Return a rank that hangs and how that shows, if there is one."""
        if now - self._looked_at >= _LATE_S:
            self._watched_since = now
            self._behind, self._on_device = {}, {}
        self._looked_at = now
        late = [(sign.finished, rank) for rank, sign in enumerate(signs) if self._device_hangs(rank, sign, signs, now)]
        for rank, sign in enumerate(signs):
            first = rank - rank % self._abreast
            if (how := self._judge(rank, sign, signs[first : first + self._abreast], len(signs), now)) is not None:
                return rank, how
        if late:
            _, rank = min(late)
            return rank, f"did not come out of a step for {now - self._on_device[rank][1]:.0f} s"
        return None

    def _device_hangs(self, rank: int, sign: Signs, signs: Sequence[Signs], now: float) -> bool:
        """Whether a rank's GPU has had one step for longer than it takes; seen from the first look that finds it so."""
        first = rank - rank % self._abreast
        has_input = all(one.finished > sign.finished for one in signs[max(0, first - self._abreast) : first])
        has_outlet = not any(_may_block(one, sign, now) for one in signs[first + self._abreast :])
        # Between two looks at the device a rank computes for a moment; one that computes for longer is not looking.
        looks = sign.awaits is Awaited.EXECUTOR or now - sign.awaits_since < LOOK_S
        has_step = sign.device_patience_s is not None and sign.finished < sign.launched
        if not (has_step and has_input and has_outlet and looks):
            self._on_device.pop(rank, None)
            return False
        finished, since = self._on_device.get(rank, (-1, now))
        if finished != sign.finished:
            since = now
        self._on_device[rank] = (sign.finished, since)
        return now - since > max(HANG_S, sign.device_patience_s or 0.0)

    def _judge(self, rank: int, sign: Signs, stage: Sequence[Signs], size: int, now: float) -> str | None:
        if (silent := self._seconds(sign.stamped_at, now)) > HANG_S:
            return f"gave no sign of life for {silent:.0f} s"
        if sign.awaits is Awaited.NOBODY and (how := self._judge_work(rank, sign, stage, now)) is not None:
            return how
        is_left_behind = any(sign.launched < peer.launched for peer in stage)
        is_behind = is_left_behind or (self._abreast < size and sign.finished < self.num_given)
        place = _place(sign)
        before, since = self._behind.pop(rank, (place, now))
        if not is_behind or sign.awaits is Awaited.STAGE:
            return None
        if before != place:
            since = now
        longest = max(STAGE_HANG_S, sign.patience_s or 0.0, sign.device_patience_s or 0.0)
        if now - since > (HANG_S if is_left_behind else longest):
            return f"did not come out of a step for {now - since:.0f} s"
        self._behind[rank] = (place, since)
        return None

    def _judge_work(self, rank: int, sign: Signs, stage: Sequence[Signs], now: float) -> str | None:
        """Of a rank that computes, or should."""
        busy = self._seconds(sign.awaits_since, now)
        if (idle := min(busy, self._seconds(sign.worked_at, now))) > HANG_S:
            return f"has done nothing within a step for {idle:.0f} s"
        awaited = [self._seconds(peer.awaits_since, now) for peer in stage if peer.awaits is Awaited.TENSOR]
        if (late := min(busy, max(awaited, default=0.0))) > HANG_S:
            return f"did not come to the other ranks of its stage for {late:.0f} s"
        return f"did not come out of a layer for {busy:.0f} s" if self._burns(rank, sign, busy) else None

    def _seconds(self, since: float, now: float) -> float:
        """That were watched."""
        return now - max(since, self._watched_since)

    def _burns(self, rank: int, sign: Signs, busy_s: float) -> bool:
        """Whether it computes one layer for longer than any takes, and nobody takes the processor from it."""
        place, burnt = self._busy.get(rank, (None, 0.0))
        if place != _place(sign):
            burnt = sign.burnt_s
            self._busy[rank] = (_place(sign), burnt)
        if sign.patience_s is None or busy_s <= max(HANG_S, sign.patience_s):
            return False
        return sign.burnt_s - burnt > _BUSY_SHARE * busy_s


def _may_block(later: Signs, sign: Signs, now: float) -> bool:
    """Whether a rank of a later stage may not take what a device sends: its host computes, which receives only then,
    or nobody knows how long it takes for the step before."""
    is_busy = later.awaits is Awaited.NOBODY and now - later.awaits_since > LOOK_S
    return later.finished <= sign.finished and (is_busy or later.device_patience_s is None)


def _place(sign: Signs) -> _Place:
    """How far a rank is."""
    return sign.launched, sign.finished, sign.layers

"""How fast K/V reaches one decode engine, learned from its own counters and from the answers of both legs."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_router.estimate import Estimate

_MIN_SECONDS = 1e-3
"""A transfer that is over in less says nothing of bandwidth."""


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """What a decode engine counted since it started."""

    received_bytes: float
    exposed_seconds: float
    """After the prefill engine had computed the last block."""
    hidden_seconds: float
    """From the first frame on, before that."""


class TransferRates:
    """What is learned of one decode engine; lives as long as it does.

    Args:
        siblings: what the engines of its model have in common.
    """

    __slots__ = ("_last", "bandwidth", "handover")

    def __init__(self, siblings: TransferRates | None = None) -> None:
        self.bandwidth: Estimate = Estimate(1e9, None if siblings is None else siblings.bandwidth)
        """Bytes a second while blocks come. Where they come as fast as they are computed it is a lower bound, and as
        much as is needed to see that nothing is left over when the last one is computed."""
        self.handover: Estimate = Estimate(0.01, None if siblings is None else siblings.handover)
        """Seconds from the end of the prefill leg to the first byte of the decode leg, apart from `late_seconds`."""
        self._last: TransferFigures | None = None

    def polled(self, now_told: TransferFigures | None, now: float) -> None:
        """Learn from a poll of its counters; None: it has none."""
        last, self._last = self._last, now_told
        if last is None or now_told is None or now_told.received_bytes <= last.received_bytes:
            return  # nothing came, or it started anew
        seconds = now_told.exposed_seconds - last.exposed_seconds + now_told.hidden_seconds - last.hidden_seconds
        if seconds >= _MIN_SECONDS:
            self.bandwidth.observe((now_told.received_bytes - last.received_bytes) / seconds, now)

    def late_seconds(self, num_bytes: float, overlap_s: float) -> float:
        """Return how long blocks still come after the last one was computed.

        Args:
            num_bytes: of K/V that the decode engine has not got.
            overlap_s: how long the prompt is computed after its first blocks.
        """
        return max(0.0, num_bytes / self.bandwidth.value - overlap_s)

    def handed_over(self, seconds: float, late_s: float, now: float) -> None:
        """Learn from a request of which both legs have answered.

        Args:
            seconds: from the end of the prefill leg to the first byte of the decode leg.
            late_s: what `late_seconds` said when the engines were chosen.
            now: the time.
        """
        self.handover.observe(max(seconds - late_s, 1e-4), now)

    def refresh(self, now: float) -> None:
        """Let old evidence fade."""
        self.bandwidth.refresh(now)
        self.handover.refresh(now)

"""Totals of one end of the transfers, under the names of docs/metrics.md (without the prefix)."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class SourceCounters:
    """At P."""

    sent_bytes: float = 0
    sent_blocks: float = 0
    delivered: float = 0
    failures: float = 0
    credit_stalls: float = 0
    lease_expiries: float = 0
    nacks: float = 0
    """That it sent or got."""
    blocks_spilled: float = 0
    refused_messages: float = 0

    def totals(self) -> dict[str, float]:
        """Return all by name."""
        return asdict(self)


@dataclass(slots=True)
class TargetCounters:
    """At D."""

    received_bytes: float = 0
    received_blocks: float = 0
    completed: float = 0
    failures: float = 0
    seconds_sum: float = 0
    """From the load's beginning to its end, of those that brought their blocks."""
    exposed_seconds: float = 0
    """Of that, after P had computed the last block."""
    hidden_seconds: float = 0
    """Of that, from the first frame on and before P had computed the last block."""
    nacks: float = 0
    refused_frames: float = 0
    refused_messages: float = 0
    recomputed_tokens: float = 0
    peer_deaths: float = 0

    def totals(self) -> dict[str, float]:
        """Return all by name."""
        return asdict(self)

"""Limits and times of peer-to-peer transfers: what the configuration says, and what it need not say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SendType = Literal["put_async", "put", "get"]


@dataclass(frozen=True, slots=True)
class PeerTiming:
    """When a peer is taken for what. Seconds."""

    ping: float = 1.0
    suspect: float = 3.0
    """Silent for so long: counted as such. Loads go on with it, as each names its peer."""
    dead: float = 5.0
    """Silent for so long: all that it has to do with ends."""
    redial_first: float = 0.5
    """After a peer died, loads from it fail at once for so long, then twice as long each time,"""
    redial_most: float = 15.0
    """but never longer than this."""
    idle: float = 60.0
    """A link without loads for so long is closed."""


@dataclass(frozen=True, slots=True)
class P2PSettings:
    """Both ends' limits."""

    block_bytes: int
    """One block over all layers: `KVPages.bytes_per_block`."""
    send_type: SendType = "put_async"
    lease: float = 30.0
    """Seconds that P keeps blocks for a D that does not renew."""
    leg_timeout: float = 10.0
    """P: seconds that a Reserve waits for its leg, renewed or not. The router sends both at once, so a leg that has not
    come by then never will, and D had better compute the prompt."""
    transfer_timeout: float = 60.0
    """Seconds that a load may take in all."""
    buffer_bytes: int = 256 << 20
    """D: bytes that all peers together may have under way to it. P: bytes that stay pinned before some are spilled."""
    overflow_bytes: int = 1 << 30
    """P: bytes of host memory for spilled blocks."""
    recompute_budget: int = 65536
    """D: prompt tokens a minute that it computes for transfers that failed."""
    frame_bytes: int = 4 << 20
    """Most bytes of one frame (always at least one block)."""
    frames_ahead: int = 2
    """P: frames of one transfer that are being sent at once."""
    retry: float = 0.5
    """Seconds before a Reserve or Commit without an answer is sent again; doubled each time, up to four times this."""
    gap_timeout: float = 5.0
    """D: seconds without a new frame after a COMMIT, after which those that are missing are lost."""
    max_early_reserves: int = 1024
    """P: Reserves that are remembered for transfers that it does not know yet."""
    max_sessions: int = 1024
    """P: engines that talk to it."""
    max_links: int = 256
    """D: engines that it talks to."""
    max_tombstones: int = 8192
    """Ended transfers that are remembered so that late messages revive none."""
    timing: PeerTiming = field(default_factory=PeerTiming)

    @property
    def blocks_per_frame(self) -> int:
        """Most blocks of one frame."""
        return max(1, self.frame_bytes // self.block_bytes)

"""The decode side: reserves, takes frames into reserved blocks, and calls them right only after a COMMIT that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_blob import KvShape
from pagefleet_protocol.kv_control import ControlMessage, KvControlError, PlaneName
from pagefleet_protocol.kv_handoff import OnFailure

from pagefleet_engine.kv_transfer.p2p.actions import TargetAction
from pagefleet_engine.kv_transfer.p2p.data_plane import PlaneEvent
from pagefleet_engine.kv_transfer.p2p.settings import P2PSettings


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks of one request that are to come from a prefill engine."""

    request_id: str
    transfer_id: bytes
    peer: str
    """Address of the prefill engine's control socket, HOST:PORT: one that the configuration allows."""
    peer_incarnation: str
    first_block: int
    """Index, in the request, of the first block wanted: those before it are cached here."""
    blocks: Sequence[int]
    """Where they go in the pool; held for this load until `LoadEnded`."""
    last_hash: BlockHash
    """Of the last of them."""
    num_tokens: int
    """Prompt tokens to compute here if nothing comes: what the recompute budget is charged."""
    on_failure: OnFailure


class Target:
    """All loads of one decode engine. Every call returns what is to be done, in order; no call waits."""

    def __init__(self, settings: P2PSettings, shape: KvShape, incarnation: str, planes: Sequence[PlaneName]) -> None:
        """`planes`: data planes to ask for, best first."""

    def load(self, job: LoadJob, now: float) -> list[TargetAction]:
        """Begin a load. `LoadEnded` comes exactly once for it, maybe now."""
        raise NotImplementedError

    def cancel(self, request_id: str, now: float) -> list[TargetAction]:
        """The request is gone: its load ends as soon as nothing writes to its blocks. Unknown ones are ignored."""
        raise NotImplementedError

    def not_needed(self, transfer_id: bytes, peer: str, peer_incarnation: str, now: float) -> list[TargetAction]:
        """Everything is cached here: P is told to keep nothing (or finds out when its lease ends)."""
        raise NotImplementedError

    def message(self, peer: str, message: ControlMessage, now: float) -> list[TargetAction]:
        """A prefill engine said something. `peer`: the address that was dialled."""
        raise NotImplementedError

    def refused(self, peer: str, error: KvControlError, now: float) -> list[TargetAction]:
        """What a peer sent could not be decoded: one of another version or shape is given up, the rest counted."""
        raise NotImplementedError

    def plane_event(self, event: PlaneEvent, now: float) -> list[TargetAction]:
        """A data plane told something; what is not for this side (FrameSent, Withdrawn) changes nothing here."""
        raise NotImplementedError

    def peers(self) -> Mapping[str, int]:
        """Return the number of links in each state: dialing, ready, suspect, dead, refused, draining."""
        raise NotImplementedError

    def tick(self, now: float) -> list[TargetAction]:
        """Let time pass: to be called every 100 ms or so."""
        raise NotImplementedError

    def close(self, now: float) -> list[TargetAction]:
        """End all loads (as failed) and links. Frames being written still have to end, before their `LoadEnded`."""
        raise NotImplementedError

"""The prefill side: keeps computed blocks under a lease, and sends them to the decode engine that reserved room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_blob import KvShape
from pagefleet_protocol.kv_control import ControlMessage, KvControlError, PlaneName

from pagefleet_engine.kv_transfer.p2p.actions import SourceAction
from pagefleet_engine.kv_transfer.p2p.data_plane import PlaneEvent
from pagefleet_engine.kv_transfer.p2p.settings import P2PSettings


class Source:
    """All transfers of one prefill engine. Every call returns what is to be done, in order; no call waits."""

    def __init__(
        self,
        settings: P2PSettings,
        shape: KvShape,
        incarnation: str,
        invite: Mapping[PlaneName, Callable[[str], bytes]],
    ) -> None:
        """`invite`: of each data plane there is, its `DataPlane.invite`."""

    def begin(self, transfer_id: bytes, peer_incarnation: str, now: float) -> list[SourceAction]:
        """A prefill leg was admitted, for the decode engine of that incarnation. Its lease starts."""
        raise NotImplementedError

    def save(
        self, transfer_id: bytes, save: int, first: int, blocks: Sequence[int], hashes: Sequence[BlockHash]
    ) -> list[SourceAction]:
        """Blocks of the leg hold their K/V and are pinned under the number `save` until `Unpin` names it (maybe now).

        They follow on those told before, or are some of them again: a leg that was preempted tells all anew.
        """
        raise NotImplementedError

    def ended(self, transfer_id: bytes, completed: bool, now: float) -> list[SourceAction]:
        """The leg is over; `completed`: every block of its prompt was told."""
        raise NotImplementedError

    def message(self, peer: str, message: ControlMessage, now: float) -> list[SourceAction]:
        """A decode engine said something. `peer`: whatever names its socket here."""
        raise NotImplementedError

    def refused(self, peer: str, error: KvControlError, now: float) -> list[SourceAction]:
        """What a peer sent could not be decoded: it is told if it is of another version or shape, else only counted."""
        raise NotImplementedError

    def plane_event(self, event: PlaneEvent, now: float) -> list[SourceAction]:
        """A data plane told something; what is not for this side (LinkUp, FrameArrived ...) changes nothing here."""
        raise NotImplementedError

    def spilled(self, number: int, now: float) -> list[SourceAction]:
        """A `Spill` is in host memory."""
        raise NotImplementedError

    def spill_failed(self, number: int, now: float) -> list[SourceAction]:
        """A `Spill` could not be made: its blocks stay pinned. Its memory needs no `DropSpill`."""
        raise NotImplementedError

    def relieve(self, num_blocks: int) -> list[SourceAction]:
        """The pool is short: spill so many blocks, as far as the overflow pool has room."""
        raise NotImplementedError

    def report(self, waiting: int, running: int, free_blocks: int, queued_tokens: int) -> None:
        """The load that peers are told from now on."""
        raise NotImplementedError

    def drain(self) -> None:
        """Take no transfer whose leg is not here already."""
        raise NotImplementedError

    def tick(self, now: float) -> list[SourceAction]:
        """Let time pass: to be called every 100 ms or so."""
        raise NotImplementedError

    def close(self, now: float) -> list[SourceAction]:
        """Abort everything. Frames and spills under way still have to end, before their blocks are unpinned."""
        raise NotImplementedError

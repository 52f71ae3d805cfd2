"""What carries frames of K/V between two engines: one interface for sockets, NCCL, CUDA IPC and memory.

A plane moves whole blocks and checks what it moved; it knows nothing of leases, credit or policy. No call waits: what
happened is told by `events`, and the bell rings for it. A plane's threads are its own; its methods are called by one
thread, the agent's. Engines are named by their incarnation, so a restarted peer is another peer.

The engine that has K/V (the source) invites, the engine that wants it (the target) connects, and both may be either
for different peers at once. Frames of a transfer arrive in order or not at all: a plane writes a frame only where the
landing's next block is, so a late, doubled or strayed frame touches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

End = Literal["source", "target"]
"""Which end of a link this engine is. Two engines that serve each other have a link each way, apart from each other."""
MAX_INVITATION_BYTES = 4096
MAX_TELL_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """Blocks of one transfer that follow each other, to be sent.

    Attributes:
        transfer_id: 16 bytes.
        epoch: of the transfer's lease, as the target's landing has it.
        seq: number of the frame in its transfer, from 0.
        first_block: index, in the request, of the first block.
        blocks: their numbers in the pool; empty where `held` has them.
        held: the payload in host memory, block after block, where it left the pool; None: it is in the pool.
    """

    transfer_id: bytes
    epoch: int
    seq: int
    first_block: int
    blocks: Sequence[int]
    held: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a transfer's frames may be written: nowhere else, in order, and only with this epoch.

    Attributes:
        transfer_id: 16 bytes.
        epoch: of the transfer's lease.
        first_block: index, in the request, of `blocks[0]`, with which the first frame must begin.
        blocks: reserved blocks in the pool, in the request's order.
    """

    transfer_id: bytes
    epoch: int
    first_block: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Frames can go between this engine and the peer."""

    peer: str
    end: End


@dataclass(frozen=True, slots=True)
class LinkDown:
    """No frame goes over the link any more, and none of its frames touches the pages: connect again."""

    peer: str
    end: End
    reason: str


@dataclass(frozen=True, slots=True)
class FrameSent:
    """The plane needs the frame's blocks no more. It may not have arrived yet."""

    peer: str
    transfer_id: bytes
    epoch: int
    seq: int
    num_bytes: int
    checksum: int
    """Of the payload: CRC-32, or 32 bits of the sum by which planes between devices check it."""


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A frame is whole and right, in the blocks of its landing."""

    peer: str
    transfer_id: bytes
    epoch: int
    seq: int
    first_block: int
    num_blocks: int
    num_bytes: int
    checksum: int
    """Of the payload, as it was announced and found; as the source's `FrameSent` has it."""


@dataclass(frozen=True, slots=True)
class FrameRefused:
    """A frame was not used: damaged, out of order, out of its place, or for no landing. None of it counts."""

    peer: str
    transfer_id: bytes
    epoch: int
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Landed:
    """A landing was removed by `forget`: the plane writes to its blocks no more."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A transfer's frames were removed by `withdraw`: the plane reads its blocks no more."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class Tell:
    """Bytes for the peer's plane, which the control plane takes to its `hear`, in order; at most MAX_TELL_BYTES."""

    peer: str
    data: bytes


@dataclass(frozen=True, slots=True)
class TurnAsked:
    """A rank's plane would launch a transfer, of which it is that end; only its engine's plane hears of it."""

    number: int
    end: End


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """That transfer is over, or will never be launched."""

    number: int


PlaneEvent = (
    LinkUp | LinkDown | FrameSent | FrameArrived | FrameRefused | Landed | Withdrawn | Tell | TurnAsked | TurnEnded
)


class DataPlane(Protocol):
    """One way to carry frames. Its pages, their `KvShape` and its limits are given to its constructor.

    Attributes:
        name: in control messages and metrics: `tcp`, `nccl`, `cuda_ipc`, `memory`.
    """

    name: str

    @property
    def bell(self) -> int:
        """A file descriptor that is readable while `events` has something to tell."""

    def invite(self, peer: str) -> bytes:
        """Source: return what the peer needs to connect, once; at most MAX_INVITATION_BYTES, secret, short-lived."""

    def connect(self, peer: str, host: str, invitation: bytes) -> None:
        """Target: begin to connect to the source at `host`; `LinkUp` or `LinkDown` follows."""

    def disconnect(self, peer: str, end: End) -> None:
        """Close the link of which this engine is that end, or take the invitation back, without an event.

        When it returns, none of the link's frames touches the pages; it waits a few milliseconds for that at most.
        """

    def send(self, peer: str, frame: Frame) -> None:
        """Source: queue a frame; `FrameSent` follows, or `Withdrawn` or `LinkDown` ends it.

        The caller bounds what is queued, by the credit that the target gave.
        """

    def withdraw(self, transfer_id: bytes) -> None:
        """Source: send none of the transfer's frames any more; `Withdrawn` always follows, soon, whoever is slow."""

    def land(self, peer: str, landing: Landing) -> None:
        """Target: accept this transfer's frames, from this peer, from when this returns. One landing per transfer."""

    def forget(self, transfer_id: bytes) -> None:
        """Target: accept no frame of the transfer any more; `Landed` always follows, soon, whoever is slow."""

    def hear(self, peer: str, data: bytes) -> None:
        """Either: take what the peer's plane said by `Tell`."""

    def events(self) -> Sequence[PlaneEvent]:
        """Return what happened since the last call, in order."""

    def counters(self) -> dict[str, float]:
        """Return what the plane alone counts, by name as in docs/metrics.md without prefix; totals end in `_total`."""

    def close(self) -> None:
        """End all links and threads; nothing touches the pages afterwards."""

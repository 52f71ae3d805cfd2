"""What carries frames of K/V between two engines: one interface for sockets, NCCL, CUDA IPC and memory.

A plane moves whole blocks and finds the check sum of what it moved; it knows nothing of leases, credit or policy. No
call waits: what happened is told by `events`, and the bell rings for it. A plane's threads are its own; its methods
are called by one thread, the agent's. The engine that has K/V (the source) expects connections, the engine that wants
it (the target) connects. Peers are named as in `actions`: a session at the source, an address at the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagefleet_protocol.kv_blob import BlobHeader
from pagefleet_protocol.kv_control import PlaneName

from pagefleet_engine.kv_transfer.p2p.actions import FrameTicket, OutgoingFrame

MAX_TELL_BYTES = 48 * 1024


@dataclass(frozen=True, slots=True)
class DataOpen:
    """Frames can go between this engine and the peer; both ends tell it."""

    peer: str


@dataclass(frozen=True, slots=True)
class DataLost:
    """None can any more, or none ever could. What was under way has ended, and was told before."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class FrameSent:
    """Source: the plane needs the frame's blocks no more; it may not have arrived yet."""

    number: int
    checksum: int
    """CRC-32 of the payload."""


@dataclass(frozen=True, slots=True)
class FrameFailed:
    """Source: the frame was given up, and the plane reads its blocks no more."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Bytes for the peer's plane, which the control plane takes to its `hear`, in order; at most MAX_TELL_BYTES."""

    peer: str
    data: bytes


PlaneEvent = DataOpen | DataLost | FrameSent | FrameFailed | Tell


class FrameSink(Protocol):
    """Who decides where frames land, at the target. Any thread of a plane may call it; it answers at once."""

    def frame_begun(self, peer: str, header: BlobHeader) -> FrameTicket | None:
        """Return leave to write the frame whose header has come; None: its payload must reach no block.

        The header has passed `decode_header`. A plane looks at `FrameTicket.live` before each piece that it writes.
        """
        ...

    def frame_ended(self, ticket: FrameTicket, checksum: int | None) -> None:
        """The plane writes no more under this ticket. Called exactly once for each.

        `checksum`: CRC-32 of what is in the blocks now; None: not all of the frame is.
        """
        ...


class DataPlane(Protocol):
    """One way to carry frames. Its pages, the compatibility of their K/V and its `FrameSink` come to its constructor."""

    @property
    def name(self) -> PlaneName:
        """In control messages and metrics."""
        ...

    @property
    def bell(self) -> int:
        """A file descriptor that is readable while `events` has something to tell."""
        ...

    def expect(self, peer: str, token: bytes) -> None:
        """Source: take one connection that proves to know this token; earlier tokens of the peer are void."""
        ...

    def connect(self, peer: str, host: str, port: int, token: bytes) -> None:
        """Target: connect to the source, in place of an older connection; `DataOpen` or `DataLost` follows."""
        ...

    def disconnect(self, peer: str) -> None:
        """Either: close the connection and forget its tokens, without `DataLost`; its frames end as any others."""
        ...

    def send(self, frame: OutgoingFrame, held: memoryview | None) -> None:
        """Source: queue a frame; `FrameSent` or `FrameFailed` follows, always one of them.

        `held`: the payload in host memory, block after block, where it has left the pool; None: it is in the pool.
        The caller bounds what is queued.
        """
        ...

    def stop_frame(self, number: int) -> None:
        """Source: end a frame within a second, whoever is slow."""
        ...

    def stop_writing(self, ticket: FrameTicket) -> None:
        """Target: the ticket is not live any more; `frame_ended` within a second, whoever is slow."""
        ...

    def hear(self, peer: str, data: bytes) -> None:
        """Either: take what the peer's plane said by `Tell`. It came from outside: check it."""
        ...

    def events(self) -> Sequence[PlaneEvent]:
        """Return what happened since the last call, in order.

        Raises:
            EngineDead: a thread of the plane has ended by a mistake of ours.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Return totals and gauges that are the plane's alone."""
        ...

    def close(self) -> None:
        """End all connections and threads; nothing touches the pages afterwards."""
        ...

"""What the state machines ask their driver to do. The driver carries actions out in order, and never calls back from
within: what it learns, it tells the machine in a later call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet_protocol.kv_control import ControlMessage, PlaneName


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message. It may be lost; whoever needs an answer sends it again."""

    peer: str
    """At P, the key of a session, as given to `Source.message`; at D, the address of a link."""
    message: ControlMessage


# P, the prefill side


@dataclass(frozen=True, slots=True)
class OutgoingFrame:
    """Blocks to send as one frame, from the pool or from spilled memory."""

    number: int
    """Of this frame at this engine; never used again."""
    peer: str
    """Session whose data connection takes it."""
    name: bytes
    """For the `BlobHeader`."""
    first_block: int
    num_blocks: int
    blocks: Sequence[int] = ()
    """Their numbers in the pool; empty: they are in spilled memory."""
    spill: int = 0
    """Number of the `Spill` that holds them."""
    spill_offset: int = 0
    """In it, in blocks."""


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Read the blocks, send header and bytes, then call `Source.frame_sent` with their CRC-32, or `frame_failed`.

    One of the two always comes; the blocks are not touched by anybody else until then.
    """

    frame: OutgoingFrame


@dataclass(frozen=True, slots=True)
class StopFrame:
    """The frame is of no use any more: end it within a second (close the connection if nothing else helps), then call
    `frame_sent` or `frame_failed` as for any other."""

    number: int


@dataclass(frozen=True, slots=True)
class Spill:
    """Copy blocks to host memory kept under `number`, then call `Source.spilled` (or `spill_failed`)."""

    number: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class DropSpill:
    """The host memory of a `Spill` is free."""

    number: int


@dataclass(frozen=True, slots=True)
class Unpin:
    """A save's blocks need not be kept any more: its number goes into `TransfersDone.saves`."""

    save: int


@dataclass(frozen=True, slots=True)
class ExpectData:
    """Take one data connection that opens with this token for the session; earlier tokens of it are void."""

    peer: str
    token: bytes


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The session is over: close its data connection and forget its tokens. Its frames end as any others."""

    peer: str


@dataclass(frozen=True, slots=True)
class LegSettled:
    """The transfer of a prefill leg is over at P; comes exactly once for each `Source.begin`."""

    transfer_id: bytes
    delivered: bool
    """D has said that it uses the blocks, or that it needs none."""
    reason: str
    """Why not; empty if delivered."""


# D, the decode side


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a control connection; ones that break are opened again by the driver until `HangUp`."""

    peer: str


@dataclass(frozen=True, slots=True)
class OpenData:
    """Open the data connection and, when P has confirmed it, call `Target.data_open`; if it breaks or never comes,
    `data_lost`. An older connection to the same peer is closed first, without telling."""

    peer: str
    port: int
    token: bytes
    planes: Sequence[PlaneName]


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close both connections. Frames of it that are being written end as any others (`frame_ended`)."""

    peer: str


@dataclass(slots=True, eq=False)
class FrameTicket:
    """Leave to write one frame into blocks. Whoever writes looks at `live` before every piece, and stops when it is
    False; the rest goes to scratch memory. `Target.frame_ended` is called once for each ticket, when nothing writes."""

    number: int
    peer: str
    transfer_id: bytes
    seq: int
    first_block: int
    blocks: Sequence[int]
    """In the pool, in the order of the payload."""
    checksum: int
    """CRC-32 that the payload must have."""
    live: bool = field(default=True)


@dataclass(frozen=True, slots=True)
class StopWriting:
    """The ticket is not live any more: for data planes that are not polling it. `frame_ended` within a second."""

    ticket: FrameTicket


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load is over, nothing writes to its blocks: a `LoadDone`. Comes exactly once for each `Target.load`."""

    request_id: str
    num_blocks: int
    """All of them, or 0."""
    failure: str | None
    """Why the request must fail; None: it goes on, and computes what is missing."""
    cause: str = ""
    """Why nothing came, also where the request goes on: for logs."""


SourceAction = Send | SendFrame | StopFrame | Spill | DropSpill | Unpin | ExpectData | CloseSession | LegSettled
TargetAction = Send | Dial | OpenData | HangUp | StopWriting | LoadEnded

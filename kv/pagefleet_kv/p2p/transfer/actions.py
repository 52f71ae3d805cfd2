"""What the state machines ask their driver to do. The driver carries actions out in order, and never calls back from
within: what it learns, it tells the machine in a later call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pagefleet_protocol.kv_control import ControlMessage, PlaneName
from pagefleet_protocol.kv_handoff import KvFault

from pagefleet_kv.p2p.data_plane import Landing


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message. It may be lost; whoever needs an answer sends it again."""

    peer: str
    """At P, the key of a socket's other end, as given to `Source.message`; at D, the address of a link."""
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class OnPlane:
    """Call the method of this name of a `DataPlane`, with these arguments; peers are incarnations."""

    plane: PlaneName
    method: Literal["hear", "disconnect", "withdraw", "land", "forget"]
    arguments: tuple[str | bytes | Landing, ...]


# P, the prefill side


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks that follow each other and lie in one kind of place."""

    first: int
    """Index, in the request, of the first."""
    count: int
    blocks: Sequence[int] = ()
    """Their numbers in the pool; empty: they are in spilled memory."""
    spill: int = 0
    """Number of the `Spill` that holds them."""
    spill_offset: int = 0
    """Where in it they begin, in blocks."""


@dataclass(frozen=True, slots=True)
class SendFrame:
    """`DataPlane.send`: blocks from the pool or from spilled memory, which nobody changes until the frame has ended:
    by `FrameSent`, `Withdrawn` or `LinkDown`, told to `Source.plane_event`."""

    plane: PlaneName
    peer: str
    """Incarnation of D."""
    transfer_id: bytes
    epoch: int
    seq: int
    piece: Piece


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
class HangUp:
    """Close the control connection."""

    peer: str


@dataclass(frozen=True, slots=True)
class Connect:
    """`DataPlane.connect`: to the incarnation `peer`, on the host of the address `at`."""

    plane: PlaneName
    peer: str
    at: str
    invitation: bytes


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load is over, nothing writes to its blocks: a `LoadDone`. Comes exactly once for each `Target.load`."""

    request_id: str
    num_blocks: int
    """All of them, or 0."""
    failure: str | None
    """Why the request must fail; None: it goes on, and computes what is missing."""
    cause: str = ""
    """Why nothing came, also where the request goes on: for logs. Empty where the request is gone."""
    fault: KvFault | None = None
    """The same for programs, where the request must fail."""


SourceAction = Send | OnPlane | SendFrame | Spill | DropSpill | Unpin | LegSettled
TargetAction = Send | OnPlane | Dial | HangUp | Connect | LoadEnded

"""What crosses between the core and the planes on a rank's device: msgspec structs as msgpack.

What the core's connector asks of a plane goes to the rank, and what the plane tells comes back. What concerns a peer
stays in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, get_args

import msgspec
from pagefleet_kv.p2p.data_plane import End, PlaneEvent
from pagefleet_kv.p2p.planes.device.lanes import LaneTerms
from pagefleet_kv.p2p.planes.device.opening import PlaneOpening

from pagefleet_engine.executor.ring import Buffer

_KINDS = get_args(PlaneEvent)


class Open(msgspec.Struct, frozen=True, array_like=True, tag=0):
    opening: PlaneOpening


class Invite(msgspec.Struct, frozen=True, array_like=True, tag=1):
    peer: str
    terms: LaneTerms


class Connect(msgspec.Struct, frozen=True, array_like=True, tag=2):
    peer: str
    host: str
    invitation: bytes
    terms: LaneTerms


class Disconnect(msgspec.Struct, frozen=True, array_like=True, tag=3):
    peer: str
    end: End


class Send(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """What `Frame.held` has follows, if it has anything."""

    peer: str
    transfer_id: bytes
    epoch: int
    seq: int
    first_block: int
    blocks: Sequence[int]
    after: int
    """Steps that the rank is to be done with before."""


class Land(msgspec.Struct, frozen=True, array_like=True, tag=5):
    peer: str
    transfer_id: bytes
    epoch: int
    first_block: int
    blocks: Sequence[int]
    after: int


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=6):
    transfer_id: bytes


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=7):
    transfer_id: bytes


class Hear(msgspec.Struct, frozen=True, array_like=True, tag=8):
    peer: str
    data: bytes


class Close(msgspec.Struct, frozen=True, array_like=True, tag=9):
    pass


Question = Open | Invite | Disconnect | Close
PeerOrder = Connect | Send | Land | Hear
Order = PeerOrder | Forget | Withdraw


class Asked(msgspec.Struct, frozen=True, array_like=True):
    plane: str
    command: Question | Order


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """To who opens, invites, disconnects or closes."""

    data: bytes = b""
    refused: str | None = None


class Events(msgspec.Struct, frozen=True, array_like=True, tag=1):
    plane: str
    fields: Sequence[Sequence[Any]]
    """Of each event, with its kind first."""

    @classmethod
    def of(cls, plane: str, events: Sequence[PlaneEvent]) -> Events:
        """Return those of a plane."""
        return cls(plane, [(_KINDS.index(type(event)), *astuple(event)) for event in events])

    def events(self) -> Sequence[PlaneEvent]:
        """Return what was told."""
        return [_KINDS[kind](*fields) for kind, *fields in self.fields]


class Counted(msgspec.Struct, frozen=True, array_like=True, tag=2):
    plane: str
    counters: dict[str, float]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A plane's thread has ended."""

    plane: str


Told = Answer | Events | Counted | Failed

encode = msgspec.msgpack.Encoder().encode
decode_asked = msgspec.msgpack.Decoder(Asked).decode
decode_told: Callable[[Buffer], Told] = msgspec.msgpack.Decoder(Told).decode

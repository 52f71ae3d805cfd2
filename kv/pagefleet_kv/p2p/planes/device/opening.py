"""How a plane comes about on the device of each rank, wherever its process is: what it is told, and what it then is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
from pagefleet_protocol.kv_control import PlaneName

from pagefleet_kv.p2p.data_plane import End, Frame, Landing, PlaneEvent
from pagefleet_kv.p2p.planes.device.lanes import LaneTerms
from pagefleet_kv.p2p.planes.device.turns import TurnGiver


class NoPlane(Exception):
    """A plane cannot be had on a device; the message says why."""


class PlaneOpening(msgspec.Struct, frozen=True, array_like=True):
    """What the planes of an engine's ranks have in common."""

    name: PlaneName
    compatibility: bytes
    """`KvShape.compatibility`."""
    blocks_per_frame: int
    num_slots: tuple[int, int]
    """Of staging memory: for sending, for receiving."""
    max_communicators: tuple[int, int]
    """That send, that receive."""


class RankPlane(Protocol):
    """The plane of one rank, as `DevicePlane`: a `DataPlane` whose links are lanes, to ranks of other engines."""

    @property
    def bell(self) -> int: ...

    def invite(self, peer: str, terms: LaneTerms) -> bytes: ...

    def connect(self, peer: str, host: str, invitation: bytes, terms: LaneTerms) -> None: ...

    def disconnect(self, peer: str, end: End) -> None: ...

    def send(self, peer: str, frame: Frame) -> None: ...

    def withdraw(self, transfer_id: bytes) -> None: ...

    def land(self, peer: str, landing: Landing) -> None: ...

    def forget(self, transfer_id: bytes) -> None: ...

    def hear(self, peer: str, data: bytes) -> None: ...

    def events(self) -> Sequence[PlaneEvent]: ...

    def counters(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class PlaneDevice(Protocol):
    """The device of one rank."""

    def open(self, opening: PlaneOpening) -> RankPlane:
        """Make a plane there.

        Raises:
            NoPlane: it cannot be had.
        """
        ...


@runtime_checkable
class RankedPool(Protocol):
    """Pages that lie on the devices of ranks."""

    @property
    def devices(self) -> Sequence[PlaneDevice]:
        """Of each rank, in order; none, where no planes may be opened there."""
        ...

    def turns(self, plane: PlaneName) -> TurnGiver:
        """Return what gives ranks their turns for transfers of a plane."""
        ...

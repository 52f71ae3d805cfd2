"""Carries out what the state machines ask for, in order, on the control sockets, the data planes and the pages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pagefleet_protocol.kv_control import PlaneName, encode

from pagefleet_kv.p2p.control_plane import ControlPlane
from pagefleet_kv.p2p.data_plane import DataPlane, Frame
from pagefleet_kv.p2p.peers import Address, AllowedPeers
from pagefleet_kv.p2p.transfer.actions import (
    Connect,
    Dial,
    DropSpill,
    HangUp,
    LegSettled,
    LoadEnded,
    OnPlane,
    Send,
    SendFrame,
    SourceAction,
    Spill,
    TargetAction,
    Unpin,
)
from pagefleet_kv.p2p.transfer.source import Source
from pagefleet_kv.p2p.transfer.target import Target
from pagefleet_kv.port import KVPages, LoadDone, PagesCopy

Action = SourceAction | TargetAction

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverParts:
    """Both ends of the protocol, and what they act through."""

    source: Source
    target: Target
    control: ControlPlane
    planes: Mapping[PlaneName, DataPlane]
    peers: AllowedPeers
    pages: KVPages
    compatibility: bytes
    """Of this engine's K/V."""


@dataclass(slots=True)
class _Spilled:
    """Blocks in host memory, or on their way there."""

    memory: memoryview
    copy: PagesCopy | None
    """None: it could not begin."""


class Driver:
    """Used by one thread.

    Args:
        ended: is told each load and prefill leg that is over, and each save whose blocks are free.
    """

    def __init__(self, parts: DriverParts, ended: Callable[[LoadDone | Unpin | LegSettled], None]) -> None:
        self._parts = parts
        self._ended = ended
        self._dialled: dict[str, str] = {}
        """Peers that were dialled -> where."""
        self._spills: dict[int, _Spilled] = {}
        self._copying: set[int] = set()
        """Spills that the machine has not been told the end of."""

    @property
    def num_copies(self) -> int:
        """Copies to host memory that still run."""
        return len(self._copying)

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._parts.control.send(action.peer, encode(action.message, self._parts.compatibility))
                case LoadEnded():
                    self._end_load(action)
                case Unpin():
                    self._ended(action)
                case Spill():
                    self._spill(action)
                case DropSpill():
                    self._spills.pop(action.number, None)
                case LegSettled():
                    self._end_leg(action)
                case Dial() | HangUp() | Connect():
                    self._reach(action)
                case OnPlane() | SendFrame():
                    self._move(action)

    def end_copies(self, now: float) -> list[SourceAction]:
        """Tell the prefill side which copies to host memory have ended."""
        actions: list[SourceAction] = []
        for number in list(self._copying):
            copy = self._spills[number].copy
            if copy is None:
                self._copying.discard(number)
                del self._spills[number]
                actions += self._parts.source.spill_failed(number, now)
            elif copy.done():
                self._copying.discard(number)
                actions += self._parts.source.spilled(number, now)
        return actions

    def _move(self, action: OnPlane | SendFrame) -> None:
        plane = self._parts.planes[action.plane]
        if isinstance(action, SendFrame):
            plane.send(action.peer, self._frame(action))
        else:
            getattr(plane, action.method)(*action.arguments)

    def _reach(self, action: Dial | HangUp | Connect) -> None:
        """Act on connections to prefill engines; one that is off the list by now is not reached, and seems silent."""
        parts = self._parts
        match action:
            case Dial():
                numeric = parts.peers.find(action.peer)
                if numeric is not None:
                    self._dialled[action.peer] = numeric
                    parts.control.dial(action.peer, numeric)
            case HangUp():
                self._dialled.pop(action.peer, None)
                parts.control.hang_up(action.peer)
            case Connect():  # to where its invitation came from, whatever its name means by now
                numeric = self._dialled.get(action.at)
                if numeric is not None:
                    parts.planes[action.plane].connect(action.peer, Address.parse(numeric).host, action.invitation)

    def _frame(self, action: SendFrame) -> Frame:
        piece, held = action.piece, None
        if not piece.blocks:
            size = self._parts.pages.bytes_per_block
            start = piece.spill_offset * size
            held = self._spills[piece.spill].memory[start : start + piece.count * size]
        return Frame(action.transfer_id, action.epoch, action.seq, piece.first, piece.blocks, held)

    def _spill(self, action: Spill) -> None:
        pages = self._parts.pages
        self._copying.add(action.number)
        try:
            memory = memoryview(bytearray(len(action.blocks) * pages.bytes_per_block))
            self._spills[action.number] = _Spilled(memory, pages.read(action.blocks, memory))
        except (MemoryError, OSError):  # of the second where a rank cannot copy
            self._spills[action.number] = _Spilled(memoryview(b""), None)

    def _end_load(self, ended: LoadEnded) -> None:
        if ended.cause:
            _log.warning("the K/V of request %s did not come: %s", ended.request_id, ended.cause)
        self._ended(LoadDone(ended.request_id, ended.num_blocks, ended.failure, ended.fault))

    def _end_leg(self, settled: LegSettled) -> None:
        if settled.reason:
            _log.info("the K/V of transfer %s was not passed on: %s", settled.transfer_id.hex(), settled.reason)
        self._ended(settled)

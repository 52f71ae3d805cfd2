"""One communicator of two ranks, driven without waiting: made, given transfers in order, watched, aborted.

INITIALIZING --state READY--> READY --launch--> LAUNCHING --state READY--> RUNNING --its mark--> READY
     any --an error, a deadline--> broken: to be aborted

NCCL launches a transfer's kernel in its own time, so its end is a mark on the stream that is set once the launch is
known to have happened. The next one is launched when it has ended: then nothing queued on a device ever waits for
another kernel of the same stream, behind which, as streams share the device's queues, other links' kernels would wait.
Where launches are in turn, one waits for its turn before, and keeps it until its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagefleet_kv.p2p.planes.device.copies import DeviceCopies, Mark, handle_of
from pagefleet_kv.p2p.planes.device.turns import Turn, Turns
from pagefleet_kv.p2p.planes.nccl.library import NcclError, NcclFunctions, State

SOURCE_RANK = 0
TARGET_RANK = 1
IN_TURN_STALL_S = 5.0
"""Most seconds for a transfer in turn. Steps wait for all that were launched before them, which a rank launches beside
each other; and ranks give each other up after `PATIENCE_S`, 9, or are taken for hung after `HANG_S`, 8."""


@dataclass(frozen=True, slots=True)
class NcclTransfer:
    """Bytes to send or to receive; whose memory stays where it is until the transfer ended."""

    number: int
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CommunicatorSettings:
    """What all communicators of a device share.

    Attributes:
        max_ctas: multiprocessors that one may hold.
        init_s: for both ranks to meet.
        stall_s: for a transfer at the head of the line.
    """

    library: NcclFunctions
    copies: DeviceCopies
    max_ctas: int
    init_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class CommunicatorEnd:
    """Which end of which pair a communicator is.

    Attributes:
        unique_id: which the source drew.
        rank: SOURCE_RANK sends, TARGET_RANK receives.
        stream: for its kernels; None on a CPU.
        turns: in which it launches; None: at once.
        on_launch: is told the number of each transfer that is launched.
    """

    unique_id: bytes
    rank: int
    name: str
    stream: torch.cuda.Stream | None
    turns: Turns | None = None
    on_launch: Callable[[int], None] = lambda number: None


class Communicator:
    """One direction between two engines. Aborted, never left to itself: see `abort`.

    Raises:
        NcclError: NCCL refuses at once.
    """

    def __init__(self, settings: CommunicatorSettings, end: CommunicatorEnd, now: float) -> None:
        self._settings = settings
        self._end = end
        self._stall_s = settings.stall_s if end.turns is None else min(settings.stall_s, IN_TURN_STALL_S)
        self._turn: Turn | None = None
        """Of what is launched next, or was last, and has not ended."""
        self._library = settings.library
        self._stream = end.stream
        self._transfer: Callable[[int, int, int, int], None] = (
            self._library.send if end.rank == SOURCE_RANK else self._library.recv
        )
        self._given: deque[NcclTransfer] = deque()
        self._launching: NcclTransfer | None = None
        self._running: tuple[NcclTransfer, Mark] | None = None
        self.ready = False
        self._deadline = now + settings.init_s
        self._free_before = settings.copies.free_bytes()
        self.num_bytes = 0
        """Device memory that it took, as far as the device shows: others take and free some meanwhile."""
        self._handle: int | None = self._library.begin(end.unique_id, end.rank, end.name, settings.max_ctas)

    @property
    def idle(self) -> bool:
        """True when nothing was given that has not ended."""
        return not (self._given or self._launching or self._running)

    def give(self, transfer: NcclTransfer, now: float) -> None:
        """Do it after those before it."""
        if self.idle and self.ready:
            self._deadline = now + self._stall_s
        self._given.append(transfer)

    def poll(self, now: float) -> list[int]:
        """Go on; return the numbers of transfers that have ended.

        Raises:
            NcclError: NCCL, or the other rank, has failed or was silent for too long; abort it.
        """
        assert self._handle is not None
        ended: list[int] = []
        if self._turn is not None and self._turn.is_given and self._deadline == float("inf"):
            self._deadline = now + self._stall_s  # steps wait from now on, whether or not NCCL is ready
        if self._library.state(self._handle) is State.READY:
            if not self.ready:
                self.ready = True
                self.num_bytes = max(0, self._free_before - self._settings.copies.free_bytes())
                self._deadline = now + self._stall_s
            if self._launching is not None:
                self._running = self._launching, self._settings.copies.mark(self._stream)
                self._launching = None
                if self._turn is not None:
                    self._turn.launched()
            if self._running is not None and self._running[1].done():
                ended.append(self._running[0].number)
                self._running = None
                self._deadline = now + self._stall_s
                self._end_turn()
            if self._given and self._running is None and self._has_turn():
                self._launch(self._given.popleft())
        if now >= self._deadline and not (self.ready and self.idle):
            raise NcclError("the other rank was silent for too long" if self.ready else "the other rank did not come")
        return ended

    def abort(self) -> None:
        """End it at once, whatever it does; afterwards it touches no transfer's memory.

        NCCL's own farewell waits for the other rank, which may be the reason for ours; an idle communicator loses
        nothing by an abort.

        Raises:
            NcclError: it could not be ended in order.
        """
        if self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                self._library.abort(handle)
                if self._launching is not None or self._running is not None:
                    self._settings.copies.mark(self._stream).wait()  # its kernel was told to leave, and soon has
            finally:
                self._end_turn()

    def _has_turn(self) -> bool:
        """Whether the next transfer may be launched now. How long it waits for that is the link's business."""
        if self._end.turns is None:
            return True
        if self._turn is None:
            self._turn = self._end.turns.ask("source" if self._end.rank == SOURCE_RANK else "target")
            self._deadline = float("inf")
        return self._turn.is_given

    def _end_turn(self) -> None:
        if self._turn is not None:
            turn, self._turn = self._turn, None
            turn.end()

    def _launch(self, transfer: NcclTransfer) -> None:
        assert self._handle is not None
        self._transfer(self._handle, transfer.address, transfer.num_bytes, handle_of(self._stream))
        self._launching = transfer
        self._end.on_launch(transfer.number)

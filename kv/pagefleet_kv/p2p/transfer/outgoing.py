"""One transfer at P: a leg that computes, a reservation that waits for it, in whichever order they come, and frames."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_control import Abort, Body, Commit, ControlMessage, PlaneName, Ready, Reserve, Want

from pagefleet_kv.p2p.data_plane import FrameSent
from pagefleet_kv.p2p.transfer.actions import DropSpill, OnPlane, Piece, Send, SendFrame, SourceAction, Unpin
from pagefleet_kv.p2p.transfer.ledger import FrameLedger, SourceCounters
from pagefleet_kv.p2p.transfer.sessions import Lease, Session
from pagefleet_kv.p2p.transfer.settings import P2PSettings


@dataclass(slots=True, eq=False)
class _Hold:
    """A pin, or a spill."""

    number: int
    spill: bool
    size: int
    """Its blocks: memory that is free only when none of them is kept."""
    kept: int
    """Those that it is kept for."""
    moving: bool = False
    """Its blocks are being copied from it (a pin) or to it (a spill)."""


@dataclass(slots=True)
class _Place:
    hold: _Hold
    block: int
    """Number in the pool, or index in the spill."""


class Holdings:
    """The computed blocks of one transfer: where each is (the pool, or spilled memory), and who may have it back.

    index        |0 .. sent|  under way  |  waiting ..  num_blocks|
    kept by      | nobody  |      pins of saves, or spills        |
    """

    def __init__(self) -> None:
        self._places: list[_Place | None] = []
        self.hashes: list[BlockHash] = []
        self._spills: dict[int, tuple[_Hold, _Hold, list[int]]] = {}
        """Copies under way: from, to, indices."""
        self.num_pinned = 0
        """Blocks that are kept in the pool."""
        self.num_spilled = 0
        """Blocks of all spills that exist or are being made."""

    @property
    def num_blocks(self) -> int:
        """Blocks told so far, from the request's first on."""
        return len(self._places)

    @property
    def moving(self) -> bool:
        """True while something is being spilled."""
        return bool(self._spills)

    def add(self, save: int, first: int, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> list[Unpin | DropSpill]:
        """Take note of what a save brought; blocks that are known are let go."""
        known = self.num_blocks - first
        assert known >= 0, "a save left blocks out"
        new = blocks[known:]
        if not new:
            return [Unpin(save)]
        hold = _Hold(save, spill=False, size=len(blocks), kept=len(new))
        self._places += [_Place(hold, block) for block in new]
        self.hashes += hashes[known:]
        self.num_pinned += len(new)
        return []

    def piece(self, first: int, end: int) -> Piece | None:
        """Return the blocks from `first` on, as many as can be read at once; None: there are none now."""
        taken: list[int] = []
        start: _Place | None = None
        for index in range(first, min(end, self.num_blocks)):
            place = self._places[index]
            assert place is not None, "it was let go"
            if place.hold.moving or (start is not None and place.hold.spill != start.hold.spill):
                break
            if place.hold.spill and start is not None and place.hold is not start.hold:
                break
            start = start or place
            taken.append(place.block)
        if start is None:
            return None
        if start.hold.spill:
            return Piece(first, len(taken), spill=start.hold.number, spill_offset=taken[0])
        return Piece(first, len(taken), blocks=taken)

    def release(self, first: int, end: int) -> list[Unpin | DropSpill]:
        """Let blocks go: they were sent, or nobody wants them."""
        freed: list[Unpin | DropSpill] = []
        for index in range(first, min(end, self.num_blocks)):
            place = self._places[index]
            if place is not None and not place.hold.moving:
                self._places[index] = None
                freed += self._let_go(place.hold, 1)
        return freed

    def spill(self, number: int, first: int, most: int) -> list[int]:
        """Begin to copy blocks of one save, the first at or after `first` that are in the pool; returns which.

        A save is copied whole or not at all, as only then its pin ends.
        """
        for index in range(first, self.num_blocks):
            place = self._places[index]
            if place is None or place.hold.spill or place.hold.moving or place.hold.kept > most:
                continue
            indices = [i for i in range(first, self.num_blocks) if self._held_by(i, place.hold)]
            if len(indices) < place.hold.kept:
                continue  # some of it is on its way out already
            place.hold.moving = True
            copy = _Hold(number, spill=True, size=len(indices), kept=len(indices))
            self._spills[number] = (place.hold, copy, indices)
            self.num_spilled += copy.size
            return [self._block(i) for i in indices]
        return []

    def spilled(self, number: int, done: bool) -> list[Unpin | DropSpill]:
        """A copy ended; `done`: the blocks are there now."""
        source, copy, indices = self._spills.pop(number)
        source.moving = False
        if not done:
            self.num_spilled -= copy.size
            return []
        for offset, index in enumerate(indices):
            self._places[index] = _Place(copy, offset)
        return self._let_go(source, len(indices))

    def _held_by(self, index: int, hold: _Hold) -> bool:
        place = self._places[index]
        return place is not None and place.hold is hold

    def _block(self, index: int) -> int:
        place = self._places[index]
        assert place is not None
        return place.block

    def _let_go(self, hold: _Hold, count: int) -> list[Unpin | DropSpill]:
        hold.kept -= count
        if not hold.spill:
            self.num_pinned -= count
            return [] if hold.kept else [Unpin(hold.number)]
        if hold.kept:
            return []
        self.num_spilled -= hold.size
        return [DropSpill(hold.number)]


class Leg(enum.Enum):
    """How far P's own part is."""

    AWAITED = enum.auto()
    COMPUTING = enum.auto()
    COMPUTED = enum.auto()


@dataclass(slots=True, eq=False)
class Reservation:
    """What D asked for."""

    session: Session
    epoch: int
    wanted: Reserve
    credit: int
    plane: PlaneName
    fetched: bool = False

    @property
    def end(self) -> int:
        """Index after the last block wanted."""
        return self.wanted.first_block + self.wanted.num_blocks


@dataclass(slots=True)
class Repeat:
    """A message that is sent until it is answered."""

    body: Body
    due: float
    pause: float


@dataclass(slots=True, eq=False)
class Outgoing:
    """State of one transfer. Its methods return actions, and keep nothing outside of it but the counters."""

    transfer_id: bytes
    peer_incarnation: str
    """The only decode engine that may have it."""
    lease: Lease
    settings: P2PSettings
    counters: SourceCounters
    leg: Leg = Leg.AWAITED
    reservation: Reservation | None = None
    holdings: Holdings = field(default_factory=Holdings)
    ledger: FrameLedger = field(default_factory=lambda: FrameLedger(0))
    next_block: int = 0
    """The first that no frame has taken."""
    num_taken: int = 0
    """Frames that were given to the plane."""
    under_way: deque[SendFrame] = field(default_factory=deque)
    computed_at: float = 0.0
    repeat: Repeat | None = None
    closing: bool = False

    @property
    def idle(self) -> bool:
        """True if nothing reads its blocks."""
        return not self.under_way and not self.holdings.moving

    def reserve(self, reservation: Reservation) -> None:
        """D's half is here."""
        self.reservation = reservation
        self.next_block = reservation.wanted.first_block
        self.ledger = FrameLedger(self.next_block)

    def renew(self, now: float) -> None:
        """D still waits. That keeps blocks, not a place for a leg that does not come."""
        if self.leg is not Leg.AWAITED:
            self.lease.renew(now)

    def trim(self) -> list[Unpin | DropSpill]:
        """Let go of blocks that D does not want."""
        if self.reservation is None:
            return []
        before = self.holdings.release(0, self.reservation.wanted.first_block)
        return before + self.holdings.release(self.reservation.end, self.holdings.num_blocks)

    def say(self, body: Body, seq: int = 0) -> list[SourceAction]:
        """Send to D, if it has a socket here."""
        found = self.reservation
        if found is None or not found.session.peer:
            return []
        return [Send(found.session.peer, ControlMessage(body, self.transfer_id, found.epoch, seq))]

    def abort(self, reason: str) -> list[SourceAction]:
        """Tell D that nothing more comes."""
        return self.say(Abort(reason[:1000]))

    def withdraw(self) -> list[SourceAction]:
        """Take back what the plane has."""
        if not self.under_way or self.reservation is None:
            return []
        return [OnPlane(self.reservation.plane, "withdraw", (self.transfer_id,))]

    @property
    def may_send(self) -> bool:
        """True if blocks may go now, as far as the send type is concerned."""
        found = self.reservation
        if found is None or self.closing or self.leg is Leg.AWAITED:
            return False
        if self.settings.send_type == "put_async":
            return True
        return self.leg is Leg.COMPUTED and (self.settings.send_type == "put" or found.fetched)

    def problem(self) -> str:
        """Return why this transfer cannot succeed; empty: nothing is known against it."""
        found = self.reservation
        if found is None:
            return ""
        if self.holdings.num_blocks >= found.end:
            same = self.holdings.hashes[found.end - 1] == found.wanted.last_hash
            return "" if same else "the two engines mean different prompts"
        if self.leg is Leg.COMPUTED:
            return f"the prompt has {self.holdings.num_blocks} whole blocks here, {found.end} are wanted"
        return ""

    def pump(self, now: float) -> list[SourceAction]:
        """Send what may be sent."""
        found = self.reservation
        if found is None or self.closing or self.leg is Leg.AWAITED:
            return []
        if not self.may_send:
            return self._offer(now)
        actions: list[SourceAction] = []
        while len(self.under_way) < self.settings.frames_ahead and (frame := self._next_frame(found)) is not None:
            self.next_block += frame.piece.count
            self.num_taken += 1
            self.under_way.append(frame)
            actions.append(frame)
        if self.leg is Leg.COMPUTED and self.next_block == found.end and not self.under_way:
            return actions + self._commit(now)
        return actions + self._want(found, now)

    def frame_sent(self, event: FrameSent) -> list[SourceAction]:
        """The plane is done with the oldest frame under way; any other is not of this transfer's making."""
        frame = self.under_way[0] if self.under_way else None
        if frame is None or (frame.epoch, frame.seq) != (event.epoch, event.seq):
            return []
        self.under_way.popleft()
        piece = frame.piece
        self.ledger.record(piece.count, event.num_bytes, event.checksum)
        self.counters.sent_bytes += event.num_bytes
        self.counters.sent_blocks += piece.count
        if self.closing:
            return []
        return list(self.holdings.release(piece.first, piece.first + piece.count))

    def repeat_due(self, now: float) -> list[SourceAction]:
        """Send again what has had no answer."""
        waiting = self.repeat
        if waiting is None or now < waiting.due:
            return []
        waiting.pause = min(waiting.pause * 2, 4 * self.settings.retry)
        waiting.due = now + waiting.pause
        body = waiting.body
        if isinstance(body, Commit):
            body = self.ledger.commit(round((now - self.computed_at) * 1e6))
        return self.say(body)

    def _next_frame(self, found: Reservation) -> SendFrame | None:
        block_bytes = self.settings.block_bytes
        credit = found.credit // block_bytes - (self.next_block - found.wanted.first_block)
        count = min(self.settings.blocks_per_frame, credit)
        piece = self.holdings.piece(self.next_block, min(found.end, self.next_block + count)) if count > 0 else None
        if piece is None:
            return None
        return SendFrame(found.plane, found.session.incarnation, self.transfer_id, found.epoch, self.num_taken, piece)

    def _ask(self, body: Body, now: float) -> list[SourceAction]:
        """Say something until it is answered, once now; saying the same again changes nothing."""
        if self.repeat is not None and type(self.repeat.body) is type(body):
            same = isinstance(body, Commit) or self.repeat.body == body
            if same:
                return []
        self.repeat = Repeat(body, now + self.settings.retry, self.settings.retry)
        return self.say(body)

    def _offer(self, now: float) -> list[SourceAction]:
        if self.settings.send_type == "get" and self.leg is Leg.COMPUTED:
            return self._ask(Ready(self.holdings.num_blocks), now)
        return []

    def _want(self, found: Reservation, now: float) -> list[SourceAction]:
        ready = (min(self.holdings.num_blocks, found.end) - found.wanted.first_block) * self.settings.block_bytes
        if ready <= found.credit:
            self.repeat = None
            return []
        new = self.repeat is None
        if new:
            self.counters.credit_stalls += 1
        return self._ask(Want(ready), now)

    def _commit(self, now: float) -> list[SourceAction]:
        return self._ask(self.ledger.commit(round((now - self.computed_at) * 1e6)), now)

"""One transfer at P: a leg that computes, a reservation that waits for it, in whichever order they come, and frames."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from pagefleet_protocol.kv_control import Abort, Body, Commit, ControlMessage, PlaneName, Ready, Reserve, Want

from pagefleet_kv.p2p.data_plane import FrameSent
from pagefleet_kv.p2p.transfer.actions import DropSpill, Send, SendFrame, SourceAction, Unpin, Withdraw
from pagefleet_kv.p2p.transfer.commit import FrameLedger
from pagefleet_kv.p2p.transfer.counters import SourceCounters
from pagefleet_kv.p2p.transfer.holdings import Holdings
from pagefleet_kv.p2p.transfer.lease import Lease
from pagefleet_kv.p2p.transfer.sessions import Session
from pagefleet_kv.p2p.transfer.settings import P2PSettings


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
        return [Withdraw(self.reservation.plane, self.transfer_id)]

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

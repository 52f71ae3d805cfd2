"""The prefill side: keeps computed blocks under a lease, and sends them to the decode engine that reserved room.

A transfer has two halves, the leg (`begin`, `save`, `ended`) and D's Reserve, which come in any order. It is over when
D has acknowledged the COMMIT, either side gives up, the lease runs out, D falls silent, or its link breaks; then its
blocks are unpinned as soon as nothing reads them. What comes for it afterwards is answered with a Nack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagefleet_protocol.kv_blob import KvShape
from pagefleet_protocol.kv_control import (
    NO_TRANSFER,
    Ack,
    Body,
    Cancel,
    ControlMessage,
    Credit,
    Fetch,
    Hello,
    KvControlError,
    KvIncompatibleError,
    KvVersionError,
    Nack,
    NackReason,
    Ping,
    Plane,
    PlaneName,
    Pong,
    Renew,
    Reserve,
    Welcome,
)

from pagefleet_kv.p2p.data_plane import FrameSent, LinkDown, PlaneEvent, Tell, Withdrawn
from pagefleet_kv.p2p.transfer.actions import LegSettled, OnPlane, Send, SourceAction, Spill, Unpin
from pagefleet_kv.p2p.transfer.ledger import SourceCounters
from pagefleet_kv.p2p.transfer.outgoing import Leg, Outgoing, Reservation
from pagefleet_kv.p2p.transfer.sessions import Lease, Session, Sessions, Tombstones
from pagefleet_kv.p2p.transfer.settings import P2PSettings
from pagefleet_kv.port import BlockRun


class Source:
    """All transfers of one prefill engine. Every call returns what is to be done, in order; no call waits."""

    def __init__(
        self,
        settings: P2PSettings,
        shape: KvShape,
        incarnation: str,
        invite: Mapping[PlaneName, Callable[[str], bytes]],
        host: str = "",
    ) -> None:
        """`invite`: of each data plane there is, its `DataPlane.invite`; `host`: as in `Hello`."""
        self.counters = SourceCounters()
        self._settings = settings
        self._shape = shape
        self._incarnation = incarnation
        self._invite = invite
        self._host = host
        self._sessions = Sessions(settings.max_sessions, settings.timing)
        self._live: dict[bytes, Outgoing] = {}
        self._closing: dict[bytes, Outgoing] = {}
        self._ended: Tombstones[str] = Tombstones(settings.max_tombstones)
        self._spills: dict[int, tuple[Outgoing, int]] = {}
        """Copies under way, and how many blocks each has."""
        self._num_spills = 0
        self._draining = False

    @property
    def num_transfers(self) -> int:
        """Transfers that still hold something, here or at a peer."""
        return len(self._live) + len(self._closing)

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that are kept in the pool."""
        return sum(found.holdings.num_pinned for found in self._transfers())

    @property
    def num_spilled_blocks(self) -> int:
        """Blocks that are in spilled memory, or on their way there."""
        return sum(found.holdings.num_spilled for found in self._transfers())

    @property
    def num_sessions(self) -> int:
        """Decode engines that talk to it."""
        return len(self._sessions)

    def begin(self, transfer_id: bytes, peer_incarnation: str, now: float) -> list[SourceAction]:
        """A prefill leg was admitted, for the decode engine of that incarnation. Its lease starts.

        A transfer has one leg: a second one for the same transfer is not taken note of.
        """
        ended = self._outcome(transfer_id)
        if ended is not None:
            return [LegSettled(transfer_id, ended == "not_needed", "" if ended == "not_needed" else ended)]
        found = self._live.get(transfer_id)
        if found is None:
            found = self._add(transfer_id, peer_incarnation, now)
        elif found.leg is not Leg.AWAITED:
            return []
        elif found.peer_incarnation != peer_incarnation:
            # Somebody else's Reserve came first; the right one still may.
            del self._live[transfer_id]
            actions = found.say(self._nack("unknown"))
            found = self._add(transfer_id, peer_incarnation, now)
            found.leg = Leg.COMPUTING
            return actions
        found.leg = Leg.COMPUTING
        found.lease = Lease(self._settings.lease, now)
        return []

    def save(self, transfer_id: bytes, save: int, run: BlockRun, now: float) -> list[SourceAction]:
        """Blocks of the leg hold their K/V and are pinned under the number `save` until `Unpin` names it (maybe now).

        They follow on those told before, or are some of them again: a leg that was preempted tells all anew.
        """
        found = self._live.get(transfer_id)
        if found is None or found.leg is not Leg.COMPUTING:
            return [Unpin(save)]
        if run.first > found.holdings.num_blocks:
            return [Unpin(save), *self._close(found, f"block {found.holdings.num_blocks} is missing", tell=True)]
        actions: list[SourceAction] = [*found.holdings.add(save, run.first, run.blocks, run.hashes)]
        found.computed_at = now
        return actions + self._go_on(found, now) + self._spill(self._excess())

    def ended(self, transfer_id: bytes, completed: bool, now: float) -> list[SourceAction]:
        """The leg is over; `completed`: every block of its prompt was told."""
        found = self._live.get(transfer_id)
        if found is None or found.leg is not Leg.COMPUTING:
            return []
        if not completed:
            return self._close(found, "the prefill request ended early", tell=True)
        found.leg = Leg.COMPUTED
        found.computed_at = found.computed_at or now
        if not found.holdings.num_blocks and found.reservation is None:  # a prompt shorter than a block: nobody asks
            return self._close(found, "not_needed")
        return self._go_on(found, now)

    def message(self, peer: str, message: ControlMessage, now: float) -> list[SourceAction]:
        """A decode engine said something. `peer`: whatever names its socket here."""
        body = message.body
        if isinstance(body, Hello):
            return self._hello(peer, body, message.seq, now)
        session = self._sessions.heard(peer, now)
        if session is None:
            return [self._answer(peer, message, self._nack("no_session"))]
        if isinstance(body, Ping):
            return [self._answer(peer, message, Pong(self._incarnation, self._draining))]
        if isinstance(body, Plane):
            agreed = body.name == session.plane
            return [OnPlane(body.name, "hear", (session.incarnation, body.payload))] if agreed else []
        if isinstance(body, Reserve):
            return self._reserve(session, message, body, now)
        return self._about(session, message, now)

    def refused(self, peer: str, error: KvControlError) -> list[SourceAction]:
        """What a peer sent could not be decoded: it is told if it is of another version or shape, else only counted."""
        self.counters.refused_messages += 1
        if isinstance(error, KvVersionError | KvIncompatibleError):
            nack = self._nack("incompatible", str(error), self._shape)
            return [Send(peer, ControlMessage(nack))]
        return []

    def tell(self, plane: PlaneName, event: Tell) -> list[SourceAction]:
        """A plane has something to say to its other end."""
        session = self._sessions.of(event.peer)
        if session is None or not session.peer:
            return []
        return [Send(session.peer, ControlMessage(Plane(plane, event.data)))]

    def plane_event(self, event: PlaneEvent, now: float) -> list[SourceAction]:
        """A data plane told something; what is not for this side (LinkUp, FrameArrived ...) changes nothing here."""
        if isinstance(event, LinkDown):
            return self._link_down(event) if event.end == "source" else []
        if not isinstance(event, FrameSent | Withdrawn):
            return []
        found = self._live.get(event.transfer_id) or self._closing.get(event.transfer_id)
        if found is None:
            return []
        if isinstance(event, FrameSent):
            actions = found.frame_sent(event)
            return actions + (self._settle(found) if found.closing else found.pump(now))
        if found.closing:
            found.under_way.clear()
        return self._settle(found)

    def spilled(self, number: int, now: float) -> list[SourceAction]:
        """A `Spill` is in host memory."""
        return self._spill_ended(number, True, now)

    def spill_failed(self, number: int, now: float) -> list[SourceAction]:
        """A `Spill` could not be made: its blocks stay pinned. Its memory needs no `DropSpill`."""
        return self._spill_ended(number, False, now)

    def relieve(self, num_blocks: int) -> list[SourceAction]:
        """The pool is short: spill so many blocks, as far as the overflow pool has room.

        Those on their way there count. What only the transfers keep goes first: spilling the blocks of a leg that
        computes frees none while its request runs.
        """
        moving = sum(count for _, count in self._spills.values())
        return self._spill(num_blocks - moving)

    def drain(self) -> list[SourceAction]:
        """Take no transfer whose leg is not here already. Those that are here go on."""
        self._draining = True
        actions: list[SourceAction] = []
        for found in [found for found in self._live.values() if found.leg is Leg.AWAITED]:
            actions += [*found.say(self._nack("draining")), *self._close(found, "the prefill engine drains")]
        return actions

    def tick(self, now: float) -> list[SourceAction]:
        """Let time pass: to be called every 100 ms or so."""
        actions: list[SourceAction] = []
        for session in self._sessions.take_dead(now):
            actions += self._lost(session, "the decode engine is silent")
        for found in list(self._live.values()):
            if found.lease.expired(now):
                self.counters.lease_expiries += 1
                awaited = found.leg is Leg.AWAITED
                actions += self._close(found, "its prefill request did not come" if awaited else "expired", tell=True)
            else:
                actions += found.repeat_due(now)
        return actions

    def close(self) -> list[SourceAction]:
        """Abort everything. Frames and spills under way still have to end, before their blocks are unpinned."""
        actions: list[SourceAction] = []
        for found in list(self._live.values()):
            actions += self._close(found, "the prefill engine stops", tell=True)
        self._draining = True
        return actions

    def _hello(self, peer: str, hello: Hello, seq: int, now: float) -> list[SourceAction]:
        apart = hello.host != self._host
        plane = next(
            (name for name in hello.planes if name in self._invite and (name != "cuda_ipc" or not apart)), None
        )
        if plane is None:
            detail = f"no data plane in common: {', '.join(self._invite)} here, {', '.join(hello.planes)} there"
            return [Send(peer, ControlMessage(self._nack("incompatible", detail, self._shape), seq=seq))]
        if self._sessions.greet(peer, hello.incarnation, plane, now) is None:
            return [Send(peer, ControlMessage(self._nack("busy"), seq=seq))]
        welcome = Welcome(
            self._incarnation, plane, self._invite[plane](hello.incarnation), round(self._settings.lease * 1000)
        )
        return [Send(peer, ControlMessage(welcome, seq=seq))]

    def _reserve(self, session: Session, message: ControlMessage, body: Reserve, now: float) -> list[SourceAction]:
        found = self._live.get(message.transfer_id)
        refusal = self._refusal(found, session, message, body)
        if refusal is not None:
            return [self._answer(session.peer, message, self._nack(refusal))]
        if found is None:
            found = self._add(message.transfer_id, session.incarnation, now)
            found.lease = Lease(self._settings.leg_timeout, now)
        found.renew(now)
        actions: list[SourceAction] = [self._answer(session.peer, message, Ack("reserve"))]
        if found.reservation is None:
            found.reserve(Reservation(session, message.epoch, body, body.credit, session.plane))
        else:
            found.reservation.credit = max(found.reservation.credit, body.credit)
        return actions + self._go_on(found, now)

    def _refusal(
        self, found: Outgoing | None, session: Session, message: ControlMessage, body: Reserve
    ) -> NackReason | None:
        if message.transfer_id == NO_TRANSFER or (found is not None and found.peer_incarnation != session.incarnation):
            return "unknown"
        if found is not None:
            bound = found.reservation
            same = bound is None or (bound.epoch == message.epoch and bound.wanted.num_blocks == body.num_blocks)
            return None if same else "stale"
        if self._outcome(message.transfer_id) is not None:
            return "expired"
        if self._draining:
            return "draining"
        early = sum(t.leg is Leg.AWAITED for t in self._live.values())
        return "busy" if early >= self._settings.max_early_reserves else None

    def _about(self, session: Session, message: ControlMessage, now: float) -> list[SourceAction]:
        """D said something about one transfer."""
        body = message.body
        found = self._live.get(message.transfer_id)
        if found is None or found.peer_incarnation != session.incarnation:
            return self._unknown(session, message)
        if isinstance(body, Cancel):
            return self._close(found, f"{body.reason}: {body.detail}" if body.detail else body.reason)
        bound = found.reservation
        if bound is None or bound.epoch != message.epoch:
            stale = isinstance(body, Renew | Credit | Fetch)
            return [self._answer(session.peer, message, self._nack("stale"))] if stale else []
        return self._about_reservation(found, bound, body, now)

    def _about_reservation(self, found: Outgoing, bound: Reservation, body: Body, now: float) -> list[SourceAction]:
        if isinstance(body, Renew):
            found.renew(now)
        elif isinstance(body, Credit):
            bound.credit = max(bound.credit, body.num_bytes)
            return self._go_on(found, now)
        elif isinstance(body, Fetch):
            bound.fetched = True
            return self._go_on(found, now)
        elif isinstance(body, Ack) and body.of == "commit":
            if found.leg is Leg.COMPUTED and found.next_block == bound.end and not found.under_way:
                return self._close(found, "", delivered=True)
        elif isinstance(body, Nack):
            self.counters.nacks += 1
            return self._close(found, f"the decode engine refused it: {body.reason}")
        return []

    def _unknown(self, session: Session, message: ControlMessage) -> list[SourceAction]:
        ended = self._outcome(message.transfer_id)
        if isinstance(message.body, Cancel):
            if ended is None and message.transfer_id not in self._live and message.transfer_id != NO_TRANSFER:
                self._ended.add(message.transfer_id, message.body.reason)
            return []
        if isinstance(message.body, Renew | Credit | Fetch):
            return [self._answer(session.peer, message, self._nack("unknown" if ended is None else "expired"))]
        return []

    def _link_down(self, event: LinkDown) -> list[SourceAction]:
        """Abort what went over the link. A new link may stand already and have newer frames, so these are withdrawn."""
        actions: list[SourceAction] = []
        for found in list(self._live.values()):
            if found.peer_incarnation == event.peer and found.num_taken:
                actions += self._close(found, f"the data connection was lost: {event.reason}", tell=True)
        return actions

    def _lost(self, session: Session, reason: str) -> list[SourceAction]:
        actions: list[SourceAction] = [OnPlane(session.plane, "disconnect", (session.incarnation, "source"))]
        for found in self._transfers():
            if found.reservation is None or found.reservation.session is not session:
                continue
            found.under_way.clear()
            actions += self._settle(found) if found.closing else self._close(found, reason)
        return actions

    def _transfers(self) -> list[Outgoing]:
        return [*self._live.values(), *self._closing.values()]

    def _outcome(self, transfer_id: bytes) -> str | None:
        """Return how a transfer ended; None: it has not, as far as is remembered."""
        return self._ended.get(transfer_id) or ("expired" if transfer_id in self._closing else None)

    def _add(self, transfer_id: bytes, peer_incarnation: str, now: float) -> Outgoing:
        lease = Lease(self._settings.lease, now)
        self._live[transfer_id] = Outgoing(transfer_id, peer_incarnation, lease, self._settings, self.counters)
        return self._live[transfer_id]

    def _go_on(self, found: Outgoing, now: float) -> list[SourceAction]:
        problem = found.problem()
        if problem:
            return self._close(found, problem, tell=True)
        return [*found.trim(), *found.pump(now)]

    def _close(
        self, found: Outgoing, reason: str, *, delivered: bool = False, tell: bool = False
    ) -> list[SourceAction]:
        """End a transfer; its blocks follow when nothing reads them. `tell`: D learns it by an Abort."""
        delivered = delivered or reason == "not_needed"
        found.closing = True
        del self._live[found.transfer_id]
        self._closing[found.transfer_id] = found
        self._ended.add(found.transfer_id, reason or "delivered")
        actions = found.abort(reason) if tell else []
        self.counters.delivered += delivered
        self.counters.failures += not delivered
        if found.leg is not Leg.AWAITED:
            actions.append(LegSettled(found.transfer_id, delivered, "" if delivered else reason))
        return actions + found.withdraw() + self._settle(found)

    def _settle(self, found: Outgoing) -> list[SourceAction]:
        if not found.closing or not found.idle or self._closing.pop(found.transfer_id, None) is None:
            return []
        return [*found.holdings.release(0, found.holdings.num_blocks)]

    def _excess(self) -> int:
        """Blocks pinned beyond what may be."""
        moving = sum(count for _, count in self._spills.values())
        return self.num_pinned_blocks - moving - self._settings.buffer_bytes // self._settings.block_bytes

    def _spill(self, num_blocks: int) -> list[SourceAction]:
        actions: list[SourceAction] = []
        room = self._settings.overflow_bytes // self._settings.block_bytes - self.num_spilled_blocks
        for found in sorted(self._live.values(), key=lambda found: found.leg is not Leg.COMPUTED):
            while num_blocks > 0:
                number = self._num_spills + 1
                blocks = found.holdings.spill(number, found.next_block, room)
                if not blocks:
                    break
                self._num_spills = number
                self._spills[number] = (found, len(blocks))
                actions.append(Spill(number, blocks))
                room -= len(blocks)
                num_blocks -= len(blocks)
        return actions

    def _spill_ended(self, number: int, done: bool, now: float) -> list[SourceAction]:
        found, count = self._spills.pop(number)
        self.counters.blocks_spilled += count if done else 0
        actions: list[SourceAction] = [*found.holdings.spilled(number, done)]
        return actions + (self._settle(found) if found.closing else self._go_on(found, now))

    def _answer(self, peer: str, message: ControlMessage, body: Body) -> Send:
        return Send(peer, ControlMessage(body, message.transfer_id, message.epoch, message.seq))

    def _nack(self, reason: NackReason, detail: str = "", shape: KvShape | None = None) -> Nack:
        self.counters.nacks += 1
        return Nack(reason, detail[:1000], shape)

"""A data plane of an engine, made of the planes of its ranks: a link has a lane for each two that share something.

Each rank has a plane of its own, which knows ranks of other engines as its peers and nothing of the engine. Here, in
the thread of whoever owns the transfers, a frame becomes a part on each lane, and what lanes tell becomes one event: a
link is up once all lanes are, and down with the first; a frame has arrived when all parts have. What ranks have to say
to each other passes through here, with the lane's number. An engine of one rank is no exception.
"""

from __future__ import annotations

import secrets
import select
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from pagefleet_kv.p2p.data_plane import (
    End,
    Frame,
    FrameArrived,
    FrameRefused,
    FrameSent,
    Landed,
    Landing,
    LinkDown,
    LinkUp,
    PlaneEvent,
    Tell,
    TurnAsked,
    TurnEnded,
    Withdrawn,
)
from pagefleet_kv.p2p.planes.device.lanes import (
    Lane,
    LaneTerms,
    ShardsDiffer,
    num_parts,
    plan_lanes,
    region_of,
    whole_of,
)
from pagefleet_kv.p2p.planes.device.opening import RankPlane
from pagefleet_kv.p2p.planes.device.rank_words import Invited, Shards, decode_invited, decode_shards, encode
from pagefleet_kv.p2p.planes.device.turns import LaunchOrder, TurnGiver
from pagefleet_kv.p2p.planes.device.words import TOKEN_BYTES
from pagefleet_kv.p2p.planes.shell import Invitations
from pagefleet_kv.port import KVShard

_LaneEvent = LinkUp | LinkDown | FrameSent | FrameArrived | FrameRefused | Tell

_MAGIC = b"PFKR"
_HEAD = struct.Struct("<BHH")
"""Before what is said to a peer's plane: its kind, and the lane's source and target."""
_TO_SOURCE, _TO_TARGET, _SHARDS, _INVITED = range(4)


@dataclass(slots=True)
class _Part:
    """A frame of which some lanes have not told yet."""

    waiting: set[Lane]
    checksum: int = 0


_FrameName = tuple[bytes, int, int]


@dataclass(eq=False, slots=True)
class _Link:
    """One end of a link."""

    peer: str
    end: End
    token: bytes
    host: str
    lanes: Sequence[Lane]
    deadline: float
    """By which it is to be up."""
    connected: bool
    """Whether ranks know of the lanes."""
    down: set[Lane] = field(default_factory=set)
    """Lanes that are not up yet."""
    frames: dict[_FrameName, _Part] = field(default_factory=dict)

    def lane(self, own: int, other: int) -> Lane | None:
        """The lane of one of our ranks with one of theirs."""
        pair = (own, other) if self.end == "source" else (other, own)
        return next((lane for lane in self.lanes if (lane.source, lane.target) == pair), None)


class RankedPlane:
    """Implements `DataPlane` over the planes of an engine's ranks. Used by one thread.

    Args:
        name: of the plane.
        ranks: their planes; closed with it.
        turns: gives them to ranks.
        shards: what each rank holds.
        bytes_per_block: of the whole model.
        handshake_s: for a link, from when it is asked for.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[RankPlane],
        turns: TurnGiver,
        shards: Sequence[KVShard],
        bytes_per_block: int,
        handshake_s: float,
    ) -> None:
        self.name = name
        self._ranks = ranks
        self._order = LaunchOrder(turns)
        self._steps_wait = len(ranks) > 1 or turns.is_one_of_several
        """For other devices."""
        self._shards = shards
        self._whole = whole_of(shards)
        self._head_bytes = bytes_per_block // num_parts(self._whole)
        self._handshake_s = handshake_s
        self._invitations = Invitations()
        self._links: dict[tuple[str, End], _Link] = {}
        self._landing: set[bytes] = set()
        """Transfers that have landings."""
        self._ending: dict[tuple[type[Landed | Withdrawn], bytes], deque[set[int]]] = {}
        """Calls of `forget` and `withdraw`: the ranks that have not answered each."""
        self._heard: deque[tuple[int, PlaneEvent]] = deque()
        self._told: list[PlaneEvent] = []
        self._num_refused = 0
        self._bells = select.epoll()
        for rank in ranks:
            self._bells.register(rank.bell, select.EPOLLIN)
        if turns.bell is not None:
            self._bells.register(turns.bell, select.EPOLLIN)

    @property
    def bell(self) -> int:
        """See DataPlane."""
        return self._bells.fileno()

    def invite(self, peer: str) -> bytes:
        """See DataPlane: which ranks there are. Those invite ranks themselves, once it is known which."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._invitations.give(token, peer)
        return _MAGIC + encode(Shards.of(token, self._shards))

    def connect(self, peer: str, host: str, invitation: bytes) -> None:
        """See DataPlane."""
        self.disconnect(peer, "target")
        try:
            if not invitation.startswith(_MAGIC):
                raise ShardsDiffer("the invitation is none of this plane")
            shards = decode_shards(invitation[len(_MAGIC) :])
            lanes = plan_lanes(shards.held, self._shards)
        except ShardsDiffer as error:
            self._told.append(LinkDown(peer, "target", str(error)))
            return
        self._add(
            _Link(peer, "target", shards.token, host, lanes, time.monotonic() + self._handshake_s, connected=False)
        )
        self._say(peer, _SHARDS, encode(Shards.of(shards.token, self._shards)))

    def disconnect(self, peer: str, end: End) -> None:
        """See DataPlane."""
        if end == "source":
            self._invitations.take_back(peer)
        if (link := self._links.get((peer, end))) is not None:
            self._remove(link)

    def send(self, peer: str, frame: Frame) -> None:
        """See DataPlane."""
        link = self._links.get((peer, "source"))
        if link is None:
            self._told.append(LinkDown(peer, "source", "it is not connected"))
            return
        link.frames[frame.transfer_id, frame.epoch, frame.seq] = _Part(set(link.lanes))
        for lane in link.lanes:
            held = None if frame.held is None else self._cut(frame.held, lane)
            self._ranks[lane.source].send(_rank_of(peer, lane.target), replace(frame, held=held))

    def withdraw(self, transfer_id: bytes) -> None:
        """See DataPlane."""
        self._ask_all(Withdrawn, transfer_id)
        for rank in self._ranks:
            rank.withdraw(transfer_id)

    def land(self, peer: str, landing: Landing) -> None:
        """See DataPlane. Without a link there is nobody who could bring anything."""
        if (link := self._links.get((peer, "target"))) is not None:
            self._landing.add(landing.transfer_id)
            for lane in link.lanes:
                self._ranks[lane.target].land(_rank_of(peer, lane.source), landing)

    def forget(self, transfer_id: bytes) -> None:
        """See DataPlane."""
        self._ask_all(Landed, transfer_id)
        for rank in self._ranks:
            rank.forget(transfer_id)

    def hear(self, peer: str, data: bytes) -> None:
        """See DataPlane."""
        if len(data) < _HEAD.size:
            self._num_refused += 1
            return
        kind, source, target = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        try:
            if kind == _SHARDS:
                self._let_in(peer, decode_shards(body))
            elif kind == _INVITED:
                self._invited(peer, decode_invited(body))
            else:
                self._pass_on(peer, kind == _TO_SOURCE, (source, target), body)
        except (ShardsDiffer, msgspec.MsgspecError):
            self._num_refused += 1

    def _pass_on(self, peer: str, to_source: bool, lane: tuple[int, int], word: bytes) -> None:
        """Give a rank what one of the peer's said."""
        own, other = lane if to_source else lane[::-1]
        link = self._links.get((peer, "source" if to_source else "target"))
        if link is not None and link.lane(own, other) is not None:
            self._ranks[own].hear(_rank_of(peer, other), word)

    def events(self) -> Sequence[PlaneEvent]:
        """See DataPlane."""
        self._collect()
        while self._heard:
            self._on_event(*self._heard.popleft())
        self._order.go_on()
        now = time.monotonic()
        for late in [link for link in self._links.values() if link.down and now >= link.deadline]:
            self._end(late, "it was silent for too long")
        told, self._told = self._told, []
        return told

    def counters(self) -> dict[str, float]:
        """See DataPlane: of all ranks together."""
        total = {"refused_connections_total": float(self._num_refused)}
        for counters in [rank.counters() for rank in self._ranks]:
            for name, value in counters.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def close(self) -> None:
        """See DataPlane."""
        for rank in self._ranks:
            rank.close()
        self._bells.close()

    # --- links

    def _add(self, link: _Link) -> None:
        link.down = set(link.lanes)
        self._links[link.peer, link.end] = link

    def _let_in(self, peer: str, shards: Shards) -> None:
        """Source: who was invited says which ranks it has; maybe twice, as engines that are each other's source do."""
        old = self._links.get((peer, "source"))
        if old is not None and old.token == shards.token:
            return
        invited = self._invitations.find(shards.token)
        if invited is None or invited.peer != peer:
            self._num_refused += 1
            return
        self._invitations.spend(shards.token)
        lanes = plan_lanes(self._shards, shards.held)
        if old is not None:
            self._end(old, "it connected again")
        link = _Link(peer, "source", shards.token, "", lanes, time.monotonic() + self._handshake_s, connected=True)
        self._add(link)
        invitations = [
            self._ranks[lane.source].invite(_rank_of(peer, lane.target), self._terms(link, lane, lane.source))
            for lane in lanes
        ]
        self._say(peer, _INVITED, encode(Invited(shards.token, invitations)))

    def _invited(self, peer: str, invited: Invited) -> None:
        """Target: all lanes may connect."""
        link = self._links.get((peer, "target"))
        if link is None or link.token != invited.token or len(link.lanes) != len(invited.lanes):
            self._num_refused += 1
            return
        lanes = [] if link.connected else link.lanes  # it may be said twice
        link.connected = True
        for lane, invitation in zip(lanes, invited.lanes, strict=bool(lanes)):
            terms = self._terms(link, lane, lane.target)
            self._ranks[lane.target].connect(_rank_of(peer, lane.source), link.host, invitation, terms)

    def _end(self, link: _Link, reason: str) -> None:
        self._remove(link)
        self._told.append(LinkDown(link.peer, link.end, reason))

    def _remove(self, link: _Link) -> None:
        """Have no lane of it touch anything, and hear no more of it."""
        del self._links[link.peer, link.end]
        for lane in link.lanes if link.connected else ():
            own, other = (lane.source, lane.target) if link.end == "source" else (lane.target, lane.source)
            self._ranks[own].disconnect(_rank_of(link.peer, other), link.end)
        self._collect()
        self._heard = deque(one for one in self._heard if _end_of(one[1]) != (link.peer, link.end))

    def _terms(self, link: _Link, lane: Lane, rank: int) -> LaneTerms:
        """How one of our ranks has its end of a lane. In turn go ranks whose steps wait for each other, and what one
        rank receives of several."""
        held = self._shards[rank]
        region = None if lane.shard == held else region_of(lane.shard, held, self._head_bytes)
        receives_of_several = link.end == "target" and len(link.lanes) > 1
        return LaneTerms(region, self._steps_wait or receives_of_several)

    def _cut(self, held: memoryview, lane: Lane) -> memoryview:
        """What a lane carries of whole blocks in host memory."""
        if lane.shard == self._whole:
            return held
        region = region_of(lane.shard, self._whole, self._head_bytes)
        blocks = np.frombuffer(held, np.uint8).reshape(-1, *region.axes)
        part = blocks[:, slice(*region.layers), :, slice(*region.bytes)]
        return np.ascontiguousarray(part).reshape(-1).data

    # --- what ranks tell

    def _collect(self) -> None:
        for number, rank in enumerate(self._ranks):
            self._heard.extend((number, event) for event in rank.events())

    def _on_event(self, rank: int, event: PlaneEvent) -> None:
        match event:
            case Landed() | Withdrawn():
                self._on_answer(rank, event)
            case TurnAsked():
                self._order.asked(rank, event)
            case TurnEnded():
                self._order.ended(rank, event)
            case _:
                self._on_event_of_lane(rank, event)

    def _on_event_of_lane(self, rank: int, event: _LaneEvent) -> None:
        peer, other = _engine_of(event.peer)
        if isinstance(event, Tell):
            to_source = bool(event.data[TOKEN_BYTES])
            pair = (other, rank) if to_source else (rank, other)
            self._say(peer, _TO_SOURCE if to_source else _TO_TARGET, event.data, pair)
            return
        end = _end_of(event)
        link = None if end is None else self._links.get(end)
        lane = None if link is None else link.lane(rank, other)
        if link is None or lane is None:
            return
        match event:
            case LinkUp():
                link.down.discard(lane)
                if not link.down:
                    self._told.append(LinkUp(peer, link.end))
            case LinkDown():
                self._end(link, event.reason)
            case FrameSent() | FrameArrived():
                self._on_frame(link, lane, event)
            case FrameRefused():
                link.frames.pop((event.transfer_id, event.epoch, event.seq), None)
                self._told.append(replace(event, peer=peer))

    def _on_frame(self, link: _Link, lane: Lane, event: FrameSent | FrameArrived) -> None:
        """A part was sent, or has arrived: the frame has when all have."""
        name = event.transfer_id, event.epoch, event.seq
        if isinstance(event, FrameArrived) and event.transfer_id in self._landing:
            link.frames.setdefault(name, _Part(set(link.lanes)))
        part = link.frames.get(name)
        if part is None or lane not in part.waiting:
            return
        part.waiting.remove(lane)
        part.checksum = (part.checksum + event.checksum) % (1 << 32)
        if not part.waiting:
            del link.frames[name]
            num_bytes = event.num_bytes // num_parts(lane.shard) * num_parts(self._whole)
            self._told.append(replace(event, peer=link.peer, num_bytes=num_bytes, checksum=part.checksum))

    def _ask_all(self, kind: type[Landed | Withdrawn], transfer_id: bytes) -> None:
        self._ending.setdefault((kind, transfer_id), deque()).append(set(range(len(self._ranks))))

    def _on_answer(self, rank: int, event: Landed | Withdrawn) -> None:
        calls = self._ending[type(event), event.transfer_id]
        next(waiting for waiting in calls if rank in waiting).remove(rank)
        if calls[0]:
            return
        calls.popleft()
        if not calls:
            del self._ending[type(event), event.transfer_id]
        end = "source" if isinstance(event, Withdrawn) else "target"
        for link in [one for one in self._links.values() if one.end == end]:
            for name in [name for name in link.frames if name[0] == event.transfer_id]:
                del link.frames[name]
        if isinstance(event, Landed):
            self._landing.discard(event.transfer_id)
        self._told.append(event)

    def _say(self, peer: str, kind: int, data: bytes, lane: tuple[int, int] = (0, 0)) -> None:
        self._told.append(Tell(peer, _HEAD.pack(kind, *lane) + data))


def _rank_of(peer: str, rank: int) -> str:
    """What a rank of an engine is called."""
    return f"{peer}/{rank}"


def _engine_of(peer: str) -> tuple[str, int]:
    engine, _, rank = peer.rpartition("/")
    return engine, int(rank)


def _end_of(event: PlaneEvent) -> tuple[str, End] | None:
    """The end of a link that an event is about; None: of none."""
    match event:
        case LinkUp() | LinkDown():
            return _engine_of(event.peer)[0], event.end
        case FrameSent():
            return _engine_of(event.peer)[0], "source"
        case FrameArrived() | FrameRefused():
            return _engine_of(event.peer)[0], "target"
    return None

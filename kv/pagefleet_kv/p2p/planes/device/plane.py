"""A data plane between devices: one thread that stages, carries and places frames for all links, without waiting.

The thread is the only one that calls the carrier's library for this device. What the two ends have to tell each other
goes over the control plane, which is encrypted and knows its peers; there is no socket of its own.
"""

from __future__ import annotations

import functools
import secrets
import select
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from pagefleet_kv.bell import wait_for_any
from pagefleet_kv.p2p.data_plane import End, LinkDown
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.device.lanes import WHOLE, LaneTerms
from pagefleet_kv.p2p.planes.device.link import Carriers, Ear, Line, Slots, Voice
from pagefleet_kv.p2p.planes.device.source import DeviceSource
from pagefleet_kv.p2p.planes.device.target import DeviceTarget
from pagefleet_kv.p2p.planes.device.turns import Turns
from pagefleet_kv.p2p.planes.device.words import TOKEN_BYTES, BadWord, Join, Leave, decode_word
from pagefleet_kv.p2p.planes.shell import LinkBroken, LinkSettings, PlaneShell

HANDSHAKE_S = 30.0
STALL_S = 10.0
_LOOK_S = 0.25
"""Between two looks at deadlines."""
_BUSY_LOOK_S = 0.0002
"""Between two looks at what runs on the device, which rings no bell."""
_MAGIC = b"PFKG"
_VERSION = 1
_INVITATION = struct.Struct(f"<4sH{TOKEN_BYTES}s")

Link = DeviceSource | DeviceTarget


class DevicePlane(PlaneShell[DeviceSource, DeviceTarget]):
    """Implements `RankPlane` on a carrier, for the device of one rank.

    Args:
        carriers: between devices; closed with the plane.
        compatibility: `KvShape.compatibility` of the pages.
        num_slots: of staging memory, for sending and for receiving; 0: it does not.
        handshake_s: for a link, from the first word on.
        stall_s: a peer with frames under way and nothing that goes on for so long is given up.

    Attributes:
        name: of the carrier.
    """

    def __init__(
        self,
        carriers: Carriers,
        copies: DeviceCopies,
        compatibility: bytes,
        num_slots: tuple[int, int],
        handshake_s: float = HANDSHAKE_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._carriers = carriers
        num_sending, num_receiving = num_slots
        self._send_slots = Slots(carriers.send_slots(num_sending) if num_sending else copies.slots(0))
        self._receive_slots = Slots(copies.slots(num_receiving))
        super().__init__(carriers.name)
        self._redial = Redial()
        self._settings = LinkSettings(copies, compatibility, handshake_s, stall_s, self._tell)
        self._turns = Turns(self._tell)
        self._terms: dict[tuple[str, End], LaneTerms] = {}
        """Of links that have some. Set before the link is begun, by its owner's thread."""
        self._wake = select.poll()
        self._wake.register(self._thread.wake, select.POLLIN)
        self._thread.do(copies.enter)
        self._thread.start()

    def invite(self, peer: str, terms: LaneTerms = WHOLE) -> bytes:
        """See RankPlane."""
        self._terms[peer, "source"] = terms
        token = secrets.token_bytes(TOKEN_BYTES)
        self._invitations.give(token, peer)
        return _INVITATION.pack(_MAGIC, _VERSION, token) + self._carriers.facts()

    def connect(self, peer: str, host: str, invitation: bytes, terms: LaneTerms = WHOLE) -> None:
        """See RankPlane."""
        self._terms[peer, "target"] = terms
        super().connect(peer, host, invitation)

    def disconnect(self, peer: str, end: End) -> None:
        """See RankPlane."""
        super().disconnect(peer, end)
        self._terms.pop((peer, end), None)

    def launch(self, turn: int, on_launched: Callable[[], None]) -> None:
        """Give a transfer its turn, of any thread; `on_launched` is called by the plane's when the transfer's kernel is
        on the device or will never be, unless the plane is closed before."""
        self._thread.do(lambda: self._turns.give(turn, on_launched))

    def hear(self, peer: str, data: bytes) -> None:
        self._thread.do(lambda: self._hear(peer, data))

    def counters(self) -> dict[str, float]:
        return {
            **super().counters(),
            "broken_links_total": float(self._num_broken),
            **self._carriers.counters(),
        }

    def _turn(self) -> None:
        busy = any(link.under_way for link in self._links())
        wait_for_any(self._wake, _BUSY_LOOK_S if busy else _LOOK_S)
        self._thread.obey()  # before anything is placed: what was given up since gets none of it
        now = time.monotonic()
        for link in self._links():
            self._guarded(link, functools.partial(link.poll, now))
        self._thread.ring()

    def _connect(self, peer: str, host: str, invitation: bytes) -> None:
        now = time.monotonic()
        self._disconnect(peer, "target", "it connects again")
        try:
            self._redial.check(peer, now)
            token, facts = _decode_invitation(invitation)
            voice = Voice(peer, token, True, self._tell)
            settings, turns = self._on_terms(peer, "target")
            carrier = self._carriers.to_source(peer, facts, voice.say, turns)
        except LinkBroken as error:
            self._redial.failed(peer, now)
            self._tell(LinkDown(peer, "target", str(error)))
            return
        line = Line(peer, Ear(token), voice)
        self._targets[peer] = DeviceTarget(line, carrier, self._landings, self._receive_slots, settings, now)

    def _hear(self, peer: str, data: bytes) -> None:
        now = time.monotonic()
        try:
            envelope, word = decode_word(data)
        except BadWord as error:
            for broken in [link for link in self._links() if link.peer == peer]:
                self._end(broken, f"it said something else: {error}")
            return
        if envelope.to_source:
            source = self._sources.get(peer)
            if isinstance(word, Join) and (source is None or source.ear.token != envelope.token):
                self._let_in(peer, envelope.token, now)
            elif source is not None:
                self._guarded(source, lambda: source.hear(word, now) if source.ear.is_next(envelope) else None)
            return
        target = self._targets.get(peer)
        if target is not None:
            self._guarded(target, lambda: target.hear(word) if target.ear.is_next(envelope) else None)

    def _let_in(self, peer: str, token: bytes, now: float) -> None:
        invited = self._invitations.find(token)
        voice = Voice(peer, token, False, self._tell)
        if invited is None or invited.peer != peer:
            self._num_refused += 1
            voice.say(Leave("it was not invited"))
            return
        self._invitations.spend(token)
        if peer in self._sources:
            self._end(self._sources[peer], "it connected again")
        settings, turns = self._on_terms(peer, "source")
        carrier = self._carriers.to_target(peer, voice.say, turns)
        line = Line(peer, Ear(token, 1), voice)
        self._sources[peer] = DeviceSource(line, carrier, self._send_slots, settings, now)

    def _on_terms(self, peer: str, end: End) -> tuple[LinkSettings[DeviceCopies], Turns | None]:
        """What a link that begins has to do with the others."""
        terms, settings = self._terms.pop((peer, end), WHOLE), self._settings
        if terms.region is not None:
            settings = replace(settings, memory=settings.memory.part(terms.region))
        return settings, self._turns if terms.in_turn else None

    def _end(self, link: Link, reason: str) -> None:
        if isinstance(link, DeviceTarget):
            if link.worked:
                self._redial.worked(link.peer)
            self._redial.failed(link.peer, time.monotonic())
        super()._end(link, reason)

    def _remove(self, link: Link, reason: str) -> None:
        link.end(reason)

    def _close_all(self) -> None:
        for link in self._links():
            link.end("the engine stops")
        self._carriers.close()


def _decode_invitation(data: bytes) -> tuple[bytes, bytes]:
    """Return the token and the carrier's facts."""
    if len(data) < _INVITATION.size:
        raise LinkBroken("the invitation is none of this plane")
    magic, version, token = _INVITATION.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise LinkBroken("the invitation is none of this plane")
    return token, data[_INVITATION.size :]


FIRST_S = 0.5
MOST_S = 15.0
MAX_PEERS = 256


class Redial:
    """When a peer whose links broke may be dialled again: later each time, until one of its links carries a frame."""

    def __init__(self) -> None:
        self._pauses: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Peer -> its pause, and when that is over."""

    def check(self, peer: str, now: float) -> None:
        """Raise while a peer is left alone.

        Raises:
            LinkBroken: it is not time yet.
        """
        _, until = self._pauses.get(peer, (0.0, 0.0))
        if now < until:
            raise LinkBroken(f"its links broke: it is left alone for {until - now:.1f} s more")

    def failed(self, peer: str, now: float) -> None:
        """A link broke, or did not come about. While the peer is left alone already, that counts for nothing."""
        pause, until = self._pauses.pop(peer, (0.0, 0.0))
        if now >= until:
            pause = min(MOST_S, pause * 2) if pause else FIRST_S
            until = now + pause
        self._pauses[peer] = (pause, until)
        if len(self._pauses) > MAX_PEERS:
            self._pauses.popitem(last=False)

    def worked(self, peer: str) -> None:
        """A link of the peer's carried frames before it broke: begin anew."""
        self._pauses.pop(peer, None)

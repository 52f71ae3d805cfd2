"""A decode engine's link to one prefill engine: greeted, pinged each second, suspected, dead, dialled again.

DIALING --Welcome--> READY <--heard--/--3 s--> SUSPECT          any --5 s--> DEAD --a load, after a pause--> DIALING
   \\--other version or shape--> REFUSED (as DEAD, with a reason that lasts)
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import msgspec
from pagefleet_protocol.kv_control import Cancel, ControlMessage, Hello, Ping, PlaneName, Welcome
from pagefleet_protocol.kv_handoff import KvFault

from pagefleet_kv.p2p.transfer.actions import Connect, Dial, HangUp, OnPlane, Send, TargetAction
from pagefleet_kv.p2p.transfer.settings import PeerTiming

MAX_NOTICES = 256
LEFT_OUT_S = 60.0
"""For so long a data plane that could not be connected is not asked for, where there is another."""


class LinkState(enum.StrEnum):
    """What is known of the peer."""

    DIALING = "dialing"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DEAD = "dead"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class Link:
    """One prefill engine, by its address. Its methods return actions."""

    address: str
    hello: Hello
    timing: PeerTiming
    incarnation: str | None = None
    """Of the last Welcome."""
    lease: float = 30.0
    """Seconds, as the peer said."""
    num_welcomes: int = 0
    greeting: bool = False
    """A Hello waits for its Welcome."""
    data_up: bool = False
    connecting: bool = False
    reason: str = ""
    """Why it is down."""
    draining: bool = False
    _plane: PlaneName | None = None
    _refused: bool = False
    _heard: float = 0.0
    _used: float = 0.0
    _next_word: float = 0.0
    """When to ping, or to say Hello again."""
    _seq: int = 0
    _hello_seq: int = 0
    """Of the first Hello since the last Welcome."""
    _pause: float = 0.0
    _retry_at: float = 0.0
    _suspect: bool = False
    _planes: tuple[PlaneName, ...] = ()
    """All, while the Hello leaves one out."""
    _all_planes_at: float = 0.0
    """When it leaves out none again."""
    _notices: deque[tuple[bytes, str, Cancel]] = field(default_factory=lambda: deque(maxlen=MAX_NOTICES))

    @property
    def down(self) -> bool:
        """True when nothing can be had over it until it is dialled again."""
        return bool(self.reason)

    @property
    def fault(self) -> KvFault:
        """Why it is down, for programs."""
        return "incompatible" if self._refused else "unreachable"

    @property
    def welcomed(self) -> bool:
        """True when the peer has said who it is."""
        return self.incarnation is not None and not self.down

    @property
    def plane(self) -> PlaneName:
        """The data plane that was agreed on."""
        assert self._plane is not None
        return self._plane

    @property
    def state(self) -> LinkState:
        """For metrics and logs."""
        if self.down:
            return LinkState.REFUSED if self._refused else LinkState.DEAD
        if not self.welcomed:
            return LinkState.DIALING
        if self._suspect:
            return LinkState.SUSPECT
        return LinkState.DRAINING if self.draining else LinkState.READY

    def dial(self, now: float) -> list[TargetAction]:
        """Begin, for the first time or again."""
        self.reason, self._refused, self._suspect, self.draining = "", False, False, False
        self.incarnation, self._heard, self._used = None, now, now
        return [Dial(self.address), *self.greet(now)]

    def may_dial(self, now: float) -> bool:
        """True when a link that is down has been left alone for long enough."""
        return now >= self._retry_at

    def use(self, now: float) -> None:
        """It is needed: it does not idle."""
        self._used = now

    def idle(self, now: float) -> bool:
        """True when nobody has needed it for long."""
        return now - self._used >= self.timing.idle

    def say(self, message: ControlMessage) -> Send:
        """Return the action that sends a message to the peer."""
        return Send(self.address, message)

    def greet(self, now: float) -> list[TargetAction]:
        """Say Hello, once, until it is answered or it is time to say it again."""
        if self._planes and now >= self._all_planes_at:
            self.hello, self._planes = msgspec.structs.replace(self.hello, planes=self._planes), ()
        self._seq += 1
        if not self.greeting:
            self.greeting, self._hello_seq = True, self._seq
        self._next_word = now + self.timing.ping
        return [self.say(ControlMessage(self.hello, seq=self._seq))]

    def heard(self, now: float) -> None:
        """Something came from the peer."""
        self._heard = now
        self._suspect = False

    def welcome(self, message: ControlMessage, body: Welcome) -> list[TargetAction]:
        """The peer says who it is; a Welcome to an older Hello says nothing."""
        if not self.greeting or message.seq < self._hello_seq:
            return []
        self.greeting = False
        self.num_welcomes += 1
        self._pause = 0.0
        actions: list[TargetAction] = []
        if self.incarnation != body.incarnation or self._plane != body.plane:
            actions += self._disconnect()
        self.incarnation, self._plane, self.lease = body.incarnation, body.plane, body.lease_ms / 1000
        if not self.data_up and not self.connecting:
            self.connecting = True
            actions.append(Connect(body.plane, body.incarnation, self.address, body.invitation))
        return actions + self._tell_notices()

    def data_changed(self, up: bool) -> None:
        """The data connection stands, or does not."""
        self.data_up, self.connecting = up, False

    def leave_out(self, plane: PlaneName, now: float) -> None:
        """Ask for other data planes for a while, where there are any."""
        others = tuple(name for name in self.hello.planes if name != plane)
        if others:
            self._planes = self._planes or self.hello.planes
            self._all_planes_at = now + LEFT_OUT_S
            self.hello = msgspec.structs.replace(self.hello, planes=others)

    def cancel(self, transfer_id: bytes, incarnation: str, epoch: int, body: Cancel) -> list[TargetAction]:
        """Tell the peer that a transfer is over, now or when it has said who it is."""
        if self.down:
            return []
        if self.incarnation == incarnation:
            return [self.say(ControlMessage(body, transfer_id, epoch))]
        self._notices.append((transfer_id, incarnation, body))
        return []

    def tick(self, now: float) -> list[TargetAction]:
        """Ping, greet again, or find the peer dead."""
        if self.down:
            return []
        silent = now - self._heard
        if silent >= self.timing.dead:
            return self.give_up(f"{self.address} has been silent for {self.timing.dead:g} s", now)
        self._suspect = silent >= self.timing.suspect
        if now < self._next_word:
            return []
        if self.greeting or not self.welcomed:
            return self.greet(now)
        self._seq += 1
        self._next_word = now + self.timing.ping
        return [self.say(ControlMessage(Ping(), seq=self._seq))]

    def give_up(self, reason: str, now: float, *, refused: bool = False) -> list[TargetAction]:
        """Take the peer for dead."""
        timing = self.timing
        self._pause = min(timing.redial_most, self._pause * 2) if self._pause else timing.redial_first
        self._retry_at = now + self._pause
        self.reason, self._refused, self.greeting = reason, refused, False
        self._notices.clear()
        return [*self._disconnect(), HangUp(self.address)]

    def _disconnect(self) -> list[TargetAction]:
        was = self.data_up or self.connecting
        self.data_changed(False)
        if not was or self.incarnation is None:
            return []
        return [OnPlane(self.plane, "disconnect", (self.incarnation, "target"))]

    def _tell_notices(self) -> list[TargetAction]:
        told = [(transfer_id, body) for transfer_id, to, body in self._notices if to == self.incarnation]
        self._notices.clear()
        return [self.say(ControlMessage(body, transfer_id)) for transfer_id, body in told]

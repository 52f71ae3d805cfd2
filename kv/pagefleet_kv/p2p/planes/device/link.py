"""What both ends of a device plane's links share: how they end, what carries staged frames, and the words they say.

A frame goes pool -> slot (source) -> slot (target) -> pool. Only copies within one device touch the pools, for
microseconds, so a peer that hangs or lies holds slots, never blocks; a slot that was overwritten too early, or received
badly, has another check sum than was announced. How bytes get from slot to slot is the carrier's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pagefleet_kv.p2p.data_plane import PlaneEvent, Tell
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.device.turns import Turns
from pagefleet_kv.p2p.planes.device.words import Envelope, Word, encode_word
from pagefleet_kv.p2p.planes.shell import LinkBroken, LinkSettings

Say = Callable[[Word], None]
DeviceSettings = LinkSettings[DeviceCopies]


class SourceCarrier(Protocol):
    """The source's half of one link."""

    def ready(self, now: float) -> bool:
        """Return whether frames may be announced; begins what that needs."""

    def announced(self, number: int, slot: Tensor) -> None:
        """A frame was announced; `slot` has exactly its bytes, and keeps them until `poll` names it."""

    def hear(self, word: Word) -> None:
        """The target said something that is not the link's.

        Raises:
            LinkBroken: it makes no sense.
        """

    def poll(self, now: float) -> Sequence[int]:
        """Go on; return the frames whose slots are read no more.

        Raises:
            LinkBroken: what carries them has failed.
        """

    @property
    def under_way(self) -> bool:
        """Whether `poll` has something to look after."""

    def close(self) -> None:
        """Read and hold nothing any more."""


class TargetCarrier(Protocol):
    """The target's half of one link.

    Attributes:
        by_copies: whether frames come by `DeviceCopies.stream`, so that what is queued there after `fetch` finds them.
    """

    by_copies: bool

    def fetch(self, number: int, remote_slot: int, into: Tensor) -> None:
        """Begin to bring an announced frame, whose length `into` has; frames come in order.

        Raises:
            LinkBroken: there is no such slot.
        """

    def hear(self, word: Word) -> None:
        """As of the source's."""

    def poll(self, now: float) -> Sequence[int]:
        """Go on; return the frames that have come. Raises as the source's."""

    @property
    def under_way(self) -> bool:
        """Whether `poll` has something to look after."""

    def close(self) -> None:
        """Write and hold nothing any more."""


class Carriers(Protocol):
    """One way to carry, for all links of a plane. Used by the plane's thread alone, but for `facts` and `counters`.

    Attributes:
        name: of the plane.
    """

    name: str

    def facts(self) -> bytes:
        """Return what an invitation must say about this engine; at most 1 KiB."""

    def send_slots(self, count: int) -> Tensor:
        """Return the slots that links to targets share: uint8 [count, slot_bytes]."""

    def to_target(self, peer: str, say: Say, turns: Turns | None) -> SourceCarrier:
        """Return the source's half for a target that joined.

        Args:
            turns: in which it launches kernels that wait for the target's; None: at once.
        """

    def to_source(self, peer: str, facts: bytes, say: Say, turns: Turns | None) -> TargetCarrier:
        """Return the target's half, for a source whose invitation said `facts`; `turns` as of the source's.

        Raises:
            LinkBroken: there is no way from there to here.
        """

    def counters(self) -> dict[str, float]:
        """As `DataPlane.counters`."""

    def close(self) -> None:
        """Free all, after the links."""


class Voice:
    """Says words of one link, in order, through the control plane.

    Args:
        to_source: whether the peer is the source of the link.
        tell: is told what the control plane is to take.
    """

    def __init__(self, peer: str, token: bytes, to_source: bool, tell: Callable[[PlaneEvent], None]) -> None:
        self._peer = peer
        self._token = token
        self._to_source = to_source
        self._tell = tell
        self._number = 0

    def say(self, word: Word) -> None:
        self._tell(Tell(self._peer, encode_word(Envelope(self._token, self._to_source, self._number), word)))
        self._number += 1


class Ear:
    """Puts an order to what is heard of one link: each word once, and none left out.

    Args:
        num_heard: words that were heard before.
    """

    def __init__(self, token: bytes, num_heard: int = 0) -> None:
        self.token = token
        self._next = num_heard

    def is_next(self, envelope: Envelope) -> bool:
        """Return whether a word is the next one; False: it came before, or is of another link.

        Raises:
            LinkBroken: one before it is missing.
        """
        if envelope.token != self.token or envelope.number < self._next:
            return False
        if envelope.number > self._next:
            raise LinkBroken("a word of the peer's was lost")
        self._next += 1
        return True


@dataclass(frozen=True, slots=True)
class Line:
    """Words to and from the other end of one link."""

    peer: str
    """Its incarnation."""
    ear: Ear
    voice: Voice


class Slots:
    """Staging memory of one direction, shared by its links.

    Args:
        memory: uint8 [number of slots, bytes of a slot].
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._free = list(range(len(memory)))
        self.share = max(1, len(memory) // 2)
        """Most of one link, so that one that hangs leaves some to others."""

    def take(self) -> int | None:
        """Return a free slot; None: there is none for now."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        self._free.append(slot)

"""The target's end of a device plane's link: announced frames are fetched into slots, checked, and only then placed.

A frame reaches blocks when all of it has come, its sum is what was announced, and its landing waits for exactly it. A
landing that was forgotten is found by none, so what comes late ends in its slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pagefleet_protocol.kv_blob import BlobError, BlobHeader, decode_header

from pagefleet_kv.p2p.data_plane import FrameArrived, FrameRefused, LinkUp
from pagefleet_kv.p2p.planes.device.copies import Mark, Total, folded
from pagefleet_kv.p2p.planes.device.link import DeviceSettings, Line, Slots, TargetCarrier
from pagefleet_kv.p2p.planes.device.words import Announce, Join, Joined, Leave, Taken, Word
from pagefleet_kv.p2p.planes.landing import Landings, arrived, refused
from pagefleet_kv.p2p.planes.shell import LinkBroken

MAX_ANNOUNCED = 4096
"""Frames that wait to be fetched. A source's slots are fewer."""


@dataclass(slots=True)
class _Fetched:
    """An announced frame."""

    number: int
    remote_slot: int
    total: int
    header: BlobHeader
    slot: int | None = None
    has_come: bool = False
    """That is said: the source may use its slot again."""
    found: Total | None = None
    """Its sum; may still be computed."""


@dataclass(slots=True)
class _Judged:
    """A frame that is being copied to its blocks, or gets none."""

    slot: int
    mark: Mark
    event: FrameArrived | FrameRefused


class DeviceTarget:
    """Receives the frames of one source."""

    def __init__(
        self,
        line: Line,
        carrier: TargetCarrier,
        landings: Landings,
        slots: Slots,
        settings: DeviceSettings,
        now: float,
    ) -> None:
        self.peer = line.peer
        self.ear = line.ear
        self._voice = line.voice
        self._carrier = carrier
        self._landings = landings
        self._slots = slots
        self._settings = settings
        self._up = False
        self._deadline = now + settings.handshake_s
        self._num_announced = 0
        self._waiting: deque[_Fetched] = deque()
        self._fetching: deque[_Fetched] = deque()
        self._judged: deque[_Judged] = deque()
        self.worked = False
        """Whether a frame was placed."""
        line.voice.say(Join())

    @property
    def under_way(self) -> bool:
        """Whether a device or a carrier is at work that rings no bell."""
        return bool(self._waiting or self._fetching or self._judged) or self._carrier.under_way

    def forget(self, transfer_id: bytes) -> None:
        """The transfer's landing is gone: wait for a copy to its blocks that runs just now."""
        for judged in self._judged:
            if judged.event.transfer_id == transfer_id:
                judged.mark.wait()

    def hear(self, word: Word) -> None:
        """The source said something.

        Raises:
            LinkBroken: it left, or makes no sense.
        """
        match word:
            case Leave():
                raise LinkBroken(word.reason)
            case Joined():
                if not self._up:
                    self._up = True
                    self._deadline = float("inf")
                    self._settings.tell(LinkUp(self.peer, "target"))
            case Announce():
                self._announced(word)
            case _:
                self._carrier.hear(word)

    def poll(self, now: float) -> None:
        """Go on with what goes without waiting.

        Raises:
            LinkBroken: the carrier has failed, or the source brings nothing.
        """
        arrived = set(self._carrier.poll(now))
        for fetched in self._fetching:
            if fetched.number in arrived:
                fetched.has_come = True
                self._voice.say(Taken(fetched.number))
                if not self._carrier.by_copies:
                    fetched.found = self._sum(fetched)
                self._deadline = now + self._settings.stall_s
        self._judge()
        self._tell()
        self._fetch()
        if self._up and not self._fetching:
            self._deadline = float("inf")
        elif self._deadline == float("inf"):
            self._deadline = now + self._settings.stall_s
        if now >= self._deadline:
            raise LinkBroken("it was silent for too long")

    def end(self, reason: str) -> None:
        """Let go of everything, and tell the source."""
        self._voice.say(Leave(reason))
        self._carrier.close()
        for judged in self._judged:
            judged.mark.wait()
            self._slots.give(judged.slot)
        for fetched in self._fetching:
            if fetched.found is not None:
                fetched.found.mark.wait()
            assert fetched.slot is not None
            self._slots.give(fetched.slot)
        self._judged.clear()
        self._fetching.clear()
        self._waiting.clear()

    def _announced(self, word: Announce) -> None:
        if word.number != self._num_announced or len(self._waiting) >= MAX_ANNOUNCED:
            raise LinkBroken(f"it announced frame {word.number} where {self._num_announced} is next")
        copies = self._settings.memory
        try:
            header = decode_header(word.header, self._settings.compatibility, copies.block_bytes)
        except BlobError as error:
            raise LinkBroken(f"a frame cannot be read: {error}") from None
        if header.num_bytes > copies.slot_bytes:
            raise LinkBroken(f"a frame says that it has {header.num_bytes} bytes")
        self._num_announced += 1
        self._waiting.append(_Fetched(word.number, word.slot, word.total, header))

    def _fetch(self) -> None:
        while self._waiting and len(self._fetching) + len(self._judged) < self._slots.share:
            slot = self._slots.take()
            if slot is None:
                return
            fetched = self._waiting.popleft()
            fetched.slot = slot
            self._fetching.append(fetched)
            self._carrier.fetch(
                fetched.number, fetched.remote_slot, self._slots.memory[slot][: fetched.header.num_bytes]
            )
            if self._carrier.by_copies:  # the device need not wait until this thread has seen that it came
                fetched.found = self._sum(fetched)

    def _sum(self, fetched: _Fetched) -> Total:
        assert fetched.slot is not None
        return self._settings.memory.total(self._slots.memory[fetched.slot], fetched.header.num_bytes)

    def _judge(self) -> None:
        """Begin to copy frames that have come to their blocks, in order; refuse what has no place."""
        copies = self._settings.memory
        while self._fetching:
            fetched = self._fetching[0]
            if not fetched.has_come or fetched.found is None or not fetched.found.mark.done():
                return
            self._fetching.popleft()
            assert fetched.slot is not None
            header = fetched.header
            right = fetched.found.value() == fetched.total and folded(fetched.total) == header.checksum
            blocks = self._landings.place(self.peer, header) if right else "its checksum is wrong"
            event: FrameArrived | FrameRefused
            if isinstance(blocks, str):
                event = refused(self.peer, header, blocks)
            else:
                copies.scatter(self._slots.memory[fetched.slot], blocks)
                self._landings.landed(self.peer, header)
                event = arrived(self.peer, header)
            self._judged.append(_Judged(fetched.slot, copies.marked(), event))

    def _tell(self) -> None:
        while self._judged and self._judged[0].mark.done():
            judged = self._judged.popleft()
            self._slots.give(judged.slot)
            self.worked = self.worked or isinstance(judged.event, FrameArrived)
            self._settings.tell(judged.event)

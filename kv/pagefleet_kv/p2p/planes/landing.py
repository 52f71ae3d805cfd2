"""What frames are called, and where they may land: decided before the first byte of a payload is read, without I/O.

A frame is placed only if a landing of its transfer, its peer and its epoch waits for exactly this number and block. So
a frame that is late, doubled, reordered or lies about its length reaches no block.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.kv_blob import BlobHeader

from pagefleet_kv.p2p.data_plane import Frame, FrameArrived, FrameRefused, FrameSent, Landing

MAX_FRAME_BYTES = 1 << 26
"""A header that says more is a lie, and nothing after it can be believed."""
_NAME = struct.Struct("<16sQQ")


@dataclass(frozen=True, slots=True)
class FrameName:
    """What the 32 bytes of a blob's name are in a frame."""

    transfer_id: bytes
    epoch: int
    seq: int

    def encode(self) -> bytes:
        """Return 32 bytes."""
        return _NAME.pack(self.transfer_id, self.epoch, self.seq)

    @classmethod
    def decode(cls, name: bytes) -> FrameName:
        """Parse 32 bytes; any are some name."""
        return cls(*_NAME.unpack(name))


def header_of(frame: Frame, compatibility: bytes, num_blocks: int, num_bytes: int, checksum: int) -> BlobHeader:
    """Return what stands before a frame's payload."""
    name = FrameName(frame.transfer_id, frame.epoch, frame.seq).encode()
    return BlobHeader(compatibility, name, frame.first_block, num_blocks, num_bytes, checksum)


def sent(peer: str, frame: Frame, num_bytes: int, checksum: int) -> FrameSent:
    """Return what is told of a frame whose blocks are needed no more."""
    return FrameSent(peer, frame.transfer_id, frame.epoch, frame.seq, num_bytes, checksum)


def arrived(peer: str, header: BlobHeader) -> FrameArrived:
    """Return what is told of a frame that is whole, right and in its blocks."""
    name, size = FrameName.decode(header.name), (header.num_blocks, header.num_bytes)
    return FrameArrived(peer, name.transfer_id, name.epoch, name.seq, header.first_block, *size, header.checksum)


def refused(peer: str, header: BlobHeader, reason: str) -> FrameRefused:
    """Return what is told of a frame that was not used."""
    name = FrameName.decode(header.name)
    return FrameRefused(peer, name.transfer_id, name.epoch, name.seq, reason)


@dataclass(slots=True)
class _Open:
    landing: Landing
    num_blocks: int = 0
    """That have landed."""
    num_frames: int = 0


class Landings:
    """All landings of one plane, one for each transfer and peer: of an engine's ranks several may bring parts of one.
    The owner's thread adds them, the plane's does all else.

    A transfer is added anew only after the plane has told that it was removed, so the two never meet over one.
    """

    def __init__(self) -> None:
        self._open: dict[bytes, dict[str, _Open]] = {}
        """By transfer and peer."""

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def add(self, peer: str, landing: Landing) -> None:
        self._open.setdefault(landing.transfer_id, {})[peer] = _Open(landing)

    def remove(self, transfer_id: bytes) -> None:
        self._open.pop(transfer_id, None)

    def place(self, peer: str, header: BlobHeader) -> Sequence[int] | str:
        """Return the blocks that a frame is for, or why it is for none."""
        name = FrameName.decode(header.name)
        found = self._open.get(name.transfer_id, {}).get(peer)
        if found is None:
            return "no transfer of this peer waits for it"
        landing = found.landing
        if name.epoch != landing.epoch:
            return f"its epoch is {name.epoch}, the transfer's is {landing.epoch}"
        if name.seq != found.num_frames or header.first_block != landing.first_block + found.num_blocks:
            return f"frame {name.seq} at block {header.first_block} is out of order"
        blocks = landing.blocks[found.num_blocks : found.num_blocks + header.num_blocks]
        if len(blocks) != header.num_blocks or header.group != 0:
            return f"{header.num_blocks} blocks from {header.first_block} are more than were reserved"
        return blocks

    def landed(self, peer: str, header: BlobHeader) -> None:
        """A placed frame of this peer is whole and right."""
        found = self._open[FrameName.decode(header.name).transfer_id][peer]
        found.num_blocks += header.num_blocks
        found.num_frames += 1

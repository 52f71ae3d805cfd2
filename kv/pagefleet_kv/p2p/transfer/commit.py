"""What both ends write down about a transfer's frames, and compare when it is committed."""

from __future__ import annotations

import struct
import zlib

from pagefleet_protocol.kv_control import Commit

_ENTRY = struct.Struct("<QQI")


class FrameLedger:
    """Frames in order: how many, over which blocks, and one check sum over their places and check sums."""

    def __init__(self, first_block: int) -> None:
        self._next_block = first_block
        self.num_frames = 0
        self.num_blocks = 0
        self.num_bytes = 0
        self.checksum = 0

    def follows(self, seq: int, first_block: int) -> bool:
        """True if this is the next frame."""
        return seq == self.num_frames and first_block == self._next_block

    def record(self, num_blocks: int, num_bytes: int, checksum: int) -> None:
        """Write the next frame down. `checksum`: CRC-32 of its payload."""
        self.checksum = zlib.crc32(_ENTRY.pack(self._next_block, num_blocks, checksum), self.checksum)
        self.num_frames += 1
        self.num_blocks += num_blocks
        self.num_bytes += num_bytes
        self._next_block += num_blocks

    def commit(self, micros_since_computed: int) -> Commit:
        """Return the message that says what was written down."""
        return Commit(self.num_blocks, self.num_bytes, self.num_frames, self.checksum, micros_since_computed)

    def differs(self, commit: Commit) -> str:
        """Return why this is not what was committed; empty if it is."""
        here = (self.num_blocks, self.num_bytes, self.num_frames, self.checksum)
        there = (commit.num_blocks, commit.num_bytes, commit.num_frames, commit.checksum)
        if here == there:
            return ""
        return f"{here[0]} blocks in {here[2]} frames came, other ones ({there[0]} in {there[2]}) were committed"

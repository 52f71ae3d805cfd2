"""What the prefix cache gains and loses, told to whoever listens: routers choose engines by it.

A block has a hash in each KV group. Only the routing group is told: the first that sees the whole context, since a hit
is never longer than what it has; where every group has a window, the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagefleet_protocol.block_hash import HASH_BYTES, BlockHash


class CacheEvents(Protocol):
    """Told at once, by the thread that schedules: it must return soon, and never fail.

    A content is stored only while it is not, and removed only while it is.
    """

    def stored(self, contents: Sequence[BlockHash]) -> None:
        """These became findable, in the order of a prompt."""
        ...

    def removed(self, contents: Sequence[BlockHash]) -> None:
        """These are not found any more."""
        ...

    def cleared(self) -> None:
        """Nothing is found any more."""
        ...


class OneGroupEvents:
    """Implements `CacheEvents`: passes on the blocks of one of several groups, under their plain hashes.

    Args:
        listener: is told them.
        suffix: of the group (`GroupIndex`).
    """

    def __init__(self, listener: CacheEvents, suffix: bytes) -> None:
        self._listener = listener
        self._suffix = suffix

    def stored(self, contents: Sequence[BlockHash]) -> None:
        """See CacheEvents."""
        if own := self._of_group(contents):
            self._listener.stored(own)

    def removed(self, contents: Sequence[BlockHash]) -> None:
        """See CacheEvents."""
        if own := self._of_group(contents):
            self._listener.removed(own)

    def cleared(self) -> None:
        """See CacheEvents."""
        self._listener.cleared()

    def _of_group(self, contents: Sequence[BlockHash]) -> list[BlockHash]:
        suffix = self._suffix
        return [BlockHash(content[:HASH_BYTES]) for content in contents if content[HASH_BYTES:] == suffix]

"""What the prefix cache gains and loses, told to whoever listens: routers choose engines by it.

A block has a hash in each KV group; outside the first group, that one's number is behind it (`GroupIndex.suffix`). The
first group sees most: a hit is never longer than what it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagefleet_protocol.block_hash import BlockHash


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

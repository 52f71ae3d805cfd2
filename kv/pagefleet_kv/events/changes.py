"""What the prefix cache gained and lost since the publisher last looked: the only thing its two threads share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class Changes:
    """To be told in this order; no block is in both lists."""

    cleared: bool
    removed: Sequence[BlockHash]
    stored: Sequence[BlockHash]


class CacheChanges:
    """Implements `CacheEvents` for one thread, and is emptied by another.

    It is no queue but a difference: between what is cached and what was told. A block that came and went in between,
    or went and came back, is not in it. So it never holds more than all blocks of the pool twice, however late the
    publisher is, and nothing has to be dropped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cleared = False
        self._is_stored: dict[BlockHash, bool] = {}

    @property
    def pending(self) -> bool:
        """Whether there is something to tell."""
        return self._cleared or bool(self._is_stored)

    def stored(self, contents: Sequence[BlockHash]) -> None:
        """See CacheEvents."""
        self._note(contents, True)

    def removed(self, contents: Sequence[BlockHash]) -> None:
        """See CacheEvents."""
        self._note(contents, False)

    def cleared(self) -> None:
        """See CacheEvents."""
        with self._lock:
            self._is_stored = {}
            self._cleared = True

    def take(self) -> Changes | None:
        """Return what there is to tell and forget it; None for nothing."""
        with self._lock:
            if not self.pending:
                return None
            cleared, self._cleared = self._cleared, False
            is_stored, self._is_stored = self._is_stored, {}
        stored = [content for content, present in is_stored.items() if present]
        removed = (
            [content for content, present in is_stored.items() if not present] if len(stored) < len(is_stored) else []
        )
        return Changes(cleared, removed, stored)

    def _note(self, contents: Sequence[BlockHash], present: bool) -> None:
        with self._lock:
            is_stored = self._is_stored
            for content in contents:
                if is_stored.pop(content, None) is None:  # else it is again as it was told
                    is_stored[content] = present

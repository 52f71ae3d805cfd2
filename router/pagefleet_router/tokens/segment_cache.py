"""Token ids of parts of prompts, so that a conversation that grows is not tokenized from its start each time."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

MIN_CHARS = 1024
_KEY_BYTES = 24
_OVERHEAD_BYTES = 200
"""Of an entry, beside its ids."""


class SegmentCache:
    """Packed token ids by what they were made of, forgotten least recently used first. For several threads.

    Args:
        max_bytes: of memory.
        min_chars: of the texts worth an entry.
    """

    def __init__(self, max_bytes: int, min_chars: int = MIN_CHARS) -> None:
        self.min_chars = min_chars
        self.num_hits = 0
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def key(owner: bytes, text: str) -> bytes:
        """Return the name of a text of an owner: other owners can neither use it nor learn that it is there."""
        return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES, key=hashlib.sha256(owner).digest()).digest()

    def get(self, key: bytes) -> bytes | None:
        """Return packed ids, None where there are none."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self.num_hits += 1
                self._entries.move_to_end(key)
            return found

    def put(self, key: bytes, packed: bytes) -> None:
        """Remember packed ids, unless they would take more than a quarter of all room."""
        size = len(packed) + _OVERHEAD_BYTES
        if size > self._max_bytes // 4:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = packed
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, old = self._entries.popitem(last=False)
                self.num_bytes -= len(old) + _OVERHEAD_BYTES

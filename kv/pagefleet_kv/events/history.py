"""What was told so far: the numbered batches, the last of them kept for whoever missed some, and their sum."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice

from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_events import (
    KEY_BYTES,
    Cleared,
    Done,
    DumpPart,
    EventBatch,
    GroupEvents,
    KvEvent,
    Removed,
    Replay,
    Stored,
    encode,
)

from pagefleet_kv.store.block_key import group_of

KEYS_PER_MESSAGE = 16_384
"""128 KiB: far under MAX_BATCH_BYTES, and little enough that no message takes the interpreter for long."""
MAX_BATCHES = 4096
MAX_BYTES = 16 * 1024 * 1024


class History:
    """One incarnation's batches, numbered from 1 without a gap, and the keys that are cached as of the newest.

    Args:
        keys_per_message: larger batches and dumps are split.
        max_batches: kept for replays.
        max_bytes: of those.
    """

    def __init__(
        self,
        incarnation: str,
        keys_per_message: int = KEYS_PER_MESSAGE,
        max_batches: int = MAX_BATCHES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.seq = 0
        """Of the newest batch; 0 before the first."""
        self._incarnation = incarnation
        self._keys_per_message = keys_per_message
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._keys: defaultdict[int, set[bytes]] = defaultdict(set)
        """Of each KV group."""
        self._kept: deque[bytes] = deque()
        self._num_kept_bytes = 0

    def tell(self, cleared: bool, removed: Sequence[BlockHash], stored: Sequence[BlockHash]) -> list[bytes]:
        """Return the batches that say so, in this order; one without events where there is nothing to say.

        Contents outside group 0 have their group's number behind the hash.
        """
        events: list[tuple[int, KvEvent]] = []
        if cleared:
            self._keys.clear()
            events.append((0, Cleared()))
        for group, keys in self._split(removed):
            self._keys[group].difference_update(keys)
            events.append((group, Removed(b"".join(keys))))
        for group, keys in self._split(stored):
            self._keys[group].update(keys)
            events.append((group, Stored(b"".join(keys))))
        if len(removed) + len(stored) <= self._keys_per_message:
            return [self._batch(events)]
        return [self._batch([event]) for event in events]

    def replay(self, request: Replay) -> list[bytes]:
        """Return the batches asked for, as far as they exist, and the end of the answer."""
        first_kept = self.seq - len(self._kept) + 1
        if request.first < first_kept:
            return [encode(Done(self._incarnation, self.seq, complete=False))]
        kept = islice(self._kept, request.first - first_kept, max(0, request.last - first_kept + 1))
        return [*kept, encode(Done(self._incarnation, self.seq))]

    def dump(self, every_group: bool = False) -> list[bytes]:
        """Return all that is cached in group 0, or in every group, and the end of the answer."""
        messages = []
        for group in sorted(self._keys) if every_group else [0]:
            keys = iter(self._keys[group])
            while part := b"".join(islice(keys, self._keys_per_message)):
                messages.append(encode(DumpPart(self._incarnation, self.seq, part, group)))
        return [*messages, encode(Done(self._incarnation, self.seq))]

    def _split(self, contents: Sequence[BlockHash]) -> Iterator[tuple[int, list[bytes]]]:
        """Yield groups and the keys of blocks in them, as many at a time as fit a message."""
        keys_of: defaultdict[int, list[bytes]] = defaultdict(list)
        for content in contents:
            keys_of[group_of(content)].append(content[:KEY_BYTES])
        for group, keys in keys_of.items():
            for start in range(0, len(keys), self._keys_per_message):
                yield group, keys[start : start + self._keys_per_message]

    def _batch(self, events: list[tuple[int, KvEvent]]) -> bytes:
        """Number a batch and keep it, for which older ones may have to go."""
        others: defaultdict[int, list[Stored | Removed]] = defaultdict(list)
        for group, event in events:
            if group and not isinstance(event, Cleared):
                others[group].append(event)
        first = [event for group, event in events if not group]
        self.seq += 1
        data = encode(
            EventBatch(self._incarnation, self.seq, first, [GroupEvents(*one) for one in sorted(others.items())])
        )
        self._kept.append(data)
        self._num_kept_bytes += len(data)
        while len(self._kept) > self._max_batches or self._num_kept_bytes > self._max_bytes:
            self._num_kept_bytes -= len(self._kept.popleft())
        return data

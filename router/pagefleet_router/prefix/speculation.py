"""What engines were sent and have not yet reported: the gap between a request and the events about its blocks.

Requests of the same prompt that come together must meet at one engine although none of its blocks is computed yet. A
key counts until its event comes, or for LIFETIME_S to twice that: long enough for a prompt to wait its turn at a loaded
engine, short enough that what never came about (the client left, the engine failed) misleads few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LIFETIME_S = 4.0
MAX_KEYS = 65_536
"""Of one generation: dropping so many takes a few milliseconds."""

Lookup = Callable[[int, int], int]


class Speculation:
    """Key -> bit mask of engines, in two generations, of which the older is dropped as a whole."""

    def __init__(self) -> None:
        self.generation = 0
        """How often the older one was dropped."""
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._turned_at = 0.0

    def __len__(self) -> int:
        """Return how many keys are remembered."""
        return len(self._young) + len(self._old)

    def __bool__(self) -> bool:
        """Return whether any key is remembered."""
        return bool(self._young or self._old)

    def get(self, key: int) -> int:
        """Return the engines that were sent a key."""
        return self._young.get(key, 0) | self._old.get(key, 0)

    def lookups(self) -> tuple[Lookup, Lookup]:
        """Return two functions of a key and 0 whose results, taken together, are those of `get`: for long walks."""
        return self._young.get, self._old.get

    def add(self, bit: int, keys: Sequence[int]) -> None:
        """Note that an engine is sent these keys; of very many, the first."""
        if len(keys) > MAX_KEYS:
            keys = keys[:MAX_KEYS]
        if len(self._young) + len(keys) > MAX_KEYS:
            self._turn()
        young = self._young
        known = young.get
        for key in keys:
            young[key] = known(key, 0) | bit

    def confirm(self, bit: int, keys: Sequence[int]) -> None:
        """Forget what an engine has reported: from now on the index says what is there."""
        for generation in (self._young, self._old):
            if not generation:
                continue
            for key in keys:
                mask = generation.get(key, 0)
                if mask & bit:
                    if mask == bit:
                        del generation[key]
                    else:
                        generation[key] = mask ^ bit

    def tick(self, now: float) -> None:
        """Drop what is older than its lifetime."""
        if now - self._turned_at >= LIFETIME_S:
            self._turned_at = now
            self._turn()

    def _turn(self) -> None:
        self._old, self._young = self._young, {}
        self.generation += 1

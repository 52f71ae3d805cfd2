"""The exact prefix index: which engine has which block, as the engines' own events say.

One dictionary from a block's routing key to a bit mask of engines, so that a prompt is walked once for all engines.
Each engine has a slot, which is a bit; its own set of keys counts them, bounds them, and is what is taken back when its
cache is gone. That happens a little at a time: the engine gets a new slot at once, and the old one is swept by `tick`.
Tenants are apart because their salts are in the hashes. About 150 bytes per block and engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MAX_KEYS_PER_ENGINE = 2 * 1024 * 1024
"""Whatever an engine says that it has room for."""
SWEEP_KEYS = 8192
"""Taken back in one tick: a few milliseconds."""


class TooManyKeys(Exception):
    """An engine claims more blocks than it has, or takes them back faster than they can be forgotten."""


@dataclass(slots=True)
class _Slot:
    """One engine's part of the index."""

    engine_id: str
    bit: int
    capacity: int
    keys: set[int] = field(default_factory=set)
    left_in: int = 0
    """The generation of speculation in which it was given up."""


class ExactIndex:
    """Blocks of the engines that publish events."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._slots: dict[str, _Slot] = {}
        self._given_up: list[_Slot] = []
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._speculation = Speculation()

    def __len__(self) -> int:
        """Return how many blocks are known, over all engines."""
        return sum(len(slot.keys) for slot in self._slots.values())

    def num_keys(self, engine_id: str) -> int:
        """Return how many blocks an engine has."""
        slot = self._slots.get(engine_id)
        return 0 if slot is None else len(slot.keys)

    def join(self, engine_id: str, num_blocks: int) -> None:
        """Take an engine in, with nothing cached; `num_blocks` is all that it can have."""
        self.leave(engine_id)
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._num_bits
            self._num_bits += 1
        self._slots[engine_id] = _Slot(engine_id, bit, min(num_blocks, MAX_KEYS_PER_ENGINE))

    def leave(self, engine_id: str) -> None:
        """Forget an engine."""
        slot = self._slots.pop(engine_id, None)
        if slot is not None:
            slot.left_in = self._speculation.generation
            self._given_up.append(slot)

    def clear(self, engine_id: str) -> None:
        """Forget what an engine has cached.

        Raises:
            TooManyKeys: more is waiting to be forgotten than it can have.
        """
        slot = self._slots.get(engine_id)
        if slot is None:
            return
        if len(slot.keys) <= SWEEP_KEYS:
            self._sweep(slot, SWEEP_KEYS)
            return
        if sum(len(old.keys) for old in self._given_up if old.engine_id == engine_id) > slot.capacity:
            raise TooManyKeys(engine_id)
        self.join(engine_id, slot.capacity)

    def add(self, engine_id: str, keys: Sequence[int]) -> None:
        """Note that an engine has these blocks. For thousands of keys at a time: all of them are applied at once.

        Raises:
            TooManyKeys: the engine would have more than it can; nothing of `keys` is kept.
        """
        slot = self._slots.get(engine_id)
        if slot is None:
            return
        masks, own, bit = self._masks, slot.keys, slot.bit
        if len(own) + len(keys) > slot.capacity and len(own) + len(set(keys) - own) > slot.capacity:
            raise TooManyKeys(engine_id)
        for key in keys:
            if key not in own:
                own.add(key)
                known = masks.get(key)
                masks[key] = bit if known is None else known | bit
        if self._speculation:
            self._speculation.confirm(bit, keys)

    def remove(self, engine_id: str, keys: Sequence[int]) -> None:
        """Note that an engine has these blocks no more. For thousands of keys at a time."""
        slot = self._slots.get(engine_id)
        if slot is None:
            return
        for key in keys:
            if key in slot.keys:
                slot.keys.remove(key)
                self._take_back(key, slot.bit)
        if self._speculation:
            self._speculation.confirm(slot.bit, keys)

    def sent(self, engine_id: str, keys: Sequence[int]) -> None:
        """Note that an engine is sent a prompt: for a while it counts as having these blocks."""
        slot = self._slots.get(engine_id)
        if slot is not None:
            own = slot.keys
            self._speculation.add(slot.bit, [key for key in keys if key not in own])

    def match(self, engine_ids: Sequence[str], keys: Sequence[int]) -> list[int]:
        """Return, for each engine, how many of the leading blocks it has without a gap."""
        slots = [self._slots.get(engine_id) for engine_id in engine_ids]
        bits = [0 if slot is None else slot.bit for slot in slots]
        alive = 0
        for bit in bits:
            alive |= bit
        lost: list[tuple[int, int]] = []
        masks = self._masks.get
        young, old = self._speculation.lookups()
        for position, key in enumerate(keys):
            here = alive & masks(key, 0)
            if here != alive:
                here |= alive & (young(key, 0) | old(key, 0))
                if here != alive:
                    lost.append((alive ^ here, position))
                    alive = here
                    if not alive:
                        break
        lost.append((alive, len(keys)))
        return [next((length for gone, length in lost if gone & bit), 0) for bit in bits]

    def tick(self, now: float) -> None:
        """Let speculation age, and take back some of what engines had that left. A few milliseconds at most."""
        self._speculation.tick(now)
        budget, waiting = SWEEP_KEYS, []
        for slot in self._given_up:
            budget -= self._sweep(slot, budget)
            # Its bit may still stand in what was sent to it.
            if slot.keys or self._speculation.generation < slot.left_in + 2:
                waiting.append(slot)
            else:
                self._free_bits.append(slot.bit)
        self._given_up = waiting

    def check_integrity(self) -> None:
        """Check that masks and sets say the same; for tests."""
        claimed: dict[int, int] = {}
        for slot in (*self._slots.values(), *self._given_up):
            assert len(slot.keys) <= slot.capacity, "an engine has more than it can"
            for key in slot.keys:
                claimed[key] = claimed.get(key, 0) | slot.bit
        assert claimed == self._masks, "the masks differ from the engines' sets"
        used = [slot.bit for slot in (*self._slots.values(), *self._given_up)] + self._free_bits
        assert len(set(used)) == len(used) == self._num_bits, "a bit is shared or lost"

    def _sweep(self, slot: _Slot, budget: int) -> int:
        """Take back up to `budget` keys; returns how many."""
        count = min(budget, len(slot.keys))
        for _ in range(count):
            self._take_back(slot.keys.pop(), slot.bit)
        return count

    def _take_back(self, key: int, bit: int) -> None:
        rest = self._masks[key] ^ bit
        if rest:
            self._masks[key] = rest
        else:
            del self._masks[key]


# What engines were sent and have not yet reported: the gap between a request and the events about its blocks.
# Requests of the same prompt that come together must meet at one engine although none of its blocks is computed yet. A
# key counts until its event comes, or for LIFETIME_S to twice that: long enough for a prompt to wait its turn at a
# loaded engine, short enough that what never came about (the client left, the engine failed) misleads few.
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

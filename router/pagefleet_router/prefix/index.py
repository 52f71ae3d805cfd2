"""The approximate prefix index: what was sent where, forgotten least recently used first.

It guesses an engine's cache from the requests that the engine was given. A wrong guess costs a prefill, never an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pagefleet_router.request_view import Pieces


class PrefixIndex:
    """For each engine the pieces it was sent lately.

    A chain's parents are always more recent than its children, so what an engine remembers of a chain is a prefix of
    it, and its length is found by bisection.

    Args:
        capacity: pieces remembered over all engines, shared out evenly. One takes about 150 bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._engines: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """Return how many pieces are remembered."""
        return sum(map(len, self._engines.values()))

    def match(self, engine_id: str, pieces: Pieces) -> int:
        """Return how many of the leading pieces an engine has been sent."""
        known = self._engines.get(engine_id)
        if not known or not pieces or pieces[0] not in known:
            return 0
        if pieces[-1] in known:
            return len(pieces)
        low, high = 1, len(pieces) - 1  # the answer is in low..high
        while low < high:
            middle = (low + high + 1) // 2
            if pieces[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low

    def record(self, engine_id: str, pieces: Pieces) -> None:
        """Note that an engine is sent these pieces."""
        known = self._engines.get(engine_id)
        if known is None:
            known = self._engines[engine_id] = OrderedDict()
            for other in self._engines.values():
                self._trim(other)
        for piece in reversed(pieces):
            if piece in known:
                known.move_to_end(piece)
            else:
                known[piece] = None
        self._trim(known)

    def keep_only(self, engine_ids: Iterable[str]) -> None:
        """Forget the engines that are not among `engine_ids`."""
        for gone in self._engines.keys() - set(engine_ids):
            del self._engines[gone]

    def forget(self, engine_id: str) -> None:
        """Forget one engine, whose cache is gone."""
        self._engines.pop(engine_id, None)

    def check_integrity(self) -> None:
        """Check the bound; for tests."""
        assert len(self) <= self._capacity, "the index outgrew its capacity"

    def _trim(self, known: OrderedDict[int, None]) -> None:
        share = self._capacity // len(self._engines)
        while len(known) > share:
            known.popitem(last=False)

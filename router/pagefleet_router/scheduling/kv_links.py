"""Whose fault it is that K/V did not come: an engine to which nobody's comes is itself the one that is cut off."""

from __future__ import annotations

from collections import defaultdict


class KvLinks:
    """Remembers, for each decode engine, whose K/V has not come since any last did."""

    def __init__(self) -> None:
        self._lost: defaultdict[str, set[str]] = defaultdict(set)

    def lost(self, prefill_id: str, decode_id: str) -> bool:
        """Note that K/V did not come; returns whether its sender is to blame, as far as can be known."""
        lost = self._lost[decode_id]
        lost.add(prefill_id)
        return len(lost) == 1

    def came(self, decode_id: str) -> None:
        """Note that K/V came."""
        self._lost.pop(decode_id, None)

    def forget(self, engine_id: str) -> None:
        """Drop an engine that left the list."""
        self._lost.pop(engine_id, None)
        for lost in self._lost.values():
            lost.discard(engine_id)

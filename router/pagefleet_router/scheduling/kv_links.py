"""Which engines pass K/V to which: whose fault it is that K/V did not come, and which pairs are not to be tried now.

An engine to which nobody's K/V comes is itself the one that is cut off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pagefleet_router.engines.endpoints import EngineView


class KvLinks:
    """What answers have told. Times come from the caller, on a monotonic clock.

    Pairs are known by incarnations: an engine that began anew may have other settings, and is tried at once.
    """

    def __init__(self) -> None:
        self._lost: defaultdict[str, set[str]] = defaultdict(set)
        """For each decode engine, whose K/V has not come since any last did."""
        self._apart: dict[tuple[str, str], float] = {}
        """Incarnations of prefill and decode that pass nothing, until when."""
        self._alone: dict[str, float] = {}
        """Incarnations that pass nothing with anybody, until when."""

    def lost(self, prefill_id: str, decode_id: str) -> bool:
        """Note that K/V did not come; returns whether its sender is to blame, as far as can be known."""
        lost = self._lost[decode_id]
        lost.add(prefill_id)
        return len(lost) == 1

    def came(self, decode_id: str) -> None:
        """Note that K/V came."""
        self._lost.pop(decode_id, None)

    def part(self, prefill: EngineView, decode: EngineView, until: float) -> None:
        """Note that two engines cannot pass K/V, though neither has failed."""
        self._apart[_incarnation(prefill), _incarnation(decode)] = until

    def leave_alone(self, engine: EngineView, until: float) -> None:
        """Note that an engine passes no K/V of which it is told."""
        self._alone[_incarnation(engine)] = until

    def groups(
        self, decodes: Sequence[EngineView], prefills: Sequence[EngineView], now: float
    ) -> Iterator[tuple[Sequence[EngineView], Sequence[EngineView]]]:
        """Yield the decode engines that may have K/V from the same prefill engines, and these; nearly always all."""
        self._expire(now)
        if not self._apart and not self._alone:
            yield decodes, prefills
            return
        groups: dict[tuple[str, ...], tuple[list[EngineView], list[EngineView]]] = {}
        for decode in decodes:
            partners = [prefill for prefill in prefills if self._may_pass(prefill, decode)]
            if partners:
                groups.setdefault(tuple(one.id for one in partners), ([], partners))[0].append(decode)
        yield from groups.values()

    def forget(self, engine_id: str) -> None:
        """Drop an engine that left the list."""
        self._lost.pop(engine_id, None)
        for lost in self._lost.values():
            lost.discard(engine_id)

    def _may_pass(self, prefill: EngineView, decode: EngineView) -> bool:
        sender, receiver = _incarnation(prefill), _incarnation(decode)
        return not (sender in self._alone or receiver in self._alone or (sender, receiver) in self._apart)

    def _expire(self, now: float) -> None:
        if self._apart:
            self._apart = {pair: until for pair, until in self._apart.items() if until > now}
        if self._alone:
            self._alone = {one: until for one, until in self._alone.items() if until > now}


def _incarnation(engine: EngineView) -> str:
    return "" if engine.facts is None else engine.facts.incarnation

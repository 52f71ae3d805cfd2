"""How many prefill and decode engines each revision has next, so that every revision that serves has both.

Only engines of one revision pair: a revision that lost one part would be the waste of the other. Stateless, in whole
numbers, from what was asked for last and what is ready; applied until it changes nothing.

- The wanted revision grows as far as `max_surge` allows, beside what is left of the older ones. One that fails does not
  grow: what it may not have, the older one that serves most gets.
- An older one shrinks by what the wanted one has ready, both parts in proportion, rounded up: the last engine of one
  part goes with the last of the other.
- Where there may be none too many, and a part is so small that all of it may be missing, a second pair cannot exist
  beside the first: the older one goes as a whole, and then the wanted one comes.
After the rolling update of LeaderWorkerSet's DisaggregatedSet (KEP-766), without its memory of the first counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from pagefleet_protocol.inference_status import PairRole

WHOLE = ""
"""Stands for the revision of engines for whole requests, which roll over by themselves: they have one together."""
GROUPS = "groups"
"""The same of engines over several nodes, which others make."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Counts of both parts. Engines that serve whole requests count as decode engines."""

    prefill: int = 0
    decode: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is none of either."""
        return self.prefill == 0 and self.decode == 0

    def plus(self, role: PairRole | None, count: int) -> Pair:
        """Return it with more engines of one part."""
        if role == "prefill":
            return Pair(self.prefill + count, self.decode)
        return Pair(self.prefill, self.decode + count)


@dataclass(frozen=True, slots=True)
class RevisionSeen:
    """Engines of one revision."""

    revision: str
    asked: Pair
    """What was asked for last."""
    ready: Pair
    """What answers now."""
    fails: bool = False
    """Of the wanted one: whether more of it would not get ready either."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """How many instances, of each part, may be too many, or too few, while a revision replaces another."""

    max_surge: int
    max_unavailable: int
    keep_slots: bool = False
    """True where an instance's number is its address: no number at or over `replicas` is ever used."""

    def __post_init__(self) -> None:
        if self.max_surge + self.max_unavailable < 1:
            raise AssertionError("a rollout that may neither add nor remove an instance never ends")


class Count(NamedTuple):
    """Engines of one kind and revision; without a role for whole requests, which count as decode engines."""

    revision: str
    role: PairRole | None
    asked: int
    ready: int


def by_revision(counts: Iterable[Count]) -> dict[str, RevisionSeen]:
    """Return the engines of each revision."""
    found: dict[str, RevisionSeen] = {}
    for one in counts:
        before = found.get(one.revision, RevisionSeen(one.revision, Pair(), Pair()))
        found[one.revision] = replace(
            before, asked=before.asked.plus(one.role, one.asked), ready=before.ready.plus(one.role, one.ready)
        )
    return found


def next_counts(target: Pair, wanted: RevisionSeen, old: Sequence[RevisionSeen], bounds: Rollout) -> Mapping[str, Pair]:
    """Return what to ask for now, by revision; an older one that has to go has none of either.

    Args:
        target: engines of both parts in the end.
        wanted: the revision that is to serve.
        old: all others that have engines.
        bounds: of the rollout.
    """
    if target.empty or not old:
        return {wanted.revision: target, **{one.revision: Pair() for one in old}}
    share = _share_of_old(target, wanted.ready, bounds)
    keep = _keep(target, share, old)
    left = Pair(sum(one.prefill for one in keep.values()), sum(one.decode for one in keep.values()))
    if not wanted.fails:
        prefill = _grown(target.prefill, left.prefill, wanted.asked.prefill, bounds)
        decode = _grown(target.decode, left.decode, wanted.asked.decode, bounds)
        return {wanted.revision: Pair(prefill, decode), **keep}
    held = Pair(min(target.prefill, wanted.asked.prefill), min(target.decode, wanted.asked.decode))
    best = max(old, key=_worth).revision
    instead = Pair(
        _instead(keep[best].prefill, _room(share, target.prefill, held.prefill, bounds) - left.prefill),
        _instead(keep[best].decode, _room(share, target.decode, held.decode, bounds) - left.decode),
    )
    return {wanted.revision: held, **keep, best: instead}


def _alone(target: Pair, bounds: Rollout) -> bool:
    """Return whether two revisions cannot be side by side."""
    return bounds.max_surge == 0 and min(target.prefill or target.decode, target.decode) <= bounds.max_unavailable


def _grown(target: int, left: int, asked: int, bounds: Rollout) -> int:
    """Return how many of the wanted revision there may be; those that were asked for stay, as they are on their way."""
    return min(target, max(asked, target + bounds.max_surge - left))


def _room(share: Fraction, target: int, held: int, bounds: Rollout) -> int:
    """Return how many of the older revisions there may be beside a wanted one that does not grow."""
    return min(ceil(share * target), target + bounds.max_surge - held)


def _instead(kept: int, missing: int) -> int:
    """Return what an older revision has where the wanted one does not grow; of a part that it has none of, none."""
    return kept + max(0, missing) if kept else 0


def _keep(target: Pair, share: Fraction, old: Sequence[RevisionSeen]) -> dict[str, Pair]:
    """Return what older revisions keep. Those that serve least go first."""
    have = Pair(sum(one.asked.prefill for one in old), sum(one.asked.decode for one in old))
    room = Pair(_part(share, target.prefill, have.prefill), _part(share, target.decode, have.decode))
    kept: dict[str, Pair] = {}
    for one in sorted(old, key=_worth, reverse=True):
        pair = Pair(min(one.asked.prefill, max(0, room.prefill)), min(one.asked.decode, max(0, room.decode)))
        if (one.asked.prefill and not pair.prefill) or (one.asked.decode and not pair.decode):
            pair = Pair()  # both parts, or none
        kept[one.revision] = pair
        room = Pair(room.prefill - pair.prefill, room.decode - pair.decode)
    return kept


def _share_of_old(target: Pair, ready: Pair, bounds: Rollout) -> Fraction:
    """Return the part of the target that older revisions carry."""
    if _alone(target, bounds):
        return Fraction(0)
    return max(
        _share(target.prefill, ready.prefill, bounds.max_unavailable),
        _share(target.decode, ready.decode, bounds.max_unavailable),
    )


def _share(target: int, ready: int, max_unavailable: int) -> Fraction:
    """Return the part of the target that the wanted revision does not carry yet, and nobody may miss."""
    return Fraction(max(0, target - max_unavailable - ready), target) if target else Fraction(0)


def _part(share: Fraction, target: int, have: int) -> int:
    if not share:
        return 0
    # What the wanted revision has none of, the older one keeps until it goes as a whole.
    return min(have, ceil(share * target)) if target else have


def _worth(one: RevisionSeen) -> tuple[int, int, int, str]:
    return one.ready.decode, one.ready.prefill, one.asked.decode, one.revision

"""Which rank should have which expert: a pure function of how much each was wanted.

Experts that are wanted most get a second place, a third, ... on other ranks, and share their rows evenly among them.
Then places are given to ranks, the most wanted first, each to the rank with the least so far, and exchanged between
ranks while that helps the busiest. After DeepSeek's EPLB (arXiv 2412.19437, section 3.4), with one level.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

EMPTY = -1
"""In the place of an expert: the slot has none."""
_WORTHWHILE = 0.02
"""Of the mean: what the busiest rank has to gain, for more weights to be moved."""
_SMALLEST_MOVE = 1e-3
"""Of half the difference between two ranks."""
_MOST_EXCHANGES = 256


def first_places(num_experts: int, slots: Sequence[range]) -> list[int]:
    """What is held before anything is known: each expert once, in order; slots that are over are the last of a rank's
    own."""
    num_slots, held, expert = sum(map(len, slots)), list[int](), 0
    for rank, own in enumerate(slots):
        over = _over(num_slots - num_experts, rank, len(slots))
        held += [*range(expert, expert + len(own) - over), *[EMPTY] * over]
        expert += len(own) - over
    return held


def slot_ranges(num_experts: int, num_redundant: int, num_ranks: int) -> list[range]:
    """Each rank's slots, for as many experts or one more, and for its share of redundant ones."""
    ends = [
        num_experts * rank // num_ranks + sum(_over(num_redundant, before, num_ranks) for before in range(rank))
        for rank in range(num_ranks + 1)
    ]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def _over(num_redundant: int, rank: int, num_ranks: int) -> int:
    """A rank's share of the redundant slots."""
    return num_redundant // num_ranks + (rank < num_redundant % num_ranks)


def busiest_over_mean(load_E: Sequence[float], slots: Sequence[range], held: Sequence[int]) -> float:
    """The busiest rank's load over that of all in the mean; 1 where nothing was wanted.

    `slots`: of each rank. `held`: per slot, the expert in it or EMPTY.
    """
    loads = rank_loads(load_E, slots, held)
    return max(loads) * len(loads) / total if (total := sum(loads)) else 1.0


def rank_loads(load_E: Sequence[float], slots: Sequence[range], held: Sequence[int]) -> list[float]:
    """Each rank's load; arguments as above."""
    share_E = _shares(load_E, held)
    return [sum(share_E[held[slot]] for slot in own if held[slot] != EMPTY) for own in slots]


def place_experts(load_E: Sequence[float], slots: Sequence[range], held: Sequence[int]) -> list[int]:
    """Per slot, the expert that should be in it, or EMPTY: what is held, or that with a few exchanges, where anything
    else is hardly better.

    Each expert has a slot, and no rank has one twice. There are at least as many slots as experts; no rank has more
    slots than there are experts.
    """
    counts_E = _count_places(load_E, sum(map(len, slots)), len(slots))
    share_E = [load / count for load, count in zip(load_E, counts_E, strict=True)]
    ranks = _give_out(share_E, counts_E, [len(own) for own in slots])
    _exchange(ranks, share_E)
    found = _in_slots(ranks, slots, held)
    kept = [{held[slot] for slot in own} - {EMPTY} for own in slots]
    _exchange(kept, _shares(load_E, held))
    for less in (held, _in_slots(kept, slots, held)):  # fewer weights move
        if busiest_over_mean(load_E, slots, less) < busiest_over_mean(load_E, slots, found) + _WORTHWHILE:
            return list(less)
    return found


def _shares(load_E: Sequence[float], held: Sequence[int]) -> list[float]:
    """Each expert's load in one of its slots."""
    counts = [0] * len(load_E)
    for expert in held:
        if expert != EMPTY:
            counts[expert] += 1
    return [load / count for load, count in zip(load_E, counts, strict=True)]


def _count_places(load_E: Sequence[float], num_slots: int, num_ranks: int) -> list[int]:
    """How many slots each expert gets: one more always to the one with the most load in each of its own."""
    counts_E = [1] * len(load_E)
    heap = [(-load, expert) for expert, load in enumerate(load_E)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(load_E)):
        _, expert = heapq.heappop(heap)
        counts_E[expert] += 1
        if counts_E[expert] < num_ranks:
            heapq.heappush(heap, (-load_E[expert] / counts_E[expert], expert))
    return counts_E


def _give_out(share_E: Sequence[float], counts_E: Sequence[int], sizes: Sequence[int]) -> list[set[int]]:
    """The experts of each rank, which has so many slots; one gets fewer places where too few ranks have room."""
    ranks, loads = [set[int]() for _ in sizes], [0.0] * len(sizes)
    for expert in sorted(range(len(share_E)), key=lambda expert: -share_E[expert]):
        with_room = (rank for rank, size in enumerate(sizes) if len(ranks[rank]) < size)
        for rank in sorted(with_room, key=lambda rank: loads[rank])[: counts_E[expert]]:
            ranks[rank].add(expert)
            loads[rank] += share_E[expert]
    return ranks


def _exchange(ranks: list[set[int]], share_E: Sequence[float]) -> None:
    """Exchange an expert of the busiest rank for one of another that is wanted less, as long as that helps."""
    loads = [sum(share_E[expert] for expert in own) for own in ranks]
    for _ in range(_MOST_EXCHANGES):
        busiest = max(range(len(ranks)), key=lambda rank: loads[rank])
        for other in sorted(range(len(ranks)), key=lambda rank: loads[rank]):
            half = (loads[busiest] - loads[other]) / 2
            pair = _best_pair(ranks[busiest] - ranks[other], ranks[other] - ranks[busiest], share_E, half)
            if pair is not None:
                break
        else:
            return
        given, taken = pair
        ranks[busiest] = ranks[busiest] - {given} | {taken}
        ranks[other] = ranks[other] - {taken} | {given}
        loads[busiest] -= share_E[given] - share_E[taken]
        loads[other] += share_E[given] - share_E[taken]


def _best_pair(givable: set[int], takable: set[int], share_E: Sequence[float], half: float) -> tuple[int, int] | None:
    """What to exchange so that nearest to `half` moves, but less than twice as much; None where nothing does."""
    pairs = ((given, taken) for given in sorted(givable) for taken in sorted(takable))
    moved = ((abs(share_E[given] - share_E[taken] - half), given, taken) for given, taken in pairs)
    off, given, taken = min(moved, default=(half, 0, 0))
    return (given, taken) if off < half * (1 - _SMALLEST_MOVE) else None


def _in_slots(ranks: Sequence[set[int]], slots: Sequence[range], held: Sequence[int]) -> list[int]:
    """Per slot, its expert: ranks of as many slots change names so that they keep the most of what they hold, and what
    one keeps stays in its slot."""
    had = [{held[slot] for slot in own} for own in slots]
    overlaps = [
        (-len(ranks[one] & had[rank]), rank, one)
        for rank in range(len(slots))
        for one in range(len(slots))
        if len(slots[rank]) == len(slots[one])
    ]
    gets: dict[int, set[int]] = {}
    given = set[int]()
    for _, rank, one in sorted(overlaps):
        if rank not in gets and one not in given:
            gets[rank] = ranks[one]
            given.add(one)
    found = list(held)
    for rank, own in enumerate(slots):
        kept = {held[slot] for slot in own} & gets[rank]
        new = iter(sorted(gets[rank] - kept))
        for slot in own:
            if held[slot] not in kept:
                found[slot] = next(new, EMPTY)
    return found

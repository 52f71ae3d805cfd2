"""Experts on ranks by load: made-up traces, and one of a model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.layers.moe.expert_places import EMPTY, busiest_over_mean, first_places, place_experts, slot_ranges

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(0, 12)).filter(
    lambda sizes: sizes[0] >= sizes[1] and sizes[2] <= sizes[0] * (sizes[1] - 1)
)


@settings(max_examples=300, deadline=None)
@given(SIZES, st.integers(0, 1 << 30), st.sampled_from(("flat", "skewed", "none", "one")))
def test_every_expert_has_a_place_and_no_rank_has_one_twice(sizes: tuple[int, int, int], seed: int, kind: str) -> None:
    dice = random.Random(seed)
    num_experts, num_ranks, redundant = sizes
    slots = slot_ranges(num_experts, redundant, num_ranks)
    held = first_places(num_experts, slots)
    for _ in range(3):
        load = [
            {"flat": 7.0, "skewed": dice.paretovariate(0.8), "none": 0.0, "one": float(expert == 0)}[kind]
            for expert in range(num_experts)
        ]
        found = place_experts(load, slots, held)
        assert len(found) == num_experts + redundant
        assert set(found) - {EMPTY} == set(range(num_experts))
        for own in slots:
            there = [found[slot] for slot in own if found[slot] != EMPTY]
            assert len(set(there)) == len(there)
        assert busiest_over_mean(load, slots, found) <= busiest_over_mean(load, slots, held) + 1e-9
        assert place_experts(load, slots, found) == found, "what is placed by this load stays"
        held = found


@pytest.mark.parametrize(
    ("num_experts", "redundant", "num_ranks"), [(64, 16, 8), (128, 16, 8), (256, 32, 32), (256, 32, 16), (60, 7, 7)]
)
@pytest.mark.parametrize("skew", [0.5, 0.8, 1.0])
def test_a_skewed_trace_is_balanced(num_experts: int, redundant: int, num_ranks: int, skew: float) -> None:
    """Shares fall by rank's power; no expert's own share is more than its places can carry."""
    slots = slot_ranges(num_experts, redundant, num_ranks)
    held = first_places(num_experts, slots)
    load = [1000.0 / (1 + expert) ** skew for expert in range(num_experts)]
    random.Random(0).shuffle(load)
    before = busiest_over_mean(load, slots, held)
    assert before > 1.2
    assert busiest_over_mean(load, slots, place_experts(load, slots, held)) < 1.1


def test_what_is_kept_does_not_move() -> None:
    """A load that changed little changes few slots."""
    slots = slot_ranges(64, 8, 8)
    dice = random.Random(1)
    load = [dice.paretovariate(1.2) for _ in range(64)]
    held = place_experts(load, slots, first_places(64, slots))
    assert place_experts([each * dice.uniform(0.995, 1.005) for each in load], slots, held) == held
    load[5] += 0.3 * sum(load)
    found = place_experts(load, slots, held)
    assert busiest_over_mean(load, slots, found) < busiest_over_mean(load, slots, held)

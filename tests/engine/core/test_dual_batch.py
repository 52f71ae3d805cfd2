"""Which steps are computed in halves, and where they are cut: on made-up steps, and on those of a recorded run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.core.dual_batch import DualBatch, halves

STEPS = st.lists(st.one_of(st.just(1), st.integers(1, 700)), min_size=1, max_size=60).filter(lambda new: sum(new) > 1)
RECORDED = json.loads((Path(__file__).parent / "recorded_steps.json").read_text())
"""By bench/record_steps.py: per step the new tokens of each row of each rank, and whether it was divided."""


def check_halves(new: list[int]) -> None:
    first, second = halves(np.array(new))
    assert (first.tokens.start, second.tokens.stop) == (0, sum(new))
    assert first.tokens.stop == second.tokens.start
    row_of = np.repeat(np.arange(len(new)), new)
    for half in (first, second):
        own = row_of[half.tokens.start : half.tokens.stop].tolist()
        assert half.rows == range(own[0], own[-1] + 1), "all rows that have some of the tokens, and no other"
    assert abs(len(first.tokens) - len(second.tokens)) <= 1 + 2 * (sum(new) // 16)


@given(STEPS)
def test_halves_are_the_step_in_order_and_about_as_large(new: list[int]) -> None:
    check_halves(new)


@given(st.integers(2, 600))
def test_rows_that_decode_are_not_cut(num_rows: int) -> None:
    first, second = halves(np.ones(num_rows, dtype=np.int64))
    assert (len(first.rows), len(second.rows)) == (num_rows // 2, num_rows - num_rows // 2)


def test_a_row_is_cut_where_no_end_is_near() -> None:
    first, second = halves(np.array([10, 100, 10]))
    assert (first.rows, second.rows) == (range(2), range(1, 3))
    first, second = halves(np.array([48, 52]))
    assert (first.rows, second.rows) == (range(1), range(1, 2))


@given(STEPS, st.integers(1, 700), st.integers(1, 700))
def test_prompts_have_a_threshold_of_their_own(new: list[int], decode: int, prefill: int) -> None:
    divides = DualBatch(decode, prefill).divides(np.array(new))
    assert divides == (sum(new) >= (decode if max(new) == 1 else prefill))


def test_one_token_is_not_divided() -> None:
    assert not DualBatch(1, 1).divides(np.array([1]))


def test_a_recorded_run_was_divided_as_the_rules_say() -> None:
    rules = DualBatch(RECORDED["dbo_decode_token_threshold"], RECORDED["dbo_prefill_token_threshold"])
    divided = []
    for step in RECORDED["steps"]:
        ranks = [np.array(new, dtype=np.int64) for new in step["new"]]
        assert step["in_halves"] == all(rules.divides(new) for new in ranks)
        if step["in_halves"]:
            for new in step["new"]:
                check_halves(new)
            divided.append(max(max(new) for new in step["new"]))
    assert any(longest == 1 for longest in divided), "some of them decoded"
    assert any(longest > 1 for longest in divided)
    assert 0 < len(divided) < len(RECORDED["steps"])
    assert any(not new for step in RECORDED["steps"] for new in step["new"]), "some rank had nothing"

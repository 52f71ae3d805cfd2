"""Advice on prefill and decode engines, from what routers measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pagefleet_operator.plan.pair_ratio import PairLoad, ratio_advice
from pagefleet_operator.plan.pair_rollout import Pair

LOAD = PairLoad(prompt_tokens_per_s=19_000.0, prefill_rate=10_000.0, kv_usage=0.4, engines=4.0)
AT, SOON, LATER = "2026-03-01T12:00:00Z", "2026-03-01T12:00:30Z", "2026-03-01T12:01:00Z"


@pytest.mark.parametrize(
    ("have", "said"),
    [
        (Pair(1, 3), "more prefill engines are needed"),
        (Pair(1, 4), "take a decode engine for prefill"),
        (Pair(4, 1), "take a prefill engine for decode"),
        (Pair(1, 1), "more prefill and decode engines are needed"),
        (Pair(2, 2), "there are enough of both"),
        (Pair(9, 9), "there are enough of both"),
    ],
)
def test_the_advice_is_what_to_change(have: Pair, said: str) -> None:
    found = ratio_advice(LOAD, have, None, AT)
    assert found is not None
    assert (found.prefill, found.decode) == (2.0, 2.0)
    assert found.message.startswith(f"{said}: 19000 uncached prompt tokens/s arrive")


def test_without_load_or_knowledge_the_last_advice_stays() -> None:
    last = ratio_advice(LOAD, Pair(1, 1), None, AT)
    assert ratio_advice(None, Pair(1, 1), last, LATER) == last
    assert ratio_advice(replace(LOAD, prefill_rate=None), Pair(1, 1), last, LATER) == last
    assert ratio_advice(replace(LOAD, prompt_tokens_per_s=0.0), Pair(1, 1), None, LATER) is None


def test_it_is_renewed_once_a_minute_and_only_when_it_differs() -> None:
    last = ratio_advice(LOAD, Pair(1, 1), None, AT)
    more = replace(LOAD, prompt_tokens_per_s=28_500.0)
    assert ratio_advice(more, Pair(1, 1), last, SOON) == last
    assert ratio_advice(LOAD, Pair(1, 1), last, LATER) == last
    renewed = ratio_advice(more, Pair(1, 1), last, LATER)
    assert renewed is not None
    assert (renewed.prefill, renewed.at) == (3.0, LATER)

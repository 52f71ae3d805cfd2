"""Pairs whose engines also keep what their pools give up: p2p brings prompts, offload brings back what was here."""

from __future__ import annotations

from typing import Any

from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.kv_engines import (
    ANSWER,
    FIRST_TOKEN,
    FULL_BLOCKS,
    Fleet,
    FleetEngine,
    answers_alone,
    legs,
    prompt_of,
)

LONG_ANSWER = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
HITS = "pagefleet_engine_kv_transfer_offload_hits_total"
BOTH: dict[str, Any] = {"kv_connector": "p2p,offload", "kv_offload_memory": 16 * 1024 * 1024}


def hits(engine: FleetEngine) -> float:
    """Blocks that came back from its own memory."""
    return engine.core._scheduler.connector.stats().counters[HITS]


def test_preempted_requests_come_back_from_the_decode_engines_own_memory(fleet: Fleet) -> None:
    numbers = range(1, 4)
    expected = answers_alone(fleet.model, numbers, LONG_ANSWER)
    prefill = fleet.engine("a", kv_role="prefill")
    decode = fleet.engine("d", kv_role="decode", kv_peers=prefill.address, num_tokens=26 * 16, **BOTH)
    for number in numbers:
        one, two = legs(number, prefill, decode)
        prefill.add(f"p{number}", prompt_of(number), FIRST_TOKEN, one)
        decode.add(f"d{number}", prompt_of(number), LONG_ANSWER, two)
    fleet.until(lambda: all(decode.ended(f"d{number}") and prefill.ended(f"p{number}") for number in numbers))
    assert {number: decode.tokens(f"d{number}") for number in numbers} == expected
    assert [decode.num_cached(f"d{number}") for number in numbers] == [FULL_BLOCKS * 16] * len(numbers)
    assert decode.core.stats().preemptions > 0
    assert hits(decode) > 0
    fleet.until(lambda: prefill.num_held_blocks == 0 and decode.num_held_blocks == 0)


def test_a_prompt_in_the_prefill_engines_memory_is_not_computed_again(fleet: Fleet) -> None:
    numbers = range(1, 5)
    expected = answers_alone(fleet.model, numbers)
    prefill = fleet.engine("a", kv_role="prefill", num_tokens=24 * 16, **BOTH)
    for turn in range(2):
        # A new one each time: it has nothing of its own.
        decode = fleet.engine("d", kv_role="decode", kv_peers=prefill.address)
        for number in numbers:
            one, two = legs(100 * turn + number, prefill, decode)
            prefill.add(f"p{turn}.{number}", prompt_of(number), FIRST_TOKEN, one)
            decode.add(f"d{number}", prompt_of(number), ANSWER, two)
            fleet.until(lambda: decode.ended(f"d{number}") and prefill.ended(f"p{turn}.{number}"))  # noqa: B023
            fleet.until(lambda: prefill.num_held_blocks == 0)
            assert decode.tokens(f"d{number}") == expected[number]
            assert decode.num_cached(f"d{number}") == FULL_BLOCKS * 16
            assert prefill.num_cached(f"p{turn}.{number}") == turn * FULL_BLOCKS * 16
        fleet.stop(decode)
    assert hits(prefill) >= 2 * FULL_BLOCKS, "the pool has room for the last two at most"

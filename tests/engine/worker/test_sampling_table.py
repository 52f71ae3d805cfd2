"""Seeds of requests, and the counts of tokens that penalties are computed from."""

from __future__ import annotations

import torch
from pagefleet_engine.worker.sampling_table import TokenCounts, request_seed


def test_a_request_without_a_seed_gets_one_from_the_engines() -> None:
    assert request_seed(5, engine_seed=0, counter=3) == request_seed(5, engine_seed=1, counter=4) == 5
    assert request_seed(-1, 0, 0) == 2**64 - 1
    derived = [request_seed(None, engine, counter) for engine in range(10) for counter in range(10)]
    assert len(set(derived)) == 100
    assert request_seed(None, 3, 4) == request_seed(None, 3, 4)
    assert request_seed(None, -1, 0) != request_seed(None, 1, 0)


CPU = torch.device("cpu")


def test_prompt_tokens_are_seen_and_output_tokens_counted() -> None:
    counts = TokenCounts(8, 10, CPU)
    counts.add(3, seen=(5, 5, 6), output=(6, 7, 7))
    assert counts.table[counts.row(3)].tolist() == [0, 0, 0, 0, 0, 1, 3, 4, 0, 0]


def test_only_slots_that_ask_have_a_row_and_the_table_grows_with_them() -> None:
    counts = TokenCounts(6, 10, CPU)
    assert counts.table.shape == (0, 10)
    assert counts.row(0) == -1
    for slot in range(6):
        counts.add(slot, seen=(slot,), output=())
        assert counts.table.shape[0] == (4 if slot < 4 else 6)
    assert len({counts.row(slot) for slot in range(6)}) == 6
    for slot in range(6):
        assert counts.table[counts.row(slot)].tolist() == [int(token == slot) for token in range(10)]


def test_a_row_is_empty_when_it_is_used_again() -> None:
    counts = TokenCounts(1, 4, CPU)
    counts.add(0, seen=(1,), output=(2,))
    counts.remove(0)
    counts.remove(0)
    assert counts.row(0) == -1
    counts.add(0, seen=(), output=(3,))
    assert counts.table.tolist() == [[0, 0, 0, 2]]

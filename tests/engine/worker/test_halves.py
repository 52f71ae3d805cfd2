"""A step in halves reads and writes what the whole step would, and samples the same."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from pagefleet_engine.attention.backend import BatchGeometry
from pagefleet_engine.ranks.turns import Turns
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.markov_model import MarkovModel, NoAttention, Requests, make_runner

Seen = tuple[tuple[int, ...], int, int]
"""Of a token: its row's blocks, its position, and where its keys go."""


def tokens_of(batch: BatchGeometry) -> list[Seen]:
    """As kernels see them, which must be what is known on the host."""
    starts, lens = batch.query_start_loc_S1.tolist(), batch.seq_lens_S.tolist()
    query_lens = [stop - start for start, stop in itertools.pairwise(starts)]
    assert starts[0] == 0
    assert (query_lens, lens) == (batch.query_lens, batch.seq_lens)
    assert batch.max_query_len == max(query_lens)
    (tables_SB,), (slots_T,) = batch.block_tables, batch.slot_mappings
    tables, slots = tables_SB.tolist(), slots_T.tolist()
    assert len(tables) == len(lens)
    assert len(slots) == sum(query_lens)
    return [
        (tuple(tables[row]), lens[row] - query_len + index, slots[starts[row] + index])
        for row, query_len in enumerate(query_lens)
        for index in range(query_len)
    ]


class Noted(NoAttention):
    """What the steps' tokens saw, as their buffers were then."""

    def take(self) -> list[list[Seen]]:
        seen = [tokens_of(batch) for batch in self.batches]
        self.batches.clear()
        return seen


@pytest.mark.parametrize("seed", range(8))
def test_halves_are_the_whole_step(seed: int) -> None:
    dice = random.Random(seed)
    model = MarkovModel(torch.randn(50, 50, generator=torch.Generator().manual_seed(seed)))
    of_whole, of_halves = Noted(), Noted()
    whole = Requests(make_runner(model, backend=of_whole))
    halved = Requests(make_runner(model, backend=of_halves, turns=Turns()))
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    for number in range(6):
        prompt = [dice.randrange(3, 50) for _ in range(dice.choice((1, 2, 7, 30)))]
        for requests in (whole, halved):
            requests.add(str(number), prompt, sampling)
        chunk = dice.choice((1, 4, 100))
        expected = whole.step(chunk=chunk)
        num_tokens = len(of_whole.batches[0].slot_mappings[0])
        assert halved.step(chunk=chunk, in_halves=num_tokens > 1) == expected
        (seen,), parts = of_whole.take(), of_halves.take()
        assert len(parts) == min(2, num_tokens)
        assert [token for part in parts for token in part] == seen

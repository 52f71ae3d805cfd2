"""Warm-up and profile steps: within every limit, and gone afterwards."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.core.kv_groups import num_blocks_for
from pagefleet_engine.worker.model_runner import RunnerLimits
from pagefleet_engine.worker.rehearsal import (
    HUNGRIEST,
    fullest_step,
    rehearse,
    rehearse_everything,
    short_step,
)
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.markov_model import MarkovModel, NoAttention, Requests, make_runner


def limits_of(seqs: int, tokens: int, model_len: int, block_size: int = 4) -> RunnerLimits:
    return RunnerLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=model_len,
        block_size=block_size,
        vocab_size=50,
    )


@pytest.mark.parametrize(
    ("seqs", "tokens", "model_len", "expected"),
    [(4, 100, 1_000, [25] * 4), (4, 10, 1_000, [2] * 4), (4, 4, 9, [1] * 4), (2, 100, 8, [7] * 2), (3, 99, 2, [1] * 3)],
)
def test_the_fullest_step_has_all_rows_and_as_many_tokens_as_fit(
    seqs: int, tokens: int, model_len: int, expected: list[int]
) -> None:
    assert fullest_step(limits_of(seqs, tokens, model_len)) == expected


@pytest.mark.parametrize("seqs", [1, 2, 256])
@pytest.mark.parametrize("tokens", [256, 300, 2048])
@pytest.mark.parametrize("model_len", [2, 3, 17, 4_096])
@pytest.mark.parametrize("num_blocks", [1, 2, 5, 1_000])
def test_the_short_step_stays_within_every_limit(seqs: int, tokens: int, model_len: int, num_blocks: int) -> None:
    limits = limits_of(seqs, tokens, model_len, block_size=16)
    lengths = short_step(limits, num_blocks)
    assert len(lengths) <= seqs
    assert sum(lengths) <= tokens
    assert all(0 < length < model_len for length in lengths)
    assert sum(num_blocks_for(length + 1, 16) for length in lengths) <= num_blocks
    if num_blocks == 1_000:
        assert len(lengths) == min(2, seqs)


def test_a_rehearsal_leaves_the_runner_as_it_was() -> None:
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(2))
    tokens = []
    for rehearsed in (False, True):
        model = MarkovModel(table)
        runner = make_runner(model, max_num_seqs=2)
        if rehearsed:
            rehearse(runner, [5, 9], limits_of(2, 256, 64))
            assert model.num_logit_rows == [2, 2]
        requests = Requests(runner)
        requests.add("a", [1, 2], SamplingParams())
        requests.add("b", [3], SamplingParams(top_p=0.9))
        for _ in range(4):
            requests.step()
        tokens.append(requests.tokens)
    assert tokens[0] == tokens[1]


def test_a_rehearsal_stops_where_the_context_ends() -> None:
    model = MarkovModel(torch.zeros(50, 50))
    runner = make_runner(model, max_model_len=10)
    assert rehearse(runner, [9, 8], limits_of(2, 256, 10))
    assert model.num_logit_rows == [2, 1]


def test_a_model_whose_output_is_not_a_number_does_not_stop_the_start() -> None:
    model = MarkovModel(torch.full((50, 50), float("nan")))
    assert not rehearse(make_runner(model), [5], limits_of(2, 256, 64))
    assert model.num_logit_rows == [1, 1]


@pytest.mark.parametrize("num_blocks", [2, 1_000])
@pytest.mark.parametrize("limits", [limits_of(4, 256, 64), limits_of(1, 1, 2), limits_of(2, 3, 6)])
def test_everything_is_rehearsed_within_the_limits(limits: RunnerLimits, num_blocks: int) -> None:
    model = MarkovModel(torch.randn(50, 50, generator=torch.Generator().manual_seed(3)))
    runner = make_runner(model, max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len)
    rehearse_everything(runner, limits, num_blocks)
    assert rehearse(runner, [1], limits, HUNGRIEST)
    assert model.num_logit_rows
    assert num_blocks == 2 or limits.max_num_seqs in model.num_logit_rows
    requests = Requests(runner)
    requests.add("a", [1], SamplingParams(temperature=0.0))
    assert requests.step().failed == {}


def test_every_number_of_rows_is_rehearsed_alone_and_beside_a_prompt() -> None:
    model = MarkovModel(torch.randn(50, 50, generator=torch.Generator().manual_seed(3)))
    backend = NoAttention()
    rehearse_everything(make_runner(model, max_num_seqs=6, backend=backend), limits_of(6, 256, 64), 1_000)
    seen = {(len(batch.query_lens), batch.max_query_len) for batch in backend.batches if batch.query_lens is not None}
    assert {(rows, 1) for rows in (1, 2, 4, 6)} | {(rows, 32) for rows in (1, 2, 3, 4, 6)} <= seen
    assert {(1, length) for length in (1, 2, 4, 8, 16, 32, 63)} <= seen
    repeated = [batch for batch in backend.batches if batch.seq_lens == [33]]  # a token after a prompt of 32
    assert repeated == []

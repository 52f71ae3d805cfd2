"""Plans through the runner with a model whose every logit is known."""

from __future__ import annotations

import math

import pytest
import torch
from pagefleet_engine.core.step import (
    FailureKind,
    NewRow,
    ScheduledRow,
    ScheduledRows,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from pagefleet_engine.worker import prompt_logprobs, request_table
from pagefleet_engine.worker.sampler import Sampler
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.step_inputs import scatter_writes
from pagefleet_protocol.sampling_params import SamplingParams
from torch import Tensor

from tests.fakes.markov_model import EOS, MarkovModel, Requests, make_runner

VOCAB_SIZE = 50
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(name="table_VV")
def random_table() -> Tensor:
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def greedy_chain(table_VV: Tensor, last: int, length: int) -> list[int]:
    chain = []
    for _ in range(length):
        last = int(table_VV[last].argmax())
        chain.append(last)
    return chain


def test_greedy_follows_the_table_in_any_chunks_and_orders(table_VV: Tensor) -> None:
    requests = Requests(make_runner(MarkovModel(table_VV)))
    requests.add("a", [3, 1, 4, 1, 5, 9, 2, 6], GREEDY)
    assert requests.step("a", chunk=3).sampled == [()]
    requests.add("b", [7], GREEDY)
    result = requests.step("b", "a", chunk=4)
    assert [len(tokens) for tokens in result.sampled] == [1, 0]
    requests.step("a", "b", chunk=4)
    for order in (("a", "b"), ("b", "a"), ("a",), ("b", "a")):
        requests.step(*order)
    assert requests.tokens["a"][8:] == greedy_chain(table_VV, 6, 5)
    assert requests.tokens["b"][1:] == greedy_chain(table_VV, 7, 5)


def test_logits_are_computed_for_sampling_rows_only(table_VV: Tensor) -> None:
    model = MarkovModel(table_VV)
    requests = Requests(make_runner(model))
    requests.add("long", list(range(30)), GREEDY)
    requests.step(chunk=20)
    assert model.num_logit_rows == []
    requests.add("short", [4, 5], GREEDY)
    requests.step("long", "short", chunk=5)
    requests.step("long", "short")
    assert model.num_logit_rows == [1, 2]


def test_a_request_that_left_makes_room_and_leaves_no_trace(table_VV: Tensor) -> None:
    requests = Requests(make_runner(MarkovModel(table_VV), max_num_seqs=2))
    requests.add("a", [1, 2, 3], SamplingParams(temperature=0.0, allowed_token_ids=(9,)))
    requests.add("b", [4], GREEDY)
    requests.step()
    assert requests.tokens["a"] == [1, 2, 3, 9]
    requests.remove("a")
    requests.add("c", [5], GREEDY)
    requests.step("b", "c")
    assert requests.tokens["c"] == [5, *greedy_chain(table_VV, 5, 1)]
    assert requests.tokens["b"] == [4, *greedy_chain(table_VV, 4, 2)]


def run_with(table_VV: Tensor, sampling: SamplingParams, chunk: int, company: bool, preempt_after: int) -> list[int]:
    """Eight tokens of a request, alone or not, in chunks, thrown out and brought back once."""
    requests = Requests(make_runner(MarkovModel(table_VV), seed=company))
    prompt = [6, 7, 8, 9, 10]
    if company:
        requests.add("other", [1, 2], SamplingParams(top_p=0.5, seed=77))
    requests.add("r", prompt, sampling)
    while len(requests.tokens["r"]) < len(prompt) + 8:
        requests.step(*reversed(requests.tokens), chunk=chunk)
        if len(requests.tokens["r"]) == len(prompt) + preempt_after:
            output = requests.tokens["r"][len(prompt) :]
            requests.remove("r")
            requests.add("r", prompt, sampling, output)
            preempt_after = -1
    return requests.tokens["r"][len(prompt) :]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=3),
        SamplingParams(seed=4, top_p=0.8, presence_penalty=1.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.8, frequency_penalty=0.5),
        SamplingParams(seed=5, top_k=5, bad_words_token_ids=((1, 2), (3,)), min_tokens=6),
    ],
)
def test_output_does_not_hang_on_batch_chunks_or_preemption(table_VV: Tensor, sampling: SamplingParams) -> None:
    expected = run_with(table_VV, sampling, 100, company=False, preempt_after=-1)
    assert run_with(table_VV, sampling, 2, company=True, preempt_after=-1) == expected
    assert run_with(table_VV, sampling, 3, company=True, preempt_after=4) == expected
    assert run_with(table_VV, sampling, 100, company=False, preempt_after=1) == expected


def test_min_tokens_masks_the_models_end_and_the_stop_ids(table_VV: Tensor) -> None:
    table_VV[:, EOS] = 90.0
    table_VV[:, 11] = 80.0
    requests = Requests(make_runner(MarkovModel(table_VV)))
    requests.add("r", [1], SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(11,)))
    for _ in range(4):
        requests.step()
    assert not {EOS, 11} & set(requests.tokens["r"][1:4])
    assert requests.tokens["r"][4] == EOS


def test_a_request_whose_logits_are_not_numbers_fails_alone(table_VV: Tensor) -> None:
    table_VV[13, 0] = math.nan
    requests = Requests(make_runner(MarkovModel(table_VV)))
    requests.add("good", [1], SamplingParams(temperature=0.0, logprobs=0))
    requests.add("bad", [2, 13], SamplingParams(temperature=0.0, logprobs=0))
    requests.add("nothing", [3], SamplingParams(temperature=0.0, allowed_token_ids=(4,), bad_words_token_ids=((4,),)))
    result = requests.step()
    assert [tuple(tokens) for tokens in result.sampled] == [tuple(greedy_chain(table_VV, 1, 1)), (), ()]
    assert result.failed == {"bad": FailureKind.NOT_NUMBERS, "nothing": FailureKind.NOTHING_LEFT}
    assert set(result.logprobs) == {"good"}
    requests.remove("bad")
    requests.remove("nothing")
    requests.step("good")
    assert requests.tokens["good"][1:] == greedy_chain(table_VV, 1, 2)


def entries(results: list[StepResult], name: str) -> list[TokenLogprobs]:
    return [entry for result in results for entry in result.prompt_logprobs.get(name, ())]


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("at_once", [2 * VOCAB_SIZE, 1 << 24])
def test_prompt_logprobs_come_chunk_by_chunk(
    table_VV: Tensor, chunk: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS", at_once)
    model = MarkovModel(table_VV)
    requests = Requests(make_runner(model))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    requests.add("plain", [8, 8, 8], GREEDY)
    requests.add("r", prompt, SamplingParams(temperature=0.0, prompt_logprobs=2))
    results = []
    while len(requests.tokens["r"]) < len(prompt) + 2:
        results.append(requests.step(chunk=chunk))
    logprobs_VV = table_VV.log_softmax(1)
    found = entries(results, "r")
    assert [entry.token_ids[0] for entry in found] == prompt[1:]
    for before, entry in zip(prompt, found, strict=False):
        assert list(entry.token_ids[1:]) == table_VV[before].topk(2).indices.tolist()
        assert list(entry.logprobs) == pytest.approx([float(logprobs_VV[before, token]) for token in entry.token_ids])
        assert entry.rank == int((table_VV[before] > table_VV[before, entry.token_ids[0]]).sum()) + 1
    assert not entries(results, "plain")
    assert max(model.num_logit_rows) <= max(2, at_once // VOCAB_SIZE)


def test_prompt_logprobs_are_not_given_again_with_output_at_hand(table_VV: Tensor) -> None:
    requests = Requests(make_runner(MarkovModel(table_VV)))
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    requests.add("r", [3, 1, 4], sampling, output=greedy_chain(table_VV, 4, 2))
    assert not requests.step().prompt_logprobs
    assert requests.tokens["r"][3:] == greedy_chain(table_VV, 4, 3)


def test_prompt_logits_that_are_not_numbers_fail_the_request(table_VV: Tensor) -> None:
    table_VV[13, 0] = math.nan
    requests = Requests(make_runner(MarkovModel(table_VV)))
    requests.add("r", [13, 2, 3, 4], SamplingParams(temperature=0.0, prompt_logprobs=0))
    result = requests.step(chunk=2)
    assert set(result.failed) == {"r"}
    assert not result.prompt_logprobs


class OverflowingHead(MarkovModel):
    """Its hidden states are sound; the logits after token 13 are not."""

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return torch.where((hidden_SD == self.table_VV[13]).all(1, keepdim=True), math.inf, hidden_SD)


def test_logits_that_are_not_numbers_over_sound_hidden_states_fail_too(table_VV: Tensor) -> None:
    requests = Requests(make_runner(OverflowingHead(table_VV)))
    requests.add("bad", [2, 13], GREEDY)
    requests.add("good", [13, 2], GREEDY)
    result = requests.step()
    assert set(result.failed) == {"bad"}
    assert tuple(result.sampled[1]) == tuple(greedy_chain(table_VV, 2, 1))


def test_a_chunk_that_is_not_a_number_fails_before_its_request_samples(table_VV: Tensor) -> None:
    table_VV[13, 0] = math.nan
    requests = Requests(make_runner(MarkovModel(table_VV)))
    requests.add("bad", [13, 2, 3, 4], GREEDY)
    requests.add("good", [5, 6, 7], GREEDY)
    result = requests.step(chunk=2)
    assert set(result.failed) == {"bad"}
    requests.remove("bad")
    assert requests.step().sampled == [tuple(greedy_chain(table_VV, 7, 1))]


def disjoint_writes(arena_A: Tensor, writes_W3: Tensor, values_V: Tensor, *, backend: Backend | None) -> None:
    """`scatter_writes`, which may do its writes in any order."""
    places = [place for start, _, length in writes_W3.tolist() for place in range(start, start + length)]
    assert len(places) == len(set(places))
    scatter_writes(arena_A, writes_W3, values_V, backend=backend)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_launch_that_fails_half_way_harms_no_later_step(
    kernels: Backend, table_VV: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_table, "scatter_writes", disjoint_writes)
    runner = make_runner(MarkovModel(table_VV), max_num_seqs=3, kernels=kernels)
    requests = Requests(runner)
    requests.add("before", [3, 4], GREEDY)
    requests.step()
    new = [NewRow(name, [5, 6], 2, GREEDY, (EOS,)) for name in ("first", "second")]
    rows = [ScheduledRow(name, 0, 2, ((index + 100,),), True) for index, name in enumerate(("first", "second"))]
    add = Sampler.add

    def out_of_memory(sampler: Sampler, slot: int, row: NewRow) -> None:
        if row.request_id == "second":
            raise torch.OutOfMemoryError
        add(sampler, slot, row)

    monkeypatch.setattr(Sampler, "add", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        runner.launch(StepPlan(7, (), new, ScheduledRows.of(rows), 4))
    monkeypatch.setattr(Sampler, "add", add)
    runner.release(["first", "second", "never seen"])
    requests.add("after", [7], GREEDY)
    requests.add("another", [8], GREEDY)
    requests.step()
    assert requests.tokens["before"] == [3, 4, *greedy_chain(table_VV, 4, 2)]
    assert requests.tokens["after"] == [7, *greedy_chain(table_VV, 7, 1)]

"""What is refused at the door, with which error, and what a client is told about coming back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pagefleet_engine.config import SchedulerConfig
from pagefleet_engine.core.admission import ModelLimits, QueueGate, check_request
from pagefleet_engine.core.request import Request
from pagefleet_engine.errors import ContextTooLong, InvalidRequest, QueueFull
from pagefleet_engine.sampling_params import SamplingParams
from pagefleet_protocol.block_hash import PrefixScope

LIMITS = ModelLimits(max_model_len=100, vocab_size=1_000)


def make_request(tokens: Sequence[int], sampling: SamplingParams | None = None) -> Request:
    return Request("r", tokens, sampling or SamplingParams(), (2,), PrefixScope("model"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("num_tokens", [1, 99])
def test_a_prompt_that_leaves_room_for_a_token_is_accepted(num_tokens: int) -> None:
    check_request(make_request([5] * num_tokens), LIMITS, capacity_tokens=100)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one") as refusal:
        check_request(make_request([]), LIMITS, 100)
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize("num_tokens", [100, 101, 5_000])
def test_a_prompt_over_the_context_is_refused(num_tokens: int) -> None:
    with pytest.raises(ContextTooLong, match=f"{num_tokens} tokens and the context is 100") as refusal:
        check_request(make_request([5] * num_tokens), LIMITS, 1_000)
    assert refusal.value.code == "context_length_exceeded"


def test_a_prompt_over_the_pool_names_the_setting_to_raise() -> None:
    check_request(make_request([5] * 31), LIMITS, 32)
    with pytest.raises(ContextTooLong, match="num_kv_blocks"):
        check_request(make_request([5] * 32), LIMITS, 32)


@pytest.mark.parametrize("token", [-1, 1_000, 2**31, 2**63])
def test_token_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token id {token}: the model's are 0 to 999") as refusal:
        check_request(make_request([5, token, 5]), LIMITS, 100)
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize(
    ("param", "sampling"),
    [
        ("stop_token_ids", SamplingParams(stop_token_ids=(1, 1_000))),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=(1_000,))),
        ("logit_bias", SamplingParams(logit_bias={1_000: 1})),
        ("bad_words_token_ids", SamplingParams(bad_words_token_ids=((1,), (2, 1_000)))),
    ],
)
def test_token_ids_in_parameters_are_checked_too(param: str, sampling: SamplingParams) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_request(make_request([5], sampling), LIMITS, 100)
    assert refusal.value.param == param


def test_the_last_token_of_the_vocabulary_is_accepted_everywhere() -> None:
    sampling = SamplingParams(stop_token_ids=(999,), allowed_token_ids=(0, 999), logit_bias={999: 1})
    check_request(make_request([0, 999], sampling), LIMITS, 100)


def test_the_queue_has_a_limit_in_requests() -> None:
    gate = QueueGate(SchedulerConfig(max_num_queued_reqs=2), Clock())
    for _ in range(2):
        gate.check(make_request([5]))
        gate.arrive(make_request([5]))
    with pytest.raises(QueueFull, match="2 requests are waiting") as refusal:
        gate.check(make_request([5]))
    assert refusal.value.retry_after_s == 1.0
    gate.leave(make_request([5]))
    gate.check(make_request([5]))


def test_the_queue_has_a_limit_in_tokens_but_an_empty_one_takes_any_prompt() -> None:
    gate = QueueGate(SchedulerConfig(max_num_queued_tokens=10), Clock())
    gate.check(make_request([5] * 50))
    gate.arrive(make_request([5] * 6))
    gate.check(make_request([5] * 4))
    with pytest.raises(QueueFull, match="6 prompt tokens are waiting"):
        gate.check(make_request([5] * 5))


def test_the_wait_is_estimated_from_what_others_waited() -> None:
    clock = Clock()
    gate = QueueGate(SchedulerConfig(), clock)
    for _ in range(100):  # 50 tokens each, admitted after 5 s: 0.1 s per queued token
        request = make_request([5] * 50)
        gate.arrive(request)
        clock.now += 5.0
        gate.leave(request)
        gate.observe_wait(request)
    for _ in range(4):
        gate.arrive(make_request([5] * 50))
    assert gate.estimate_wait() == pytest.approx(20.0, rel=0.01)


def test_the_estimate_stays_between_a_second_and_a_minute() -> None:
    clock = Clock()
    gate = QueueGate(SchedulerConfig(), clock)
    assert gate.estimate_wait() == 1.0
    request = make_request([5])
    gate.arrive(request)
    clock.now = 1e6
    gate.observe_wait(request)
    assert gate.estimate_wait() == 60.0

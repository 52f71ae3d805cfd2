"""Each rule that ends a request, and which one wins."""

from __future__ import annotations

import pytest
from pagefleet_engine.core.request import FinishReason, Request
from pagefleet_engine.core.stop import Stop, check_stop
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

EOS = 2
STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH


def judge(output: list[int], max_model_len: int = 100, eos: tuple[int, ...] = (EOS,), **fields: object) -> Stop | None:
    """Judge a request with a prompt of three tokens."""
    sampling = SamplingParams(**{"max_tokens": 10, **fields})  # type: ignore[arg-type]
    request = Request("r", [EOS, 50, 50], sampling, eos, PrefixScope("model"))
    request.limit(max_model_len)
    request.token_ids += output
    return check_stop(request)


def test_goes_on_with_an_ordinary_token() -> None:
    assert judge([5]) is None


def test_end_of_text_stops_without_a_stop_token() -> None:
    assert judge([5, EOS]) == Stop(STOP, None)
    assert judge([5, 3], eos=(2, 3)) == Stop(STOP, None)


def test_end_of_text_counts_only_as_the_last_token() -> None:
    assert judge([EOS, 5]) is None


def test_end_of_text_can_be_ignored() -> None:
    assert judge([EOS], ignore_eos=True) is None


def test_a_stop_token_is_named() -> None:
    assert judge([5, 9], stop_token_ids=[8, 9]) == Stop(STOP, 9)
    assert judge([5, 9], stop_token_ids=[9], ignore_eos=True) == Stop(STOP, 9)


def test_end_of_text_in_the_stop_list_is_named_only_when_it_is_ignored_as_such() -> None:
    assert judge([EOS], stop_token_ids=[EOS]) == Stop(STOP, None)
    assert judge([EOS], stop_token_ids=[EOS], ignore_eos=True) == Stop(STOP, EOS)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, None), (2, None), (3, Stop(STOP, None)), (4, Stop(STOP, None))]
)
def test_nothing_stops_before_min_tokens(num_tokens: int, expected: Stop | None) -> None:
    output = [5] * (num_tokens - 1)
    assert judge([*output, EOS], min_tokens=3) == expected
    named = expected and Stop(STOP, 9)
    assert judge([*output, 9], min_tokens=3, stop_token_ids=[9]) == named


@pytest.mark.parametrize(("num_tokens", "expected"), [(3, None), (4, Stop(LENGTH, None))])
def test_max_tokens_counts_output_only(num_tokens: int, expected: Stop | None) -> None:
    assert judge([5] * num_tokens, max_tokens=4) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(6, None), (7, Stop(LENGTH, None))])
def test_the_context_counts_prompt_and_output(num_tokens: int, expected: Stop | None) -> None:
    assert judge([5] * num_tokens, max_model_len=10, max_tokens=None) == expected
    assert judge([5] * num_tokens, max_model_len=10, max_tokens=50) == expected


def test_limits_hold_before_min_tokens() -> None:
    assert judge([5] * 7, max_model_len=10, max_tokens=None, min_tokens=20) == Stop(LENGTH, None)
    assert judge([5] * 3 + [EOS], max_tokens=4, min_tokens=4) == Stop(STOP, None)


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    assert judge([5, 5, 5, EOS], max_tokens=4) == Stop(STOP, None)
    assert judge([5] * 6 + [9], max_model_len=10, stop_token_ids=[9]) == Stop(STOP, 9)

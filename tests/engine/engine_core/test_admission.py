from typing import Any

import msgspec
import pytest
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.engine_core.admission import check_message, to_request
from pagefleet_engine.engine_core.messages import AddRequest
from pagefleet_engine.errors import ContextTooLong, InvalidRequest
from pagefleet_engine.sampling_params import SamplingParams

LIMITS = ModelLimits(max_model_len=16, vocab_size=100)
GOOD = AddRequest("r1", [1, 2, 3], SamplingParams(max_tokens=4), (7,), cache_salt="tenant-1_A")


def test_a_good_message_becomes_a_request() -> None:
    request = to_request(GOOD, LIMITS, "model")
    assert request.token_ids == [1, 2, 3]
    assert (request.scope.model, request.scope.salt) == ("model", "tenant-1_A")
    check_message(GOOD, LIMITS)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"sampling": SamplingParams(n=2)}, "n"),
        ({"adapter": "lora"}, "adapter"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"cache_salt": "a b"}, "cache_salt"),
        ({"cache_salt": "a\n"}, "cache_salt"),
        ({"cache_salt": "ü"}, "cache_salt"),
        ({"priority": 2**63}, "priority"),
        ({"priority": -(2**63) - 1}, "priority"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [-1]}, "prompt"),
        ({"prompt_token_ids": [100]}, "prompt"),
        ({"prompt_token_ids": [2**70]}, "prompt"),
        ({"prompt_token_ids": [1.0]}, "prompt"),
        ({"prompt_token_ids": [True]}, "prompt"),
        ({"prompt_token_ids": ["1"]}, "prompt"),
        ({"eos_token_ids": ("x",)}, "eos_token_ids"),
        ({"sampling": SamplingParams(stop_token_ids=(100,), max_tokens=1)}, "stop_token_ids"),
        ({"sampling": SamplingParams(allowed_token_ids=(100,), max_tokens=1)}, "allowed_token_ids"),
        ({"sampling": SamplingParams(logit_bias={100: 1.0}, max_tokens=1)}, "logit_bias"),
        ({"sampling": SamplingParams(bad_words_token_ids=((),), max_tokens=1)}, "bad_words"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_message(msgspec.structs.replace(GOOD, **changes), LIMITS)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"),
    [(15, 1, True), (15, 2, False), (12, 4, True), (12, 5, False), (15, None, True), (16, None, False), (17, 1, False)],
)
def test_prompt_and_output_share_the_context(num_prompt: int, max_tokens: int | None, fits: bool) -> None:
    message = AddRequest("r", [1] * num_prompt, SamplingParams(max_tokens=max_tokens), ())
    if fits:
        check_message(message, LIMITS)
        assert to_request(message, LIMITS, "m").num_prompt_tokens == num_prompt
    else:
        with pytest.raises(ContextTooLong, match="context is 16"):
            check_message(message, LIMITS)

"""A whole core with a random model: resumed after any number of its tokens, an answer goes on as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import AddRequest, RequestOutput
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.small_model import write_small_model

PROMPT = [70, 71, 72, 70, 71, 73, 90] * 4
EOS = (1, 20, 21, 22, 23)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=7, max_tokens=14, logprobs=2),
    "nucleus": SamplingParams(temperature=1.5, seed=8, top_p=0.6, top_k=90, max_tokens=14),
    "min_p": SamplingParams(temperature=2.0, seed=9, min_p=0.05, max_tokens=14),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.8, max_tokens=14),
    "presence": SamplingParams(temperature=0.7, seed=10, presence_penalty=1.5, frequency_penalty=0.9, max_tokens=14),
    "min_tokens": SamplingParams(
        temperature=1.0, seed=12, min_tokens=9, stop_token_ids=tuple(range(100, 300)), max_tokens=14
    ),
    "stop": SamplingParams(temperature=1.0, seed=13, stop_token_ids=tuple(range(150, 180)), max_tokens=40),
    "bias": SamplingParams(
        temperature=1.0, seed=14, logit_bias={30: 6.0, 31: 5.0}, bad_words_token_ids=((30, 31),), max_tokens=14
    ),
}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    folder = str(write_small_model(tmp_path_factory.mktemp("small") / "model"))
    config = EngineConfig(
        model=ModelConfig(model=folder, load_format="dummy", dtype="float32", num_threads=1, max_model_len=128),
        cache=CacheConfig(num_kv_blocks=24),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=48),
    )
    made, _ = build_core(config)
    yield made
    made.shutdown()


def run(core: EngineCore, messages: list[AddRequest]) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {message.request_id: [] for message in messages}
    for message in messages:
        outputs[message.request_id] += core.add(message)
    while core.has_work:
        for output in core.step():
            outputs[output.request_id].append(output)
    core.check_integrity()
    return outputs


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_rest_is_the_same_wherever_it_was_cut(core: EngineCore, name: str) -> None:
    sampling = SAMPLINGS[name]
    whole = run(core, [AddRequest("whole", PROMPT, sampling, EOS)])["whole"]
    tokens = [token for output in whole for token in output.new_token_ids]
    cuts = range(len(tokens) + 1)
    rests = run(core, [AddRequest(f"{k}", PROMPT, sampling, EOS, resumed_token_ids=tokens[:k]) for k in cuts])
    for k in cuts:
        rest = rests[f"{k}"]
        assert [token for output in rest for token in output.new_token_ids] == tokens[k:]
        assert (rest[-1].finish_reason, rest[-1].stop_token_id) == (whole[-1].finish_reason, whole[-1].stop_token_id)
        if sampling.logprobs is not None and k < len(tokens):
            scored = [entry.logprobs for output in rest for entry in output.logprobs or ()]
            expected = [entry.logprobs for output in whole[k:] for entry in output.logprobs or ()]
            assert [pytest.approx(entry, abs=1e-4) for entry in expected] == scored
    assert core.stats().kv_usage == 0


def test_the_answers_differ_from_each_other(core: EngineCore) -> None:
    """Else the test above would say little."""
    messages = [AddRequest(name, PROMPT, sampling, EOS) for name, sampling in SAMPLINGS.items()]
    answers = run(core, messages)
    assert len({tuple(token for output in answer for token in output.new_token_ids) for answer in answers.values()}) > 6
    assert {answer[-1].finish_reason for answer in answers.values()} == {"stop", "length"}

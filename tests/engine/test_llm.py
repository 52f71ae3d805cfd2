"""The offline door, on a tiny model with random weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine import LLM, RequestOutput, SamplingParams
from pagefleet_engine.engine_core.garbage import GarbageSchedule
from pagefleet_engine.errors import ConfigError, ContextTooLong, InvalidRequest, ModelLoadError
from pagefleet_engine.llm_keywords import known_settings

from tests.fakes.offline_core import core_of
from tests.fakes.small_model import CONTEXT, VOCAB_SIZE, write_small_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


def load(folder: Path, **settings: Any) -> LLM:
    defaults = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 8, "device": "cpu"}
    return LLM(str(folder), **{**defaults, **settings})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with load(folder) as llm:
        yield llm


def token_ids(results: list[RequestOutput]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


def test_every_form_of_a_prompt_gives_the_same(llm: LLM) -> None:
    (first,) = llm.generate("the quick", GREEDY)
    assert first.prompt == "the quick"
    assert first.finished
    ids = first.prompt_token_ids
    forms: list[Any] = [{"prompt": "the quick"}, {"prompt_token_ids": ids}, ids, [ids], ["the quick"]]
    for form in forms:
        (result,) = llm.generate(form, GREEDY)
        assert result.outputs[0].token_ids == first.outputs[0].token_ids
        assert result.outputs[0].text == first.outputs[0].text


def test_results_are_in_order_whatever_ends_first(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    results = llm.generate(["a", "b", "c"], params)
    assert [len(result.outputs[0].token_ids) for result in results] == [9, 1, 5]
    assert [result.outputs[0].finish_reason for result in results] == ["length"] * 3
    assert len({result.request_id for result in results}) == 3


def test_text_is_the_tokens_decoded(llm: LLM) -> None:
    (result,) = llm.generate("fox", GREEDY)
    output = result.outputs[0]
    whole = llm.get_tokenizer().decode(result.prompt_token_ids + output.token_ids, skip_special_tokens=True)
    assert whole == "fox" + output.text


def test_more_prompts_than_seats(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [3 + n]} for n in range(30)]
    together = token_ids(llm.generate(prompts, GREEDY))
    alone = [token_ids(llm.generate(prompt, GREEDY))[0] for prompt in prompts[::10]]
    assert together[::10] == alone


def test_n_outputs_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    runs = [llm.generate("the", params)[0].outputs for _ in range(2)]
    assert [output.index for output in runs[0]] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in runs[0]}) == 3
    assert [o.token_ids for o in runs[0]] == [o.token_ids for o in runs[1]]


def test_logprobs_have_the_shape_that_scripts_expect(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (result,) = llm.generate("the quick", params)
    output = result.outputs[0]
    assert output.logprobs is not None
    assert result.prompt_logprobs is not None
    for token, position in zip(output.token_ids, output.logprobs, strict=True):
        assert position[token].rank == 1
        assert len(position) == 2
    assert output.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for token, position in zip(output.token_ids, output.logprobs, strict=True))
    )
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    second = result.prompt_logprobs[1]
    assert second is not None
    assert second[result.prompt_token_ids[1]].logprob < 0


def test_without_logprobs_there_are_none(llm: LLM) -> None:
    (result,) = llm.generate("the", GREEDY)
    output = result.outputs[0]
    assert (output.logprobs, output.cumulative_logprob, result.prompt_logprobs) == (None, None, None)


def test_a_stop_string_ends_one_request_and_not_the_others(llm: LLM) -> None:
    reference = llm.generate("the", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0].text
    stop = reference[3:5]
    stopping = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=(stop,))
    stopped, other = llm.generate(["the", "fox"], [stopping, GREEDY])
    assert stopped.outputs[0].text == reference[: reference.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert len(other.outputs[0].token_ids) == 6


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(conversation, GREEDY)
    rendered = llm.get_tokenizer().apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    (plain,) = llm.generate(rendered, GREEDY)
    assert result.prompt == rendered
    assert result.prompt_token_ids == plain.prompt_token_ids
    assert result.outputs[0].token_ids == plain.outputs[0].token_ids
    assert len(llm.chat([conversation, conversation], GREEDY)) == 2


def test_a_repeated_prompt_comes_from_the_prefix_cache(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(5, 45))}
    llm.reset_prefix_cache()
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_max_tokens_beyond_the_context_end_with_length(llm: LLM) -> None:
    (result,) = llm.generate({"prompt_token_ids": [5] * (CONTEXT - 4)}, SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 4
    assert result.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ({"prompt_token_ids": [5] * CONTEXT}, ContextTooLong),
        ({"prompt_token_ids": []}, InvalidRequest),
        ({"prompt_token_ids": [VOCAB_SIZE]}, InvalidRequest),
        ({"image": 1}, InvalidRequest),
        ({"prompt": "fine", "multi_modal_data": {"image": 1}}, InvalidRequest),
        ({"prompt": "fine", "prompt_token_ids": None, "oops": 1}, InvalidRequest),
    ],
)
def test_a_wrong_prompt_runs_nothing(llm: LLM, prompt: dict[str, Any], error: type[InvalidRequest]) -> None:
    with pytest.raises(error):
        llm.generate([{"prompt": "fine"}, prompt], GREEDY)
    assert len(llm.generate("fine", GREEDY)) == 1


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 entries for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])


def test_garbage_is_collected_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled_in_steps, collections = set(), []
    step = core_of(llm).step

    def watched_step() -> list[Any]:
        enabled_in_steps.add(gc.isenabled())
        return step()

    monkeypatch.setattr(core_of(llm), "step", watched_step)
    monkeypatch.setattr(GarbageSchedule, "between_steps", lambda _: collections.append(gc.isenabled()))
    llm.generate("between two steps", SamplingParams(max_tokens=5, ignore_eos=True))
    assert enabled_in_steps == {False}
    assert len(collections) >= 5
    assert gc.isenabled()


def test_an_interrupted_run_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(llm)
    monkeypatch.setattr(core, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate("x", GREEDY)
    monkeypatch.undo()
    assert not core.has_work
    assert core.stats().kv_usage == 0


def test_without_a_tokenizer(folder: Path) -> None:
    with load(folder, skip_tokenizer_init=True) as llm:
        (result,) = llm.generate([3, 4], GREEDY)
        assert (result.prompt, result.outputs[0].text) == (None, "")
        with pytest.raises(InvalidRequest, match="Without a tokenizer"):
            llm.generate("text", GREEDY)
        with pytest.raises(InvalidRequest, match="Without a tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])


def test_a_folder_without_a_tokenizer_serves_token_ids(
    make_checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with load(make_checkpoint("llama")) as llm:
        (result,) = llm.generate([3, 4], GREEDY)
    assert result.outputs[0].token_ids
    assert "holds no tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"max_model_length": 5}, "did you mean max_model_len"),
        ({"enable_lora": True}, "enable_lora=True is not supported: adapters are not served, merge them"),
        ({"max_loras": 2, "max_lora": 2}, "no setting 'max_lora'$"),
        ({"port": 8000}, "no setting 'port'"),
        ({"served_model_name": ["a"], "uds": "/tmp/x"}, "uds=/tmp/x is not supported: the server listens"),
    ],
)
def test_unknown_keywords_are_refused_before_anything_loads(keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        LLM("/no/such/folder", **keywords)


def test_keywords_of_vllm_that_ask_for_nothing_are_taken() -> None:
    with pytest.raises(ModelLoadError, match="no such folder"):
        LLM("/no/such/folder", tensor_parallel_size=1, enforce_eager=True, trust_remote_code=True, hf_overrides={})
    with pytest.raises(ModelLoadError, match="no such folder"):
        LLM("/no/such/folder", seed=None, tokenizer=None, max_num_seqs=None, dtype=torch.bfloat16)


def test_keywords_of_vllm_mean_settings_by_other_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert known_settings(
        {
            "kv_cache_memory_bytes": 2**20,
            "enforce_eager": True,
            "cudagraph_capture_sizes": [1, 2],
            "quantization": "compressed-tensors",
            "disable_log_stats": False,
        }
    ) == {"kv_cache_memory": 2**20, "cuda_graphs": "none", "cuda_graph_sizes": "1,2"}
    assert "nothing changes by quantization, disable_log_stats" in caplog.text


def test_parameters_take_the_none_of_vllm_s_defaults() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, allowed_token_ids=None)  # type: ignore[arg-type]
    assert params == SamplingParams()
    assert SamplingParams(stop="x", bad_words=["a", "b"]).stop == ("x",)  # type: ignore[arg-type]


def test_a_template_of_one_s_own(llm: LLM) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (result,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, chat_template=template)
    assert result.prompt == "[hi]"
    with pytest.raises(InvalidRequest, match="damaged"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, chat_template="{% if %}")


def test_a_context_over_the_model_s_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="made for 256"):
        load(folder, max_model_len=1000)

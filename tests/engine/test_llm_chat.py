"""Conversations offline are rendered and held to forms as the server does it; recommended sampling is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine import LLM, SamplingParams, StructuredOutputsParams
from pagefleet_engine.config import EngineConfig, ModelConfig, ServerConfig
from pagefleet_engine.errors import ConfigError, InvalidRequest
from pagefleet_engine.server.assembly import request_rules
from pagefleet_protocol.openai_chat import read_chat_request

from tests.fakes.small_model import write_small_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "<think>{% if enable_thinking is defined and enable_thinking is false %}</think>{% endif %}"
)
RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5, "do_sample": True}


def write(folder: Path, template: str | None = None, recommended: dict[str, Any] | None = None) -> Path:
    write_small_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))  # tools are long
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if recommended is not None:
        (folder / "generation_config.json").write_text(json.dumps(recommended))
    return folder


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), load_format="dummy", dtype="float32", num_kv_blocks=80, device="cpu", **settings)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load(write(tmp_path_factory.mktemp("model"), recommended=RECOMMENDED)) as llm:
        yield llm


def prompt(llm: LLM, messages: list[dict[str, Any]], **more: Any) -> str:
    (result,) = llm.chat(messages, GREEDY, **more)
    assert result.prompt is not None
    return result.prompt


def test_the_last_message_goes_on(llm: LLM) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt(llm, messages, **more).endswith("<|im_start|>assistant\nWell, ")
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages, GREEDY, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_template_without_tools_gets_those_of_the_server(llm: LLM) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages: list[dict[str, Any]] = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    text = prompt(llm, messages, tools=[TOOL])
    assert '"name": "weather"' in text
    assert '{"city": "Bern"}' in text, "arguments are an object to the template"
    assert "rain" in text
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(HI, GREEDY, tools=[TOOL, TOOL])
    assert caught.value.param == "tools[1].function.name"


def test_names_for_the_template(llm: LLM) -> None:
    template = "{{ mood }}: {{ messages[0].content }}"
    assert prompt(llm, HI, chat_template=template, chat_template_kwargs={"mood": "glad"}) == "glad: hi"
    with pytest.raises(InvalidRequest, match="it is not for the template to know"):
        llm.chat(HI, GREEDY, chat_template_kwargs={"messages": []})


def test_a_form_begins_after_the_thought(tmp_path: Path) -> None:
    form = SamplingParams(
        temperature=0.0, max_tokens=6, structured_outputs=StructuredOutputsParams(choice=("ab", "cd"))
    )
    with load(write(tmp_path, THINKS)) as llm:
        (thinking,), (silent,) = llm.chat(HI, form), llm.chat(HI, form, chat_template_kwargs={"enable_thinking": False})
        assert silent.outputs[0].text in ("ab", "cd")
        assert thinking.outputs[0].finish_reason == "length", "it thinks on"
        assert not thinking.outputs[0].text.startswith(("ab", "cd"))
        (completed,) = llm.generate("x", form)
        assert completed.outputs[0].text in ("ab", "cd")


def test_who_says_nothing_gets_what_the_makers_recommend(llm: LLM, tmp_path: Path) -> None:
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=5)
    assert llm.get_default_sampling_params() == expected
    for results in (llm.generate("x"), llm.chat(HI)):
        assert len(results[0].outputs[0].token_ids) <= 5
    folder = write(tmp_path, recommended=RECOMMENDED)
    rules = request_rules(EngineConfig(model=ModelConfig(model="m")), ServerConfig(), folder)
    assert read_chat_request({"model": "m", "messages": HI}, rules).sampling == expected


@pytest.mark.parametrize("word", ["vllm", "none"])
def test_recommendations_are_ignored_on_demand(word: str, tmp_path: Path) -> None:
    with load(write(tmp_path, recommended=RECOMMENDED), generation_config=word) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_recommendations_of_another_folder(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match="takes auto, vllm or a folder"):
        load(write(tmp_path / "model", recommended=RECOMMENDED), generation_config=str(other))
    (other / "generation_config.json").write_text('{"temperature": 0.2}')
    with load(tmp_path / "model", generation_config=str(other)) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.2)
    (other / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match="Invalid 'top_p'"):
        load(tmp_path / "model", generation_config=str(other))

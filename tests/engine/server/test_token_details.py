"""What an answer tells of tokens: their ids, names by id, the prompt's log-probabilities, streamed and whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.config import EngineConfig, ModelConfig, ServerConfig
from pagefleet_engine.core.admission import ModelLimits, check_sampling
from pagefleet_engine.errors import ConfigError, InvalidRequest
from pagefleet_engine.server.assembly import request_rules
from pagefleet_protocol.openai_chat import read_chat_request
from pagefleet_protocol.openai_common import RequestRules
from pagefleet_protocol.openai_completions import read_completion_request
from pagefleet_protocol.sampling_params import SamplingParams

from tests.engine.server.test_continuation import check_every_cut
from tests.fakes.stream_site import ROUTES, TEXT, TOKENIZER, Site, blocks_of, script_of, scripted

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


async def whole(site: Site, route: str, **fields: Any) -> dict[str, Any]:
    body = json.loads(site.fields(route, **fields))
    answer = await site.send(route, json.dumps({**body, "stream": False}).encode())
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def events(site: Site, route: str, **fields: Any) -> list[dict[str, Any]]:
    answer = await site.send(route, site.fields(route, **fields))
    assert answer.status_code == 200, answer.text
    return [json.loads(block[6:]) for block in blocks_of(answer.content)[:-1]]


@pytest.mark.parametrize("route", ROUTES)
def test_ids_of_tokens(route: str) -> None:
    async def test(site: Site) -> None:
        told = await whole(site, route, return_token_ids=True, max_tokens=7)
        choice = told["choices"][0]
        prompt = TOKENIZER.encode(site.prompt if "chat" not in route else f"user: {site.prompt}\nassistant: ")
        assert choice["token_ids"] == script_of(TEXT)[:7]
        assert (told if "chat" in route else choice)["prompt_token_ids"] == prompt
        streamed = await events(site, route, return_token_ids=True, max_tokens=7)
        ids = [token for event in streamed for c in event["choices"] for token in c.get("token_ids", ())]
        assert ids == script_of(TEXT)[:7]
        first = streamed[0] if "chat" in route else streamed[0]["choices"][0]
        assert first["prompt_token_ids"] == prompt
        assert sum("prompt_token_ids" in json.dumps(event) for event in streamed) == 1
        plain = await whole(site, route, max_tokens=7)
        assert "token_ids" not in json.dumps(plain)
        await check_every_cut(site, route, return_token_ids=True, max_tokens=7, n=2)

    scripted(test)


@pytest.mark.parametrize("route", ROUTES)
def test_names_by_id_leave_offsets_as_they_are(route: str) -> None:
    logprobs = {"logprobs": True, "top_logprobs": 1} if "chat" in route else {"logprobs": 1}

    async def test(site: Site) -> None:
        fields = {**logprobs, "max_tokens": 4}
        by_id, by_text = [
            (await whole(site, route, return_tokens_as_token_ids=flag, **fields))["choices"][0]["logprobs"]
            for flag in (True, False)
        ]
        names = [f"token_id:{token}" for token in script_of(TEXT)[:4]]
        if "chat" in route:
            assert [entry["token"] for entry in by_id["content"]] == names
            assert [entry["bytes"] for entry in by_id["content"]] == [entry["bytes"] for entry in by_text["content"]]
        else:
            assert by_id["tokens"] == names
            assert by_id["text_offset"] == by_text["text_offset"]

    scripted(test)


def test_requests_get_what_the_model_s_makers_recommend(tmp_path: Path) -> None:
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 99, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    engine = EngineConfig(model=ModelConfig(model="m"))
    rules = request_rules(engine, ServerConfig(), tmp_path)
    sampling = read_chat_request({**CHAT, "top_p": 0.5}, rules).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.6, 20, 0.5, 99)
    assert read_chat_request({**CHAT, "max_tokens": 5}, rules).sampling.max_tokens == 5
    assert read_completion_request({"model": "m", "prompt": "x"}, rules).sampling.max_tokens == 16
    for word in ("vllm", "none"):
        ignoring = EngineConfig(model=ModelConfig(model="m", generation_config=word))
        assert request_rules(ignoring, ServerConfig(), tmp_path) == RequestRules()
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ConfigError, match=r"generation_config.json: Invalid 'temperature'.*--generation-config none"):
        request_rules(engine, ServerConfig(), tmp_path)


def test_more_alternatives_than_twenty_where_the_operator_allows_them() -> None:
    limits = ModelLimits(100, 50, max_logprobs=30)
    check_sampling(SamplingParams(logprobs=30, prompt_logprobs=30), limits)
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(SamplingParams(logprobs=31), limits)
    assert caught.value.param == "logprobs"
    check_sampling(SamplingParams(logprobs=50), ModelLimits(100, 50, max_logprobs=-1))
    with pytest.raises(InvalidRequest):
        read_chat_request({**CHAT, "logprobs": True, "top_logprobs": -1}, RequestRules(max_logprobs=30))
    asked = read_chat_request({**CHAT, "logprobs": True, "top_logprobs": -1}, RequestRules(max_logprobs=-1))
    assert (asked.sampling.logprobs or 0) > 10**9, "more than any vocabulary has, until one is known"

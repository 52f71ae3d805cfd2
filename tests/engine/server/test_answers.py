"""What a client gets that makes no mistake."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.engine.server.conftest import MODEL, LiveServer
from tests.fakes.scripted_engine import MAX_MODEL_LEN, answer

CHAT_PROMPT = "user: Hello\nassistant: "


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream; `[DONE]` as text."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_completion(server: LiveServer) -> None:
    body = server.complete().json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    choice = {
        "index": 0,
        "text": answer("Hello", 4),
        "finish_reason": "length",
        "logprobs": None,
        "stop_reason": None,
        "prompt_logprobs": None,
    }
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body == {"model": MODEL, "object": "text_completion", "choices": [choice], "usage": usage}


def test_a_chat_completion(server: LiveServer) -> None:
    body = server.chat().json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"content": answer(CHAT_PROMPT, 4), "role": "assistant", "refusal": None},
            "finish_reason": "length",
            "logprobs": None,
            "stop_reason": None,
        }
    ]


def test_defaults_of_max_tokens(server: LiveServer) -> None:
    completion = server.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"}).json()
    assert completion["usage"]["completion_tokens"] == 16
    messages = [{"role": "user", "content": "Hello"}]
    chat = server.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}).json()
    assert chat["usage"]["total_tokens"] == MAX_MODEL_LEN


def test_max_completion_tokens_wins(server: LiveServer) -> None:
    assert server.chat(max_tokens=9, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("length", [MAX_MODEL_LEN - 1, MAX_MODEL_LEN])
def test_a_prompt_leaves_room_for_one_token(server: LiveServer, length: int) -> None:
    response = server.complete(prompt=[65] * length, max_tokens=1)
    assert response.status_code == (200 if length < MAX_MODEL_LEN else 400)


def test_prompts_keep_their_order_and_n_its_seeds(server: LiveServer) -> None:
    body = server.complete(prompt=["What", "How"], n=2, seed=11, temperature=1.0).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    wanted = [answer("What", 4, 11), answer("What", 4, 12), answer("How", 4, 11), answer("How", 4, 12)]
    assert [choice["text"] for choice in body["choices"]] == wanted
    assert body["usage"]["prompt_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 16
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize("prompt", [[72, 105], [[72, 105], [72]]])
def test_token_ids_as_prompts(server: LiveServer, prompt: list[Any]) -> None:
    body = server.complete(prompt=prompt, echo=True).json()
    assert body["choices"][0]["text"] == "Hi" + answer("Hi", 4)
    assert len(body["choices"]) == (2 if isinstance(prompt[0], list) else 1)


def test_chat_stream_events(server: LiveServer) -> None:
    *chunks, done = events(server.chat(stream=True))
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == answer(CHAT_PROMPT, 4)
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert choices[-1] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }


def test_completion_stream_events(server: LiveServer) -> None:
    *chunks, done = events(server.complete(stream=True, echo=True))
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "Hello" + answer("Hello", 4)
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "length"]


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_in_a_stream(server: LiveServer, continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *chunks, last, _ = events(server.complete(stream=True, stream_options=options))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 9
    seen = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert seen == ([1, 2, 3, 4] if continuous else [None] * 4)


def test_a_stream_of_several_choices(server: LiveServer) -> None:
    whole = server.complete(prompt=["What", "How"], n=2, seed=3).json()
    *chunks, _ = events(server.complete(prompt=["What", "How"], n=2, seed=3, stream=True))
    texts = ["", "", "", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_stop_is_left_out(server: LiveServer) -> None:
    free = answer("Hello", 40)
    choice = server.complete(max_tokens=40, stop=[free[4:7]]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (free[:4], "stop", free[4:7])
    *chunks, _ = events(server.complete(max_tokens=40, stop=free[4:7], stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == free[:4]
    assert chunks[-1]["choices"][0]["stop_reason"] == free[4:7]


def test_chat_logprobs(server: LiveServer) -> None:
    content = server.chat(logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
    text = answer(CHAT_PROMPT, 4)
    assert [entry["token"] for entry in content] == list(text)
    assert content[0]["bytes"] == [ord(text[0])]
    assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in content] == [[-0.5, -1.5, -2.5]] * 4
    *chunks, _ = events(server.chat(logprobs=True, stream=True))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks[1:-1]]
    assert [entry["content"][0]["token"] for entry in streamed] == list(text)
    assert all(entry["content"][0]["top_logprobs"] == [] for entry in streamed)


def test_completion_logprobs_with_echo(server: LiveServer) -> None:
    logprobs = server.complete(prompt="Hi", echo=True, logprobs=2, n=2, seed=1).json()["choices"][1]["logprobs"]
    assert logprobs["tokens"] == list("Hi" + answer("Hi", 4, 2))
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert logprobs["token_logprobs"] == [None, *[-0.5] * 5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"i": -0.5, "j": -1.5}


def test_streamed_completion_logprobs_have_running_offsets(server: LiveServer) -> None:
    *chunks, _ = events(server.complete(logprobs=0, stream=True))
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry["text_offset"] for entry in logprobs] == [[0], [1], [2], [3]]
    assert all(entry["top_logprobs"] is None for entry in logprobs)


def test_prompt_logprobs_in_vllms_shape(server: LiveServer) -> None:
    on_completion = server.complete(prompt="abc", prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"]
    assert on_completion == [
        None,
        {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}},
        {"99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"}},
    ]
    on_chat = server.chat(prompt_logprobs=0).json()["prompt_logprobs"]
    assert len(on_chat) == len(CHAT_PROMPT)


def test_messages_reach_the_template(server: LiveServer) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    server.chat(messages=messages)
    prompt = bytes(server.engine.seen[-1][1]).decode()
    assert prompt == "system: Be brief.\nuser: one\ntwo\nassistant: "
    server.chat(messages=messages[1:], add_generation_prompt=False)
    assert bytes(server.engine.seen[-1][1]).decode() == "user: one\ntwo\n"


def test_sampling_fields_reach_the_engine(server: LiveServer) -> None:
    server.complete(
        temperature=1e-9, top_p=0.5, top_k=7, min_p=0.1, presence_penalty=1, frequency_penalty=-1, seed=5,
        repetition_penalty=1.5, min_tokens=2, stop_token_ids=[3], ignore_eos=True, logit_bias={"7": -3},
        allowed_token_ids=[1, 2], bad_words=["x"], include_stop_str_in_output=True, skip_special_tokens=False,
        priority=-4, cache_salt="tenant-1",
    )  # fmt: skip
    _, _, sampling, priority, salt = server.engine.seen[-1]
    assert (priority, salt) == (-4, "tenant-1")
    assert sampling.temperature == 0.01
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 7, 0.1, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (2, (3,), True)
    assert (sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words) == ({7: -3.0}, (1, 2), ("x",))
    assert (sampling.include_stop_str_in_output, sampling.skip_special_tokens, sampling.n) == (True, False, 1)
    server.complete(temperature=0)
    assert server.engine.seen[-1][2].greedy


def test_null_means_default(server: LiveServer) -> None:
    nulls = dict.fromkeys(["temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "presence_penalty"])
    response = server.complete(**nulls)
    assert response.status_code == 200
    assert server.engine.seen[-1][2].temperature == 1.0


def test_tokenize_and_back(server: LiveServer) -> None:
    body = server.http.post("/tokenize", json={"model": MODEL, "prompt": "Hi"}).json()
    assert body == {"count": 2, "max_model_len": MAX_MODEL_LEN, "tokens": [72, 105]}
    assert server.http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "Hi"}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    chat = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hello"}]}).json()
    assert bytes(chat["tokens"]).decode() == CHAT_PROMPT
    assert server.http.post("/tokenize", json={"prompt": "x" * 5000}).json()["count"] == 5000


def test_the_official_client(server: LiveServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).created == 1_700_000_000
    whole = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=8)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == answer(CHAT_PROMPT, 8)
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8


def test_the_official_client_understands_errors(server: LiveServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert (refused.value.param, refused.value.code) == ("temperature", "decimal_above_max_value")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nope", prompt="x")
    assert unknown.value.code == "model_not_found"

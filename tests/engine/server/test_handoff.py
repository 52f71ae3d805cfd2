"""Prompt tokens and salts that a router hands over, honest ones and others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.server.access import NOBODY
from pagefleet_engine.server.handoff import HandoffHead, NoTransfers, open_body, read_head
from pagefleet_protocol.handoff import CACHE_SALT, PROMPT_TOKENS, STREAM, Shown, StreamState, pack_tokens, tenant_salt
from starlette.datastructures import Headers

from tests.engine.server.conftest import MODEL, LiveServer
from tests.fakes.scripted_engine import MAX_MODEL_LEN, VOCAB_SIZE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": MODEL, "prompt": "Hello", "max_tokens": 3, "temperature": 0},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0},
}
Extra = dict[str, str] | list[tuple[str, str]]


def hand(server: LiveServer, path: str, data: bytes, headers: Extra) -> httpx.Response:
    pairs = [("content-type", "application/json"), *(headers.items() if isinstance(headers, dict) else headers)]
    return server.http.post(path, content=data, headers=pairs)


def hand_tokens(server: LiveServer, path: str, ids: Sequence[int], **fields: Any) -> httpx.Response:
    data = json.dumps({**BODIES[path], **fields}).encode() + pack_tokens(ids)
    return hand(server, path, data, {PROMPT_TOKENS: str(len(ids))})


def refused(answer: httpx.Response, code: str, param: str | None = None) -> bool:
    error = answer.json()["error"]
    return bool(answer.status_code == 400 and (error["code"], error["param"]) == (code, param))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_ids_of_a_router_are_the_prompt(server: LiveServer, path: str) -> None:
    answer = hand_tokens(server, path, [5, 0, VOCAB_SIZE - 1])
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 3
    assert server.engine.seen[-1][1] == [5, 0, VOCAB_SIZE - 1]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_ids_that_the_server_would_make_change_nothing(server: LiveServer, path: str) -> None:
    plain = server.http.post(path, json=BODIES[path]).json()
    handed = hand_tokens(server, path, server.engine.seen[-1][1]).json()
    for answer in (plain, handed):
        del answer["id"], answer["created"]
    assert handed == plain


def test_an_echo_is_the_text_that_the_client_sent(server: LiveServer) -> None:
    answer = hand_tokens(server, COMPLETIONS, list(b"Hello"), echo=True)
    assert answer.json()["choices"][0]["text"].startswith("Hello")


def test_a_long_body_is_taken_apart_too(server: LiveServer) -> None:
    answer = hand_tokens(server, COMPLETIONS, [7] * 10, prompt="x" * 100_000)
    assert answer.status_code == 200, "the ids stand for the text, which nobody counts again"
    assert server.engine.seen[-1][1] == [7] * 10


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("bad", [VOCAB_SIZE, 2**31, 2**32 - 1])
def test_ids_out_of_the_vocabulary_are_refused(server: LiveServer, path: str, bad: int) -> None:
    before = len(server.engine.seen)
    param = "prompt" if path == COMPLETIONS else "messages"
    assert refused(hand_tokens(server, path, [1, bad, 2]), "token_id_out_of_range", param)
    assert len(server.engine.seen) == before


def test_prompts_of_ids_have_the_limits_of_any_other(server: LiveServer) -> None:
    assert refused(hand_tokens(server, COMPLETIONS, []), "empty_prompt", "prompt")
    assert refused(hand_tokens(server, CHAT, [1] * MAX_MODEL_LEN), "context_length_exceeded", "messages")
    assert hand_tokens(server, CHAT, [1] * (MAX_MODEL_LEN - 1), max_tokens=1).status_code == 200


@pytest.mark.parametrize("prompt", [["a"], ["a", "b"], [1, 2], [[1], [2]]])
def test_ids_stand_for_one_text_only(server: LiveServer, prompt: Any) -> None:
    answer = hand_tokens(server, COMPLETIONS, [1, 2], prompt=prompt)
    assert answer.status_code == 200 if prompt == ["a"] else refused(answer, "invalid_handoff")


@pytest.mark.parametrize("num", ["-1", "+1", "1.0", "0x1", "1 1", "1e3", "x", "", "٣", "9" * 9, "9" * 5000])
def test_a_number_of_ids_that_is_none(server: LiveServer, num: str) -> None:
    data = json.dumps(BODIES[CHAT]).encode() + pack_tokens([1])
    answer = server.http.post(
        CHAT, content=data, headers=[(b"content-type", b"application/json"), (PROMPT_TOKENS.encode(), num.encode())]
    )
    assert refused(answer, "invalid_handoff")


@pytest.mark.parametrize("num", [2, 1000, 16 * 1024 * 1024, 99_999_999])
def test_lengths_that_lie(server: LiveServer, num: int) -> None:
    data = json.dumps(BODIES[CHAT]).encode() + pack_tokens([1])
    answer = hand(server, CHAT, data, {PROMPT_TOKENS: str(num)})
    assert answer.status_code == 400, "either the body is too short, or what is left of the JSON is none"
    assert server.chat().status_code == 200


def test_ids_that_nobody_announces_are_no_json(server: LiveServer) -> None:
    data = json.dumps(BODIES[CHAT]).encode() + pack_tokens([1])
    assert hand(server, CHAT, data, {}).status_code == 400
    assert hand(server, CHAT, data + b"\0\0\0\0", {PROMPT_TOKENS: "1"}).status_code == 400
    assert hand(server, CHAT, data[:-1], {PROMPT_TOKENS: "1"}).status_code == 400


@pytest.mark.parametrize("name", [PROMPT_TOKENS, CACHE_SALT, STREAM])
def test_a_header_that_comes_twice_is_refused(server: LiveServer, name: str) -> None:
    data = json.dumps(BODIES[CHAT]).encode() + pack_tokens([1])
    assert refused(hand(server, CHAT, data, [(name, "1"), (name, "1")]), "invalid_handoff")


def test_ids_count_as_bytes_of_the_body(server: LiveServer) -> None:
    limit = 2 * 1024 * 1024
    data = json.dumps(BODIES[CHAT]).encode() + bytes(limit)
    answer = hand(server, CHAT, data, {PROMPT_TOKENS: str(limit // 4)})
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_other_routes_take_no_hand_off(server: LiveServer, path: str) -> None:
    data = json.dumps({"prompt": "x", "tokens": [1]}).encode()
    assert hand(server, path, data, {PROMPT_TOKENS: "nonsense"}).status_code == 200
    assert hand(server, path, data + pack_tokens([1]), {PROMPT_TOKENS: "1"}).status_code == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("clients", [None, "mine"])
def test_the_tenant_s_salt_joins_the_client_s(server: LiveServer, path: str, clients: str | None) -> None:
    salt = tenant_salt("team a")
    body = {**BODIES[path], **({} if clients is None else {"cache_salt": clients})}
    assert hand(server, path, json.dumps(body).encode(), {CACHE_SALT: salt}).status_code == 200
    assert server.engine.seen[-1][4] == (salt if clients is None else f"{salt}/{clients}")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("salt", ["", "a/b", "a b", "x" * 257, "tenant;", "ü"])
def test_a_salt_that_no_router_sends_is_refused(server: LiveServer, path: str, salt: str) -> None:
    before = len(server.engine.seen)
    answer = server.http.post(
        path,
        content=json.dumps(BODIES[path]),
        headers=[(b"content-type", b"application/json"), (CACHE_SALT.encode(), salt.encode())],
    )
    assert refused(answer, "invalid_handoff")
    assert len(server.engine.seen) == before


def test_a_client_s_salt_cannot_look_like_a_tenant_s_and_his(server: LiveServer) -> None:
    body = {**BODIES[CHAT], "cache_salt": tenant_salt("team a") + "/mine"}
    assert refused(hand(server, CHAT, json.dumps(body).encode(), {}), "invalid_value", "cache_salt")


@given(
    json_=st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    prompt=st.lists(st.integers(0, 2**32 - 1), max_size=5),
    generated=st.lists(st.integers(0, 2**32 - 1), max_size=5),
)
def test_a_body_is_split_as_it_was_put_together(json_: dict[str, int], prompt: list[int], generated: list[int]) -> None:
    state = StreamState("0" * 32, 1, (Shown(len(generated), 9), Shown()))
    head = read_head(Headers({PROMPT_TOKENS: str(len(prompt)), STREAM: state.encode()}), NoTransfers(), NOBODY)
    data = json.dumps(json_).encode() + pack_tokens(prompt) + pack_tokens(generated)
    handed = open_body(data, head, dict)
    assert (handed.body, handed.prompt_ids, handed.generated_ids, handed.head.stream) == (
        json_,
        prompt,
        generated,
        state,
    )


@given(data=st.binary(max_size=64), num_prompt=st.integers(0, 99_999_999), num_generated=st.integers(0, 999_999_999))
def test_whatever_the_numbers_a_short_body_is_the_sender_s_mistake(
    data: bytes, num_prompt: int, num_generated: int
) -> None:
    head = HandoffHead(num_prompt, StreamState("0" * 32, 1, (Shown(num_generated),)))
    if 4 * (num_prompt + num_generated) > len(data):
        with pytest.raises(InvalidRequest) as caught:
            open_body(data, head, dict)
        assert caught.value.code == "invalid_handoff"


def test_generated_ids_alone_leave_the_prompt_in_the_body() -> None:
    handed = open_body(
        b"{}" + pack_tokens([4, 5]), HandoffHead(None, StreamState("0" * 32, 1, (Shown(1), Shown(1)))), dict
    )
    assert (handed.prompt_ids, handed.generated_ids) == (None, [4, 5])

"""The two legs of a P/D transfer over HTTP: what the engine is asked, what is answered, and who may ask."""

from __future__ import annotations

from typing import Any, get_args

import httpx
import pytest
from pagefleet_engine.errors import KVLoadFailed
from pagefleet_engine.server.access import NOBODY
from pagefleet_engine.server.handoff import NoTransfers, read_head
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_handoff import KV_FAULT, KV_TRANSFER, KvFault, KvTransfer, read_kv_fault
from starlette.datastructures import Headers

from tests.engine.server.conftest import FACTS, FLEET_KEY, MODEL, LiveServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": MODEL, "prompt": "Hello", "max_tokens": 3, "stream": True, "logprobs": 2},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "stream": True, "n": 2},
}
PREFILL = KvTransfer("prefill", "1" * 32, "b" * 32)
DECODE = KvTransfer("decode", "1" * 32, "b" * 32, "127.0.0.1:8102", "fail")


def signed(transfer: KvTransfer, key: FleetKey = FLEET_KEY, incarnation: str = FACTS.incarnation) -> dict[str, str]:
    return {KV_TRANSFER: transfer.encode(key, incarnation)}


def ask(server: LiveServer, path: str, headers: dict[str, str], **fields: Any) -> httpx.Response:
    return server.http.post(path, json={**BODIES[path], **fields}, headers=headers)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_prefill_leg_computes_the_prompt_and_one_token(server: LiveServer, path: str) -> None:
    answer = ask(server, path, signed(PREFILL))
    assert answer.status_code == 200
    _, prompt, sampling, _, _ = server.engine.seen[-1]
    assert answer.json() == {
        "transfer_id": PREFILL.transfer_id,
        "num_prompt_tokens": len(prompt),
        "num_cached_tokens": len(prompt) // 2,
    }
    assert (sampling.max_tokens, sampling.n, sampling.temperature, sampling.logprobs) == (1, 1, 0.0, None)
    assert server.engine.transfers[-1] == PREFILL


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_decode_leg_is_answered_as_ever(server: LiveServer, path: str) -> None:
    plain = ask(server, path, {}, stream=False, seed=1).json()
    answer = ask(server, path, signed(DECODE), stream=False, seed=1).json()
    assert answer["choices"] == plain["choices"]
    assert server.engine.transfers[-len(answer["choices"]) :] == [DECODE] * len(answer["choices"])


def test_a_salt_holds_in_the_prefill_leg_too(server: LiveServer) -> None:
    ask(server, CHAT, signed(PREFILL), cache_salt="mine")
    assert server.engine.seen[-1][4] == "mine"


@pytest.mark.parametrize(
    "headers",
    [
        signed(PREFILL, FleetKey(b"other" * 8)),
        signed(DECODE, incarnation="c" * 32),
        {KV_TRANSFER: "leg=prefill"},
        {KV_TRANSFER: ""},
    ],
)
def test_who_is_no_router_of_the_fleet_directs_nothing(server: LiveServer, headers: dict[str, str]) -> None:
    before = len(server.engine.seen)
    answer = ask(server, CHAT, headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_handoff")
    assert read_kv_fault(answer.headers[KV_FAULT]) == "not_believed"
    assert len(server.engine.seen) == before


def test_a_header_that_comes_twice_is_refused(server: LiveServer) -> None:
    pairs = [*signed(PREFILL).items(), *signed(DECODE).items()]
    answer = server.http.post(CHAT, json=BODIES[CHAT], headers=pairs)
    assert answer.status_code == 400


@pytest.mark.parametrize("transfer", [PREFILL, DECODE])
def test_a_transfer_is_of_one_prompt(server: LiveServer, transfer: KvTransfer) -> None:
    answer = ask(server, COMPLETIONS, signed(transfer), prompt=["a", "b"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_handoff")
    assert KV_FAULT not in answer.headers, "it is the request that is wrong"


def test_an_engine_without_p2p_says_so() -> None:
    with pytest.raises(Exception, match="engines with --kv-connector p2p, which this one is not"):
        read_head(Headers(signed(PREFILL)), NoTransfers(), NOBODY)


def test_clients_cannot_direct_transfers_in_the_body(server: LiveServer) -> None:
    answer = ask(server, CHAT, {}, kv_transfer_params={"do_remote_prefill": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")


def test_kv_that_did_not_come_is_a_503_that_routers_retry(server: LiveServer) -> None:
    server.engine.fail_after = (0, KVLoadFailed("The prompt's K/V did not come."))
    try:
        answer = ask(server, CHAT, signed(DECODE), n=1)
    finally:
        server.engine.fail_after = None
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "kv_load_failed")
    assert answer.headers["retry-after"] == "1"
    assert KV_FAULT not in answer.headers, "nobody knows why"


@pytest.mark.parametrize("fault", get_args(KvFault))
def test_the_answer_says_whose_doing_it_was(server: LiveServer, fault: KvFault) -> None:
    server.engine.fail_after = (0, KVLoadFailed("The prompt's K/V did not come.", fault))
    try:
        answer = ask(server, CHAT, signed(DECODE), stream=True)
    finally:
        server.engine.fail_after = None
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "kv_load_failed")
    assert read_kv_fault(answer.headers[KV_FAULT]) == fault

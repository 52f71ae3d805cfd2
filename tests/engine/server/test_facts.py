"""What routers learn of an engine: facts, text, and the headers on every answer."""

from __future__ import annotations

import json
import socket

import msgspec
import pytest
from pagefleet_engine.client.core_process import RunningCore
from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.engine_core.messages import Ready
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.server import operations as facts_module
from pagefleet_engine.server.operations import encoded_text, identity_headers, make_facts
from pagefleet_protocol import metric_names
from pagefleet_protocol.engine_facts import (
    FACTS_PATH,
    TEXT_PATH,
    KvTransferFacts,
    decode_facts,
    decode_text,
    encode_facts,
    text_digest,
)
from pagefleet_protocol.headers import INCARNATION
from pagefleet_protocol.headers import MODEL as MODEL_HEADER
from pagefleet_protocol.kube_names import RANK_PORTS_APART
from pagefleet_text.text_model import TextModel

from tests.engine.server.conftest import FACTS, MODEL, TEXT, TEXT_MODEL, LiveServer

READY = Ready(512, 300, 64, 16, "float32", scope="org/name")


def test_facts_are_told(server: LiveServer) -> None:
    answer = server.http.get(FACTS_PATH)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert decode_facts(answer.content) == FACTS


def test_text_is_told_and_makes_the_same_model(server: LiveServer) -> None:
    answer = server.http.get(TEXT_PATH)
    assert answer.content == TEXT
    assert answer.headers["etag"] == f'"{FACTS.text_digest}"'
    assert answer.headers["content-length"] == str(len(answer.content))
    assert text_digest(answer.content) == FACTS.text_digest
    text = TextModel.of_data(decode_text(answer.content))
    assert text.completion_tokens("The fox") == TEXT_MODEL.completion_tokens("The fox")


def test_text_comes_in_pieces(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "_PIECE_BYTES", 1000)
    assert server.http.get(TEXT_PATH).content == TEXT


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ('"{}"', 304),
        ('W/"{}"', 304),
        ('"other", "{}"', 304),
        ("*", 304),
        ("{}", 200),
        ('"other"', 200),
        ("", 200),
        ('"{}', 200),
        (",,,", 200),
    ],
)
def test_text_that_a_router_has_is_not_sent_again(server: LiveServer, given: str, status: int) -> None:
    header = given.format(FACTS.text_digest)
    answer = server.http.get(TEXT_PATH, headers={"if-none-match": header})
    assert answer.status_code == status
    assert answer.headers["etag"] == f'"{FACTS.text_digest}"'
    assert bool(answer.content) == (status == 200)


@pytest.mark.parametrize("path", [FACTS_PATH, TEXT_PATH])
def test_facts_and_text_are_only_read(server: LiveServer, path: str) -> None:
    assert server.http.post(path, json={}).status_code == 405
    assert server.http.get(path + "/").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/livez", 200),
        ("GET", "/readyz", 200),
        ("GET", "/metrics", 200),
        ("GET", FACTS_PATH, 200),
        ("GET", TEXT_PATH, 200),
        ("GET", "/nowhere", 404),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/completions", 400),
    ],
)
def test_every_answer_says_who_gives_it(server: LiveServer, method: str, path: str, status: int) -> None:
    answer = server.http.request(method, path, content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.headers.get_list(INCARNATION) == [FACTS.incarnation]
    assert answer.headers.get_list(MODEL_HEADER) == [MODEL]


def test_streams_say_who_gives_them(server: LiveServer) -> None:
    answer = server.complete(stream=True)
    assert answer.headers[INCARNATION] == FACTS.incarnation


def test_a_client_cannot_set_these_headers(server: LiveServer) -> None:
    answer = server.http.get("/livez", headers={INCARNATION: "f" * 32, MODEL_HEADER: "mine"})
    assert answer.headers.get_list(INCARNATION) == [FACTS.incarnation]
    assert answer.headers.get_list(MODEL_HEADER) == [MODEL]


def test_what_is_no_http_is_refused_by_the_same_name(server: LiveServer) -> None:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(b"no http\r\n\r\n")
        received = b""
        while part := sock.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert f"{INCARNATION}: {FACTS.incarnation}".encode() in head.split(b"\r\n")
    assert json.loads(body)["error"]["code"] == "invalid_http_request"


@pytest.mark.parametrize(
    ("name", "sent"),
    [("org/name", "org/name"), ("größe 50%", "gr%C3%B6%C3%9Fe%2050%25"), ("a\r\nb: c", "a%0D%0Ab:%20c")],
)
def test_a_model_s_name_fits_a_header(name: str, sent: str) -> None:
    facts = msgspec.structs.replace(FACTS, model=name)
    assert identity_headers(facts) == ((INCARNATION, FACTS.incarnation), (MODEL_HEADER, sent))


def test_facts_are_the_core_s_and_the_configuration_s() -> None:
    config = EngineConfig(
        model=ModelConfig(model="x"),
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=77),
    )
    core = RunningCore("/folder", 7, "f" * 32, READY)
    facts = make_facts("name", [core], config, 4321, b"text")
    assert (facts.model, facts.scope, facts.incarnation) == ("name", "org/name", "f" * 32)
    assert (facts.block_size, facts.num_blocks, facts.max_model_len, facts.vocab_size) == (16, 64, 512, 300)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens, facts.prefix_caching) == (5, 77, False)
    assert (facts.kv_events_port, facts.text_digest) == (4321, text_digest(b"text"))
    assert facts.data_ranks == ()
    assert make_facts("name", [core], config, None, None).text_digest is None


def test_an_engine_of_data_ranks_tells_of_each_cache() -> None:
    config = EngineConfig(model=ModelConfig(model="x"), parallel=Parallelism(data_parallel_size=2))
    kv = [KvTransferFacts(role="both", port=port, compatibility="c" * 64, bytes_per_token=8) for port in (5000, 6000)]
    cores = [
        RunningCore("/folder", 7, mark * 32, msgspec.structs.replace(READY, num_blocks=num_blocks, kv_transfer=own))
        for mark, num_blocks, own in zip("ab", (64, 60), kv, strict=True)
    ]
    facts = decode_facts(encode_facts(make_facts("name", cores, config, 4321, None)))
    assert (facts.incarnation, facts.num_blocks, facts.kv_events_port) == ("a" * 32, 124, None)
    assert [(one.incarnation, one.num_blocks, one.kv_events_port, one.kv_transfer_port) for one in facts.caches] == [
        ("a" * 32, 64, 4321, 5000),
        ("b" * 32, 60, 4321 + RANK_PORTS_APART, 6000),
    ]
    assert facts.kv_transfer == kv[0], "who knows of no ranks passes K/V to and from the first"


def test_text_that_is_too_large_or_no_unicode_stays_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert encoded_text(TEXT_MODEL) == TEXT
    monkeypatch.setattr(facts_module, "MAX_TEXT_BYTES", 100)
    assert encoded_text(TEXT_MODEL) is None
    assert "routers must do without" in caplog.text


def test_the_most_requests_are_a_metric(server: LiveServer) -> None:
    line = f'{metric_names.ENGINE_REQUESTS_MAX}{{model_name="{MODEL}"}} {FACTS.max_num_seqs}.0'
    assert line in server.http.get("/metrics").text.splitlines()

"""Which engine a stored response is asked of, and what a request for one looks like to it."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_protocol.handoff import encode_note, encode_prompt, pack_tokens
from pagefleet_router.engines.endpoints import EndpointTable, Snapshot
from pagefleet_router.errors import Failure
from pagefleet_router.exchange.dispatcher import Dispatcher
from pagefleet_router.exchange.forwarding import forwarded_request
from pagefleet_router.exchange.retries import Retries
from pagefleet_router.exchange.stream_tape import StreamTape
from pagefleet_router.exchange.view import NOBODY, Asker, unknown_store, view_request, view_stored
from pagefleet_router.scheduling.outliers import OutlierDetector
from pagefleet_router.scheduling.policies import RoundRobin
from pagefleet_router.scheduling.retry_budget import RetryBudget
from pagefleet_router.scheduling.selection import candidates
from pagefleet_router.telemetry.metrics import RouterMetrics
from pagefleet_router.wire.access import route_of
from pagefleet_router.wire.client_request import ClientRequest

FACTS = EngineFacts(
    incarnation="0" * 32, model="m", scope="m", block_size=16, num_blocks=8, max_model_len=256, max_num_seqs=8,
    max_num_batched_tokens=64, vocab_size=100,
)  # fmt: skip
STORES = ("a" * 12, "b" * 12)
OURS, GONE = (f"resp_{store}{'0' * 20}" for store in ("b" * 12, "c" * 12))


def two_stores() -> EndpointTable:
    table = EndpointTable()
    table.replace([Endpoint(f"e{n}", f"http://127.0.0.1:{n + 1}", "m") for n in range(2)])
    for n, store in enumerate(STORES):
        table.set_ready(f"e{n}", True)
        table.set_facts(f"e{n}", msgspec.structs.replace(FACTS, response_store=store))
    return table


def snapshot() -> Snapshot:
    return two_stores().snapshot


def request(target: str, method: str = "GET") -> ClientRequest:
    made = ClientRequest()
    made.method, made.target = method, target.encode()
    made.route = route_of(target.partition("?")[0])
    return made


def view(**fields: Any) -> Any:
    return view_request(json.dumps({"model": "m", **fields}).encode(), snapshot(), NOBODY, with_pieces=True)


@pytest.mark.parametrize("suffix", ["", "/input_items?limit=2&order=asc", "/cancel"])
def test_a_response_is_asked_of_the_engine_that_has_it(suffix: str) -> None:
    asked = request(f"/v1/responses/{OURS}{suffix}")
    seen = view_stored(asked, Asker("t"))
    assert (seen.store, seen.tenant, seen.model) == ("b" * 12, "t", None)
    assert unknown_store(seen, snapshot(), is_path=True) is None
    (engine,) = candidates(snapshot(), seen, ())
    assert engine.id == "e1"
    assert candidates(snapshot(), seen, ("e1",)) == ()
    head = forwarded_request(asked, seen, engine, None)[0].split(b"\r\n")[0]
    assert head == f"GET /v1/responses/{OURS}{suffix} HTTP/1.1".encode()


def test_a_response_of_a_lost_engine_is_not_found() -> None:
    refusal = unknown_store(view_stored(request(f"/v1/responses/{GONE}"), NOBODY), snapshot(), is_path=True)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (404, "response_not_found")
    refusal = unknown_store(view(input="x", previous_response_id=GONE), snapshot(), is_path=False)
    assert refusal is not None
    assert (refusal.status, refusal.param, refusal.code) == (
        400, "previous_response_id", "previous_response_not_found",
    )  # fmt: skip


def test_a_response_is_not_given_up_while_an_engine_has_not_told_its_store() -> None:
    table = EndpointTable()
    table.replace([Endpoint(f"e{n}", f"http://127.0.0.1:{n + 1}", "m") for n in range(2)])
    table.set_ready("e0", True)
    table.set_facts("e0", msgspec.structs.replace(FACTS, response_store="a" * 12))
    seen = view_stored(request(f"/v1/responses/{OURS}"), NOBODY)
    refusal = unknown_store(seen, table.snapshot, is_path=True)
    assert refusal is not None
    assert (refusal.status, refusal.headers) == (503, {"retry-after": "2"})
    table.set_ready("e1", True)  # without facts: another kind of engine
    refusal = unknown_store(seen, table.snapshot, is_path=True)
    assert refusal is not None
    assert refusal.status == 404


def test_what_refers_to_a_response_goes_to_its_engine() -> None:
    assert view(input="x", previous_response_id=OURS).store == "b" * 12
    reference = {"type": "item_reference", "id": f"msg_{'a' * 12}{'0' * 20}8000"}
    assert view(input=[{"role": "user", "content": "x"}, reference]).store == "a" * 12
    assert view(input=[{"role": "user", "content": "x"}, {"id": reference["id"]}]).store == "a" * 12
    whole = {"id": reference["id"], "type": "message", "role": "user", "content": "x"}
    others: list[dict[str, Any]] = [
        {"input": [whole]},
        {"input": "x"},
        {"input": "x", "previous_response_id": "resp_nobody"},
        {"messages": []},
    ]
    for other in others:
        assert view(**other).store == ""


def test_prompts_of_all_apis_are_looked_at() -> None:
    text = "x" * 4000
    for fields in ({"messages": text}, {"input": text}, {"input": "y", "instructions": text}, {"system": text}):
        assert view(**fields).num_tokens >= 900
    assert view(input="x", max_output_tokens=7).max_tokens == 7
    pieces = [view(messages=text, system=system).pieces for system in ("a", "b", "a")]
    assert pieces[0] == pieces[2] != pieces[1]


def test_paths_that_name_no_response_have_no_route() -> None:
    for path in ("/v1/responses/", "/v1/responses/x/y", "/v1/responses/a%2Fb", "/v1/responses/x/cancel/"):
        assert route_of(path) is None


def test_a_stream_from_a_lost_store_goes_on_with_its_prompt() -> None:
    seen, tape = view(input="x", previous_response_id=OURS, stream=True), StreamTape(5)
    tape.take(encode_prompt([7, 8, 9]) + encode_note([1], 1, num_events=1) + b"event: a\ndata: {}\n\n")
    table = two_stores()
    dispatcher = Dispatcher(
        table, RoundRobin(time.monotonic), RetryBudget(), OutlierDetector(),
        RouterMetrics(lambda: table.snapshot, lambda: 0, lambda: 0.0), time.monotonic, lambda _: None,
    )  # fmt: skip
    lost = table.snapshot.engines[1]
    choice = retries_from("e1").takeover(dispatcher, seen, Failure.RESET, lost, tape)
    assert choice is not None
    assert choice.engine.id == "e0"
    asked = request("/v1/responses", "POST")
    asked.body = b"{}"
    sent = b"".join(forwarded_request(asked, seen, choice.engine, tape))
    assert b"x-pagefleet-prompt-tokens: 3\r\n" in sent
    assert sent.endswith(b"{}" + pack_tokens([7, 8, 9, 1]))
    untold = StreamTape(5)
    untold.take(encode_note([1], 1, num_events=1) + b"event: a\ndata: {}\n\n")
    assert retries_from("e1").takeover(dispatcher, seen, Failure.RESET, lost, untold) is None


def retries_from(engine: str) -> Retries:
    retries = Retries()
    retries.tried.append(engine)
    return retries

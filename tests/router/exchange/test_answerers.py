"""Who answers: strangers at an engine's address, engines that began anew, and what they are told of a request."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, encode_facts
from pagefleet_protocol.handoff import CACHE_SALT, PROMPT_TOKENS, pack_tokens, split_body, tenant_salt
from pagefleet_protocol.headers import PRIORITY
from pagefleet_protocol.tenants import Tenant
from pagefleet_router.engines.endpoints import EngineView, build_snapshot
from pagefleet_router.errors import Refusal
from pagefleet_router.exchange.dispatcher import MAX_ENGINES, explanation
from pagefleet_router.exchange.engine_answer import Identity, identify
from pagefleet_router.exchange.view import NOBODY, Asker, read_asker, view_request
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.policy import Score
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.upstream import AnswerHead

from tests.fakes.faulty_engine import Fleet, chat, post, run, whole

FIRST, SECOND = "1" * 32, "2" * 32
FACTS = EngineFacts(
    incarnation=FIRST, model="m", scope="s", block_size=16, num_blocks=100, max_model_len=256, max_num_seqs=8,
    max_num_batched_tokens=512, vocab_size=300, text_digest="d",
)  # fmt: skip
ENGINE = EngineView(Endpoint("a", "http://a:1", "mödel x"), ready=True, facts=FACTS)
SNAPSHOT = build_snapshot([ENGINE], {"nick": "mödel x"})


@pytest.mark.parametrize(
    ("model", "incarnation", "identity"),
    [
        (None, None, Identity.SAME),
        ("m%C3%B6del x", None, Identity.SAME),
        ("nick", FIRST, Identity.SAME),
        ("mödel x", None, Identity.STRANGER),  # not percent-encoded: read as Latin-1
        ("model x", FIRST, Identity.STRANGER),
        ("", FIRST, Identity.STRANGER),
        (None, SECOND, Identity.RESTARTED),
        ("nick", SECOND, Identity.RESTARTED),
        ("other", SECOND, Identity.STRANGER),
    ],
)
def test_who_answered(model: str | None, incarnation: str | None, identity: Identity) -> None:
    given = [(b"x-pagefleet-incarnation", incarnation), (b"content-type", "a/b"), (b"x-pagefleet-model", model)]
    head = AnswerHead(200, [(name, value.encode()) for name, value in given if value is not None])
    assert identify(head, ENGINE, SNAPSHOT) is identity


def test_a_strangers_answer_is_not_used(tmp_path: Path) -> None:
    stranger = whole(200, b"secret of another model", "x-pagefleet-model: other\r\n")

    async def check(f: Fleet) -> None:
        for _ in range(3):
            answer = await f.ask(post(chat()))
            assert (answer.status, answer.body) == (200, b"mine")
            assert "x-pagefleet-model" not in answer.headers
        assert f.router.metrics.failures["stranger"] >= 1
        f.engines[1].behave = stranger
        answer = await f.ask(post(chat()))
        assert (answer.status, answer.error["code"]) in {(502, "engine_unreachable"), (503, "no_engine_ready")}
        assert b"secret" not in answer.body
        await f.until(lambda: f.router.pools.pool(f.engines[0].url).idle == [])

    run(tmp_path, check, stranger, whole(200, b"mine", "x-pagefleet-model: m\r\n"), policy="round-robin")


def test_an_engine_that_began_anew_is_believed_and_its_cache_forgotten(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        engine = f.engines[0]
        engine.internal[FACTS_PATH] = encode_facts(FACTS)
        engine.incarnation = FIRST
        await f.until(lambda: f.router.table.snapshot.engines[0].facts == FACTS)
        await f.ask(post(chat("x" * 3000)))
        lost: list[str] = []
        known = f.router._dispatcher.policy.lost
        f.router._dispatcher.policy.lost = lambda engine_id: (lost.append(engine_id), known(engine_id))  # type: ignore[method-assign,assignment,func-returns-value]
        changed = msgspec.structs.replace(FACTS, incarnation=SECOND)
        engine.behave = whole(200, b"new", f"x-pagefleet-incarnation: {SECOND}\r\nx-pagefleet-model: m\r\n")
        assert (await f.ask(post(chat()))).body == b"new"
        assert lost[:1] == ["e0"]
        engine.internal[FACTS_PATH] = encode_facts(changed)
        engine.incarnation = SECOND
        await f.until(lambda: f.router.table.snapshot.engines[0].facts == changed)
        del lost[:]
        assert (await f.ask(post(chat()))).body == b"new"
        assert lost == []

    run(tmp_path, check, whole(200, b"old", f"x-pagefleet-incarnation: {FIRST}\r\n"), policy="prefix")


def test_headers_of_ours_come_from_no_client_and_trace_context_passes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant=red\n")
    trace = "traceparent: 00-1-2-01\r\ntracestate: a=b\r\nbaggage: c=d\r\n"
    forged = "".join(
        f"x-pagefleet-{name}: 1\r\n"
        for name in ("prompt-tokens", "stream", "cache-salt", "engine", "session", "priority", "explain", "transfer")
    )

    async def check(f: Fleet) -> None:
        answer = await f.ask(post(chat(), headers=f"authorization: Bearer one\r\n{trace}{forged}"))
        assert answer.status == 200
        seen = f.engines[0].seen[0]
        names = [name for name, _ in seen.headers if name.startswith("x-pagefleet-")]
        assert names == [PRIORITY, CACHE_SALT]
        assert seen.header(PRIORITY) == "0", "the most that the tenant may ask for, whatever the body says"
        assert seen.header(CACHE_SALT) == tenant_salt("red")
        assert [seen.header(name) for name in ("traceparent", "tracestate", "baggage")] == ["00-1-2-01", "a=b", "c=d"]
        assert seen.body == json.dumps(chat()).encode()

    run(tmp_path, check, whole(), api_key_file=keys)


def test_a_tenant_called_anonymous_is_a_tenant(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant=anonymous rpm=1\n")
    head = "authorization: Bearer one\r\n"

    async def check(f: Fleet) -> None:
        assert (await f.ask(post(chat(), headers=head))).status == 200
        assert f.engines[0].seen[0].header(CACHE_SALT) == tenant_salt("anonymous")
        assert (await f.ask(post(chat(), headers=head))).status == 429, "it has limits like others"

    run(tmp_path, check, whole(), api_key_file=keys)


class TwoTokens:
    """A prompt reader that knows every prompt's tokens, at once or a little later."""

    def __init__(self, later: bool) -> None:
        self.later = later

    def read(
        self, route: str, body: bytes, view: RequestView, then: Callable[[RequestView], None]
    ) -> RequestView | None:
        read = msgspec.structs.replace(view, token_ids=pack_tokens([3, 4]), text_digest="d", num_tokens=2)
        if not self.later:
            return read
        asyncio.get_running_loop().call_later(0.05, then, read)
        return None


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("digest", ["d", "another", None])
def test_tokens_go_to_engines_of_the_same_text_only(tmp_path: Path, later: bool, digest: str | None) -> None:
    async def check(f: Fleet) -> None:
        services = f.router.front._services
        object.__setattr__(services, "prompts", TwoTokens(later))
        engine = f.engines[0]
        engine.internal[FACTS_PATH] = encode_facts(msgspec.structs.replace(FACTS, text_digest=digest))
        engine.incarnation = FIRST
        await f.until(lambda: f.router.table.snapshot.engines[0].facts is not None)
        leaving = await f.connect()
        await leaving.send(post(chat("left")))
        await f.until(lambda: f.router.budget.live_requests == 1 or bool(engine.seen))
        leaving.close()
        assert (await f.ask(post(chat()))).status == 200
        seen = engine.seen[-1]
        num_behind = int(seen.header(PROMPT_TOKENS) or 0)
        body, prompt, generated = split_body(seen.body, num_behind, 0)
        assert body == json.dumps(chat()).encode()
        assert (prompt, generated) == ([3, 4] if digest == "d" else [], [])

    run(tmp_path, check, whole())


def test_the_choice_is_explained_where_it_is_allowed(tmp_path: Path) -> None:
    async def check(f: Fleet) -> None:
        asking = "x-pagefleet-explain: 1\r\n"
        answer = await f.ask(post(chat(), headers=asking))
        rows = json.loads(answer.headers["x-pagefleet-explain"])
        assert {row["engine"] for row in rows} == {"e0", "e1"}
        assert all(set(row) == {"engine", "seconds", "cached_tokens", "queued_tokens", "reason"} for row in rows)
        assert "x-pagefleet-explain" not in (await f.ask(post(chat()))).headers

    run(tmp_path, check, whole(), whole(), explain=True, policy="auto")

    async def check_not(f: Fleet) -> None:
        answer = await f.ask(post(chat(), headers="x-pagefleet-explain: 1\r\n"))
        assert (answer.status, answer.headers.get("x-pagefleet-explain")) == (200, None)

    run(tmp_path, check_not, whole())


def test_an_explanation_is_bounded_and_one_line_of_ascii() -> None:
    scores = [Score(f"e\r\nx: é🙂{n}", float(n), n, n, 'so"\n') for n in range(200, 0, -1)]
    line = explanation(scores)
    assert line.isascii()
    assert line.count(b"\r\n") == 1
    rows = json.loads(line.split(b": ", 1)[1])
    assert [row["cached_tokens"] for row in rows] == list(range(1, len(rows) + 1))
    assert 30 < len(rows) <= MAX_ENGINES
    assert len(line) < 8000, "of a header that common clients and proxies accept"
    assert json.loads(explanation([]).split(b": ", 1)[1]) == []
    assert rows[0]["engine"] == "e\r\nx: é🙂1"


def request_with(tenant: Tenant | None = None, **headers: str) -> ClientRequest:
    fields = {name.replace("_", "-").encode(): text.encode() for name, text in headers.items()}
    request = ClientRequest()
    request.headers, request.fields = list(fields.items()), fields
    request.tenant = tenant
    return request


SESSION = b"x-pagefleet-session"


def test_who_asks() -> None:
    assert read_asker(request_with(), SESSION) is NOBODY
    assert read_asker(request_with(x_pagefleet_priority="7"), SESSION) == Asker(priority=7)
    assert read_asker(request_with(x_pagefleet_priority="-999"), SESSION) == Asker(priority=-100)
    red = Tenant("red", max_priority=5)
    assert read_asker(request_with(red), SESSION) == Asker("red")
    assert read_asker(request_with(red, x_pagefleet_priority="50"), SESSION) == Asker("red", 5)
    assert read_asker(request_with(Tenant("low", max_priority=-3)), SESSION) == Asker("low", -3)
    for wrong in ("high", "1.5", "", " ", "9" * 30):
        if wrong:
            with pytest.raises(Refusal) as caught:
                read_asker(request_with(x_pagefleet_priority=wrong), SESSION)
            assert (caught.value.status, caught.value.param) == (400, "x-pagefleet-priority")


def test_sessions_are_the_same_in_every_router_and_of_one_tenant() -> None:
    one = read_asker(request_with(x_pagefleet_session="chat 1"), SESSION).session
    assert one == read_asker(request_with(x_pagefleet_session="chat 1"), SESSION).session == 6454637466643677976
    others = {
        read_asker(request_with(x_pagefleet_session="chat 2"), SESSION).session,
        read_asker(request_with(Tenant("red"), x_pagefleet_session="chat 1"), SESSION).session,
        read_asker(request_with(x_user="chat 1"), b"x-user").session,
    }
    assert len(others | {one}) == 3, "the header's name makes no other session"
    assert read_asker(request_with(x_user="chat 1"), SESSION) is NOBODY


SERVED = build_snapshot([EngineView(Endpoint("a", "http://a:1", "m"), ready=True)])


def view(**fields: Any) -> RequestView:
    return view_request(json.dumps({"model": "m", **fields}).encode(), SERVED, Asker("red", 3, 9), with_pieces=False)


def test_what_a_body_says() -> None:
    seen = view(messages=[{"role": "user", "content": "x" * 400}], stream=True, max_tokens=5, priority=77, user="u")
    assert (seen.tenant, seen.priority, seen.session) == ("red", 3, 9), "the body's priority is the engine's"
    assert (seen.stream, seen.max_tokens) == (True, 5)
    assert 100 < seen.num_tokens < 120
    assert view(prompt="x", max_tokens=5, max_completion_tokens=7).max_tokens == 7
    odds: tuple[object, ...] = (0, -1, True, "5", 1.5, None, [], 10**30)
    for odd in odds:
        assert view(prompt="x", max_tokens=odd).max_tokens == (odd if odd == 10**30 else None)
        assert view(prompt="x", stream=odd).stream is (odd is True)


NAMES = ("model", "cache_salt", "stream", "max_tokens", "echo", "prompt_logprobs", "unknown")


@pytest.mark.parametrize("name", NAMES)
def test_no_field_makes_a_large_body_into_objects(name: str) -> None:
    body = b'{"prompt":"x","%b":[%b0]}' % (name.encode(), b"[]," * 300_000)
    tracemalloc.start()
    try:
        assert view_request(body, SERVED, Asker(), with_pieces=True).model == "m"
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body), "a list for each pair of brackets takes 60 bytes"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("given", "kind"), [("[1]", "an array"), ('{"a":1}', "an object"), ("5", "an integer")])
def test_a_model_of_another_kind_is_named(given: str, kind: str) -> None:
    two = build_snapshot([EngineView(Endpoint(name, f"http://{name}:1", name), ready=True) for name in "ab"])
    with pytest.raises(Refusal, match=f"expected a string, but got {kind} instead"):
        view_request(f'{{"model":{given}}}'.encode(), two, Asker(), with_pieces=False)
    assert view(prompt="x", max_tokens=10**30).max_tokens == 10**30
    digits = b'{"model":"m","max_tokens":' + b"1" * 10_000 + b"}"
    assert view_request(digits, SERVED, Asker(), with_pieces=False).max_tokens is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("messages", "prompt", "tools", "stream", "n", "best_of", "echo", "seed", "temperature", "max_tokens")


@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_a_body_of_any_shape_is_viewed(fields: dict[str, Any]) -> None:
    seen = view(**fields)
    assert seen.num_tokens >= 0
    assert seen.max_tokens is None or seen.max_tokens > 0

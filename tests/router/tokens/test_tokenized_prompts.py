"""Prompts read by the router: the tokens and blocks that an engine would compute, off the loop, or not at all."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import uvloop
from pagefleet_protocol.block_hash import BlockHash, PrefixScope, extend_hashes, root_hash
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import TEXT_PATH, CacheFacts, TextData, encode_text, text_digest
from pagefleet_protocol.handoff import tenant_salt, unpack_tokens
from pagefleet_protocol.kv_events import routing_key
from pagefleet_protocol.kv_handoff import KvRole
from pagefleet_router.engines.endpoints import EndpointTable, EngineView
from pagefleet_router.engines.rates import EngineRates
from pagefleet_router.prefix.exact import ExactIndex
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.prefix.knowledge import ApproximatePrefixes, PrefixBook
from pagefleet_router.request_view import ANONYMOUS, RequestView
from pagefleet_router.scheduling.auto import Auto
from pagefleet_router.scheduling.kv_links import KvLinks
from pagefleet_router.scheduling.pairing import Pairing
from pagefleet_router.tokens import tokenized_prompts
from pagefleet_router.tokens.prompt_work import CHAT, COMPLETIONS
from pagefleet_router.tokens.tokenized_prompts import TokenizedPrompts
from pagefleet_text.text_model import TextModel

from tests.fakes.faulty_engine import FaultyEngine
from tests.fakes.pair_fleet import pair_facts
from tests.fakes.small_tokenizers import byte_level_backend
from tests.router.signals.test_engine_facts import facts

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATA = TextData(tokenizer=byte_level_backend().to_str(), settings={}, chat_template=TEMPLATE)
LONG = "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gets no turn for a second is late only where that is what is tried."""
    monkeypatch.setattr(tokenized_prompts, "LIMIT_S", 60.0)


class Reader:
    """A router's prompts, and one engine whose text they use."""

    def __init__(self, data: TextData = DATA, **told: Any) -> None:
        self.table = EndpointTable()
        self.prompts = TokenizedPrompts(self.table)
        self.engine = FaultyEngine()
        self.encoded = encode_text(data)
        self.engine.internal[TEXT_PATH] = self.encoded
        self.told: dict[str, Any] = {
            "text_digest": text_digest(self.encoded), "kv_events_port": 7, "max_model_len": 100_000, **told,
        }  # fmt: skip

    async def start(self) -> None:
        await self.engine.start()
        self.table.replace([Endpoint("e", self.engine.url, "m")])
        self.table.set_ready("e", True)
        self.table.set_facts("e", facts(**self.told))

    async def until_loaded(self) -> None:
        async with asyncio.timeout(60):
            while self.prompts._library.num_loaded == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def read(self, body: dict[str, Any], route: str = CHAT, **known: Any) -> tuple[RequestView, bool]:
        """Return the view, and whether it came later."""
        arrived: asyncio.Future[RequestView] = asyncio.get_running_loop().create_future()
        view = self.prompts.read(route, json.dumps(body).encode(), RequestView("m", **known), arrived.set_result)
        return (view, False) if view is not None else (await asyncio.wait_for(arrived, 60), True)

    async def stop(self) -> None:
        await self.prompts.stop()
        await self.engine.kill()


def run(check: Callable[[Reader], Awaitable[None]], data: TextData = DATA, loaded: bool = True, **told: Any) -> None:
    async def scenario() -> None:
        reader = Reader(data, **told)
        try:
            await reader.start()
            if loaded:
                await reader.until_loaded()
            await check(reader)
        finally:
            await reader.stop()

    uvloop.run(scenario())


def chat(text: str = LONG, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def keys(ids: list[int], salt: str | None = None) -> list[int]:
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root_hash(PrefixScope("s", None, salt)), ids, 16)
    return list(map(routing_key, hashes))


def ids_of(text: str = LONG) -> list[int]:
    whole = TEMPLATE.split("{{", maxsplit=1)[0].split("%}")[1] + f"user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    found: list[int] = byte_level_backend().encode(whole, add_special_tokens=False).ids
    return found


def test_a_conversation_s_tokens_and_blocks() -> None:
    async def check(reader: Reader) -> None:
        view, later = await reader.read(chat())
        assert later
        assert unpack_tokens(view.token_ids) == ids_of()
        assert (view.num_tokens, view.block_size, view.scope) == (len(ids_of()), 16, "s")
        assert view.text_digest == reader.told["text_digest"]
        assert view.blocks == keys(ids_of())
        assert (await reader.read(chat()))[0] == view, "with what was remembered too"

    run(check)


@pytest.mark.parametrize(
    ("tenant", "clients", "salt"),
    [
        (ANONYMOUS, None, None), (ANONYMOUS, "c", "c"),
        ("t", None, tenant_salt("t")), ("t", "c", tenant_salt("t") + "/c"),
    ],
)  # fmt: skip
def test_tenants_have_blocks_of_their_own(tenant: str, clients: str | None, salt: str | None) -> None:
    async def check(reader: Reader) -> None:
        fields = {} if clients is None else {"cache_salt": clients}
        view, _ = await reader.read(chat(**fields), tenant=tenant)
        assert view.blocks == keys(ids_of(), salt)

    run(check)


def test_a_completion_s_tokens() -> None:
    async def check(reader: Reader) -> None:
        view, _ = await reader.read({"model": "m", "prompt": LONG}, COMPLETIONS)
        ids = byte_level_backend().encode(LONG).ids
        assert unpack_tokens(view.token_ids) == ids
        assert view.blocks == keys(ids)
        view, _ = await reader.read({"model": "m", "prompt": ids * 2}, COMPLETIONS)
        assert (view.token_ids, view.num_tokens) == (b"", 2 * len(ids)), "its body has them"
        assert view.blocks == keys(ids * 2)

    run(check)


@pytest.mark.parametrize(
    ("body", "route", "later"),
    [
        (chat("short"), CHAT, False),
        (chat("x" * tokenized_prompts.MAX_BODY_BYTES), CHAT, False),
        (chat(), "/tokenize", False),
        (chat(messages=LONG), CHAT, True),
        (chat(temperature=LONG), CHAT, True),
        (chat(tools=[{"type": "function"}]), CHAT, True),
        (chat(chat_template="{{ messages }}"), CHAT, True),
        ({"model": "m", "prompt": [LONG, LONG]}, COMPLETIONS, True),
        (chat("word " * 200_000), CHAT, True),
    ],
)
def test_what_is_left_to_the_engine(body: dict[str, Any], route: str, later: bool) -> None:
    async def check(reader: Reader) -> None:
        assert await reader.read(body, route, num_tokens=5) == (RequestView("m", num_tokens=5), later)

    run(check)


def test_nothing_is_handed_over_that_another_version_may_render_differently() -> None:
    async def check(reader: Reader) -> None:
        view, _ = await reader.read(chat(a_field_of_next_year="high"))
        assert (view.token_ids, view.blocks) == (b"", keys(ids_of()))
        view, _ = await reader.read(chat(metadata={"a": "b"}, user="u"))
        assert view.token_ids

    run(check)


def test_nothing_is_handed_over_that_depends_on_the_time() -> None:
    async def check(reader: Reader) -> None:
        view, _ = await reader.read(chat())
        assert view.token_ids == b""
        assert view.blocks

    run(check, TextData(tokenizer=DATA.tokenizer, settings={}, chat_template=TEMPLATE + "{{ strftime_now('%Y') }}"))


def test_a_model_that_refuses_the_conversation() -> None:
    async def check(reader: Reader) -> None:
        assert (await reader.read(chat()))[0] == RequestView("m")

    run(check, TextData(tokenizer=DATA.tokenizer, settings={}, chat_template="{{ raise_exception('no') }}"))


@pytest.mark.parametrize("told", [{"text_digest": None}, {"kv_events_port": None}])
def test_engines_that_have_no_use_for_it(told: dict[str, Any]) -> None:
    async def check(reader: Reader) -> None:
        assert await reader.read(chat()) == (RequestView("m"), False)

    run(check, loaded=told["text_digest" if "text_digest" in told else "kv_events_port"] is not None, **told)


def test_a_prompt_goes_to_the_rank_behind_one_port_that_has_published_its_blocks() -> None:
    """Of the prefill engine and of the decode engine."""
    ranks = tuple(
        CacheFacts(incarnation=f"{rank:032x}", num_blocks=900, kv_events_port=7 + rank, kv_transfer_port=17 + rank)
        for rank in range(2)
    )
    index = ExactIndex()
    known = PrefixBook(ApproximatePrefixes(PrefixIndex(1000)), index)

    def engine(name: str, role: KvRole, rank: int, blocks: Sequence[int]) -> EngineView:
        told = pair_facts(name, role, data_ranks=ranks)
        made = EngineView(Endpoint(name, f"http://{name}:1", "m"), ready=True, facts=told, rates=EngineRates())
        for cache in made.cache_ids:
            index.join(cache, 900)
            known.set_live(cache, True)
        index.add(made.cache_ids[rank], blocks)
        return made

    async def check(reader: Reader) -> None:
        view, later = await reader.read(chat(), stream=True, may_split=True)
        assert later
        assert view.blocks == keys(ids_of())[: len(view.blocks)] != []
        half = view.blocks[: len(view.blocks) // 2]
        prefill, decode = engine("p", "prefill", 1, view.blocks), engine("d", "decode", 1, half)
        rng = random.Random(0)
        pairing = Pairing(Auto(known, rng, lambda: 0.0), known, 64, True, lambda: 0.0, rng)
        choice = pairing.choose(view, [decode], [prefill], KvLinks())
        assert choice.prefill is not None
        assert (choice.prefill.rank, choice.rank) == (1, 1)
        assert choice.prefill.cached_tokens > choice.cached_tokens > 0

    run(check, kv_events_port=None, data_ranks=ranks)


@pytest.mark.parametrize("answer", [b"{}", None])
def test_text_that_is_not_what_the_facts_say_is_not_used(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagefleet_router.tokens.text_library.AGAIN_S", 0.01)

    async def scenario() -> None:
        reader = Reader()
        reader.engine.internal.pop(TEXT_PATH)
        if answer is not None:
            reader.engine.internal[TEXT_PATH] = answer
        await reader.start()
        async with asyncio.timeout(60):
            while reader.engine.num_asked[TEXT_PATH] < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert await reader.read(chat()) == (RequestView("m"), False)
        assert "no tokenizer from" in caplog.text
        reader.engine.internal[TEXT_PATH] = reader.encoded
        await reader.until_loaded()
        assert (await reader.read(chat()))[1]
        await reader.stop()

    uvloop.run(scenario())


def shown(prompts: TokenizedPrompts) -> dict[str, float]:
    """What is served at /metrics."""
    samples = [sample for family in prompts.collect() for sample in family.samples if sample.name.endswith("_total")]
    return {one.name.split("_", 3)[3].removesuffix("_total"): one.value for one in samples}


def test_what_was_read_and_what_was_remembered_is_counted() -> None:
    async def check(reader: Reader) -> None:
        await reader.read(chat())
        first = shown(reader.prompts)
        await reader.read(chat())
        second = shown(reader.prompts)
        assert (first["tokenized"], second["tokenized"], second["late"]) == (1, 2, 0)
        assert second["segments_reused"] > first["segments_reused"] == 0

    run(check)


def test_whoever_comes_after_the_end_goes_on_alone() -> None:
    async def check(reader: Reader) -> None:
        await reader.prompts.stop()
        assert await reader.read(chat()) == (RequestView("m"), False)

    run(check)


def test_a_prompt_that_takes_too_long_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized_prompts, "LIMIT_S", 0.01)
    monkeypatch.setattr(tokenized_prompts, "MAX_WAITING", 2)
    gate = threading.Event()

    def wait(model: TextModel, chat: object) -> list[int]:
        gate.wait(60)
        raise ZeroDivisionError  # a bug that nobody foresaw

    monkeypatch.setattr(TextModel, "chat_tokens", wait)

    async def check(reader: Reader) -> None:
        assert await reader.read(chat()) == (RequestView("m"), True)
        assert await reader.read(chat()) == (RequestView("m"), True)
        assert await reader.read(chat()) == (RequestView("m"), False), "two are waiting already"
        assert shown(reader.prompts) == {"tokenized": 0, "late": 3, "segments_reused": 0}
        gate.set()
        async with asyncio.timeout(60):
            while reader.prompts._num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    try:
        run(check)
    finally:
        gate.set()

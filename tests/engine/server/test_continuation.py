"""A stream cut after any event and continued by another engine is the stream that was not cut, byte for byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.config import (
    CacheConfig,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    SchedulerConfig,
)
from pagefleet_engine.engine_core.model_folder import resolve_model_folder
from pagefleet_engine.engine_core.output_text import Chunk, merge_chunks
from pagefleet_engine.errors import RequestFailed
from pagefleet_engine.text.model_files import load_tokenizer
from pagefleet_protocol.handoff import (
    ENDED,
    MARKS,
    OPENED,
    Shown,
    pack_tokens,
    take_note,
    unpack_tokens,
)

from tests.fakes.inline_engine import CONTEXT
from tests.fakes.small_model import write_small_model
from tests.fakes.stream_site import (
    ROUTES,
    STATE,
    TEXT,
    TOKENIZER,
    USAGE,
    Site,
    blocks_of,
    gathered,
    open_site,
    script_of,
    scripted,
    shown,
    without_cached,
    without_names,
)


def by_choice(stream: bytes) -> dict[int, list[bytes]]:
    """Return the events of each choice in their order; those of none are under -1."""
    found: dict[int, list[bytes]] = {}
    for event in blocks_of(without_cached(stream)):
        index = re.match(rb'data: .*"choices":\[{"index":(\d+)', event)
        found.setdefault(-1 if index is None else int(index[1]), []).append(event)
    return found


async def check_every_cut(site: Site, route: str, **fields: Any) -> list[bytes]:
    """Cut the stream after every event, continue it, and compare; returns its events without notes."""
    body = site.fields(route, **fields)
    plain = await site.send(route, body)
    noted = await site.send(route, body, STATE)
    assert (plain.status_code, noted.status_code) == (200, 200), noted.text
    blocks = blocks_of(noted.content)
    assert all(block.startswith(b":pf ") for block in blocks)
    known = gathered(noted.content)
    whole = known.events
    assert by_choice(without_names(whole)) == by_choice(without_names(plain.content))
    assert STATE.answer_id.encode() in whole
    for count in range(1, len(blocks)):
        before = gathered(b"".join(blocks[:count]))
        rest = await site.send(route, body, before.state, before.packed)
        assert rest.status_code == 200, rest.text
        after = gathered(rest.content)
        assert by_choice(before.events + after.events) == by_choice(whole), f"cut after event {count}"
        for choice, tokens in known.tokens.items():
            assert before.tokens.get(choice, b"") + after.tokens.get(choice, b"") == tokens
    return blocks_of(whole)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 30},
    "usage": {"max_tokens": 9, **USAGE},
    "usage in each event": {"max_tokens": 9, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "one token": {"max_tokens": 1, **USAGE},
    "in a character": {"max_tokens": len(script_of("The h")) + 1, **USAGE},
    "stop string": {"max_tokens": 60, "stop": ["and th", "x, ÿ and thee", "好 😀 foy"], **USAGE},
    "stop string kept": {"max_tokens": 60, "stop": ["x, ÿ"], "include_stop_str_in_output": True},
    "stop string late": {"max_tokens": 60, "stop": ["The", " "], "min_tokens": 7},
    "stop string held to the end": {"max_tokens": 12, "stop": ["你好 😀 fox, ÿ and then"]},
    "stop token": {"max_tokens": 60, "stop_token_ids": [script_of("ÿ")[-1]], "ignore_eos": True, **USAGE},
    "stop token late": {"max_tokens": 60, "stop_token_ids": script_of("The"), "min_tokens": 5},
}


SEVERAL: dict[str, dict[str, Any]] = {
    "two": {"n": 2, "max_tokens": 6, **USAGE},
    "three, a stop string": {"n": 3, "max_tokens": 20, "stop": ["ÿ"]},
    "two, in a character": {"n": 2, "max_tokens": len(script_of("The h")) + 1, **USAGE},
}
OF_TEXTS: dict[str, dict[str, Any]] = {
    "two, log-probabilities": {"n": 2, "max_tokens": 5, "logprobs": 1},
    "prompts": {"prompt": ["one", "two"], "n": 2, "max_tokens": 3, **USAGE},
    "echo": {"echo": True, "max_tokens": 4},
}


@pytest.mark.parametrize(
    ("route", "fields"),
    [(route, fields) for route in ROUTES for fields in SEVERAL.values()]
    + [(ROUTES[0], {"n": 2, "max_tokens": 5, "logprobs": True, "top_logprobs": 1})]
    + [(ROUTES[1], fields) for fields in OF_TEXTS.values()],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_every_choice_goes_on_from_its_own_tokens(route: str, fields: dict[str, Any]) -> None:
    scripted(lambda site: check_every_cut(site, route, **fields))


def test_a_choice_that_has_ended_stays_ended_while_the_other_goes_on() -> None:
    async def test(site: Site) -> None:
        body = site.fields(ROUTES[1], n=2, max_tokens=3, **USAGE)
        ids = script_of(TEXT)[:3]
        text = TOKENIZER.decode(ids)
        state = replace(STATE, choices=(Shown(4, len(text)), Shown(1, 1)))
        rest = await site.send(ROUTES[1], body, state, pack_tokens([*ids, ENDED, ids[0]]))
        found = by_choice(gathered(rest.content).events)
        assert set(found) == {1, -1}
        assert b'"completion_tokens":6' in found[-1][0]
        texts = [json.loads(event[6:])["choices"][0]["text"] for event in found[1]]
        assert "T" + "".join(texts) == text

    scripted(test)


def text_of(event: bytes) -> str:
    choice = json.loads(event[6:])["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_drawn_by_chance_goes_on_from_the_tokens_that_were_shown(route: str) -> None:
    async def run() -> None:
        async with open_model("builtin://tiny", "auto") as site:
            body = site.fields(route, temperature=1.0, n=2, max_tokens=12, ignore_eos=True, **USAGE)
            blocks = blocks_of((await site.send(route, body, STATE)).content)
            for count in range(1, len(blocks), 5):
                before = gathered(b"".join(blocks[:count]))
                after = gathered((await site.send(route, body, before.state, before.packed)).content)
                events = by_choice(before.events + after.events)
                for choice in (0, 1):
                    ids = unpack_tokens(before.tokens.get(choice, b"") + after.tokens.get(choice, b""))
                    ids = [token for token in ids if token not in MARKS]
                    assert len(ids) == 12
                    assert "".join(map(text_of, events[choice])) == site.parts.tokenizer.decode(ids)
                    assert sum(b'"finish_reason":"length"' in event for event in events[choice]) == 1
                assert b'"completion_tokens":24' in events[-1][0]

    asyncio.run(run())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES)
def test_a_stream_continued_after_any_event_is_the_same(case: str, route: str) -> None:
    async def test(site: Site) -> None:
        events = await check_every_cut(site, route, **CASES[case])
        assert events[-1] == b"data: [DONE]\n\n"
        assert len(events) > 2

    scripted(test)


@pytest.mark.parametrize(
    ("route", "logprobs"), [(ROUTES[0], {"logprobs": True, "top_logprobs": 1}), (ROUTES[1], {"logprobs": 1})]
)
@pytest.mark.parametrize("more", [{}, {"stop": ["and the"]}, {"max_tokens": 1}])
def test_log_probabilities_come_once(route: str, logprobs: dict[str, Any], more: dict[str, Any]) -> None:
    async def test(site: Site) -> None:
        await check_every_cut(site, route, **{"max_tokens": 25, **logprobs, **more})

    scripted(test)
    # The first token is part of a character: its event has log-probabilities and no text.
    scripted(test, script_of("😀 The and the 你"))


@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_without_text_is_continued_after_each_of_its_events(route: str) -> None:
    async def test(site: Site) -> None:
        events = await check_every_cut(site, route, max_tokens=5, **USAGE)
        assert b'"completion_tokens":1' in events[-2]

    scripted(test, [TOKENIZER.eos_token_ids[0]])


def test_notes_tell_tokens_as_they_come_and_the_text_that_is_out() -> None:
    async def test(site: Site) -> None:
        body = site.fields(ROUTES[0], max_tokens=4, stop=["zeb"], **USAGE)
        blocks = blocks_of((await site.send(ROUTES[0], body, STATE)).content)
        notes = [(unpack_tokens(note.tokens), note.num_chars) for _, note in map(take_note, blocks) if note]
        a, z, e, x = script
        ended, counted = ENDED, ENDED - 1
        # "z" and "ze" may become the stop string: their tokens come with the event that shows them.
        assert notes == [([OPENED], 0), ([a], 1), ([z, e, x], 4), ([ended], 4), ([counted], 4), ([], 4)]

    script = script_of("a") + script_of("z") + script_of("e") + script_of("X")
    scripted(test, script)


def test_a_router_without_marks_gets_the_rest_too() -> None:
    """Tokens and characters alone say what was shown; then the end comes once more."""

    async def test(site: Site) -> None:
        ids = script_of(TEXT)[:3]
        body = site.fields(ROUTES[0], max_tokens=3)
        rest = await site.send(ROUTES[0], body, shown(3, len(TOKENIZER.decode(ids))), pack_tokens(ids))
        events = blocks_of(gathered(rest.content).events)
        assert [b'"finish_reason":"length"' in event for event in events] == [True, False]
        late = await site.send(ROUTES[0], body, shown(3, 1), pack_tokens(ids))
        texts = [
            json.loads(event[6:])["choices"][0]["delta"].get("content")
            for event in blocks_of(late.content.split(b"\n", 1)[1])[:1]
        ]
        assert texts == [TOKENIZER.decode(ids)[1:]]

    scripted(test)


def test_prompt_ids_stand_before_the_generated_ones() -> None:
    async def test(site: Site) -> None:
        body = site.fields(ROUTES[1], max_tokens=5)
        whole = await site.send(ROUTES[1], body, STATE)
        prompt, tokens = TOKENIZER.encode(site.prompt), script_of(TEXT)[:2]
        state = shown(2, len(TOKENIZER.decode(tokens)))
        ids = pack_tokens(prompt + tokens)
        rest = await site.send(ROUTES[1], body, state, ids, len(prompt))
        assert rest.status_code == 200
        assert gathered(whole.content).events.endswith(gathered(rest.content).events)

    scripted(test)


def test_continued_streams_are_counted_and_their_tokens_are_in_the_usage() -> None:
    async def test(site: Site) -> None:
        body = site.fields(ROUTES[1], max_tokens=6, **USAGE)
        whole = await site.send(ROUTES[1], body, STATE)
        first = script_of(TEXT)[:1]
        state = shown(1, len(TOKENIZER.decode(first)))
        rest = await site.send(ROUTES[1], body, state, pack_tokens(first))
        usages = [re.findall(rb'"(?:prompt|completion|total)_tokens":[0-9]+', r.content) for r in (whole, rest)]
        assert usages[0] == usages[1]
        assert len(usages[0]) == 3
        metrics = site.parts.metrics.render().decode()
        assert 'pagefleet_engine_resumed_requests_total{model_name="m"} 1.0' in metrics

    scripted(test)


def content_of(stream: bytes) -> tuple[str, list[str]]:
    """Return the text of a stream, and the rest of its events in order."""
    text, others = "", []
    for block in blocks_of(stream):
        event = json.loads(block[6:]) if b"[DONE]" not in block else {}
        choice = event["choices"][0] if event.get("choices") else {}
        piece = choice["delta"].pop("content", "") if "delta" in choice else choice.pop("text", "")
        text += piece
        if not piece or choice["finish_reason"]:
            others.append(json.dumps(event))
    return text, others


@pytest.mark.parametrize("route", ROUTES)
def test_a_slow_reader_s_merged_events_are_continued_too(route: str) -> None:
    async def test(site: Site) -> None:
        one_by_one = site.engine.generate

        async def merged(asked: Generation) -> Chunks:
            waiting: list[Chunk] = []
            async with aclosing(one_by_one(asked)) as chunks:
                async for _, chunk in chunks:
                    waiting.append(chunk)
                    if len(waiting) == 4 or chunk.finish_reason is not None:
                        yield 0, merge_chunks(waiting)
                        waiting.clear()

        site.engine.generate = merged  # type: ignore[method-assign]
        body = site.fields(route, max_tokens=22, stop=["and the"], **USAGE)
        blocks = blocks_of((await site.send(route, body, STATE)).content)
        whole = content_of(without_cached(gathered(b"".join(blocks)).events))
        for count in range(1, len(blocks)):
            before = gathered(b"".join(blocks[:count]))
            rest = await site.send(route, body, before.state, before.packed)
            assert content_of(without_cached(before.events + gathered(rest.content).events)) == whole

    scripted(test)


def test_an_error_amid_a_stream_has_no_note() -> None:
    async def test(site: Site) -> None:
        good = site.engine.generate

        async def failing(asked: Generation) -> Chunks:
            async with aclosing(good(asked)) as chunks:
                yield await anext(chunks)
            raise RequestFailed("it broke")

        site.engine.generate = failing  # type: ignore[method-assign]
        answer = await site.send(ROUTES[1], site.fields(ROUTES[1]), STATE)
        first, error = blocks_of(answer.content)
        assert first.startswith(b":pf ")
        assert error.startswith(b'data: {"error":')

    scripted(test)


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11, "top_p": 0.95, "top_k": 200},
    "penalties": {
        "temperature": 1.3,
        "seed": 5,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "min tokens": {"temperature": 0.9, "seed": 3, "min_tokens": 8, "stop": ["e", "a"]},
}


@asynccontextmanager
async def open_model(model: str, load_format: LoadFormat) -> AsyncIterator[Site]:
    from pagefleet_engine.engine_core.build import build_core  # torch takes seconds, and most tests here need none

    config = EngineConfig(
        model=ModelConfig(model=model, load_format=load_format, dtype="float32", num_threads=1, max_model_len=CONTEXT),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        cache=CacheConfig(num_kv_blocks=16),
    )
    core, _ = build_core(config)
    async with open_site(core, load_tokenizer(resolve_model_folder(model))) as site:
        yield site
    core.shutdown()


def test_a_random_model_goes_on_as_it_would_have(tmp_path: Path) -> None:
    """Its answers are full of broken characters."""

    async def run() -> None:
        async with open_model(str(write_small_model(tmp_path / "small")), "dummy") as site:
            for index, sampled in enumerate(SAMPLED):
                await check_every_cut(site, ROUTES[index % 2], max_tokens=12, **SAMPLED[sampled], **USAGE)

    asyncio.run(run())


def test_the_model_of_the_repository_goes_on_as_it_would_have() -> None:
    async def run() -> None:
        async with open_model("builtin://tiny", "auto") as site:
            await check_every_cut(site, ROUTES[0], max_tokens=8, **USAGE)
            await check_every_cut(site, ROUTES[1], max_tokens=8, **SAMPLED["penalties"])

    asyncio.run(run())

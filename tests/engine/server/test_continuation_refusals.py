"""What cannot be continued, and what no router sends: refused with a reason, and nobody else notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pagefleet_protocol.handoff import (
    ENDED,
    OPENED,
    STREAM,
    Shown,
    StreamState,
    pack_tokens,
)

from tests.fakes.inline_engine import CONTEXT
from tests.fakes.stream_site import (
    ROUTES,
    STATE,
    TEXT,
    TOKENIZER,
    Site,
    script_of,
    scripted,
    shown,
    without_cached,
    without_names,
)


@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_that_is_no_stream_has_no_notes_and_says_so(route: str) -> None:
    async def test(site: Site) -> None:
        body = site.fields(route, max_tokens=4, stream=False)
        answer = await site.send(route, body, STATE)
        assert answer.status_code == 200
        assert b":pf " not in answer.content
        assert STATE.answer_id.encode() not in answer.content
        refused = await site.send(route, body, shown(1, 3), pack_tokens(script_of("The")))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "cannot_resume")

    scripted(test)


FIRST = script_of(TEXT)[:1]
HOSTILE: dict[str, tuple[StreamState, bytes]] = {
    "fewer ids than told": (shown(9_999), pack_tokens(FIRST)),
    "far more ids than anything": (shown(999_999_999), b""),
    "more ids than the context": (shown(CONTEXT + 4), pack_tokens(FIRST * (CONTEXT + 4))),
    "ids that reach into the JSON": (shown(2), pack_tokens(FIRST)),
    "half an id": (shown(1), b"\0\0"),
    "an id of no vocabulary": (shown(1), pack_tokens([400])),
    "a large id": (shown(1), pack_tokens([2**32 - 9])),
    "more text than there is": (shown(1, 99), pack_tokens(FIRST)),
    "text without tokens": (shown(1, 1), pack_tokens([OPENED])),
    "text without anything": (shown(0, 1), b""),
    "more tokens than asked for": (shown(5), pack_tokens(FIRST * 5)),
    "tokens after the end": (shown(2), pack_tokens([TOKENIZER.eos_token_ids[0], *FIRST])),
    "tokens after a stop string": (shown(4), pack_tokens([*script_of("end"), *FIRST])),
    "more choices than asked for": (replace(STATE, choices=(Shown(1, 1), Shown(1, 1))), pack_tokens(FIRST * 2)),
    "an end that is none": (shown(2, 1), pack_tokens([*FIRST, ENDED])),
}


def test_what_no_router_sends_is_refused_and_harms_nobody() -> None:
    async def test(site: Site) -> None:
        canary = (await site.send(ROUTES[1], site.fields(ROUTES[1], max_tokens=9))).content
        for route in ROUTES:
            body = site.fields(route, max_tokens=4, stop=["end"])
            for name, (state, ids) in HOSTILE.items():
                answer = await site.send(route, body, state, ids)
                assert answer.status_code == 400, (name, answer.text)
            for value in (
                "",
                "id=1",
                STATE.encode() + ";x",
                STATE.encode().replace("tokens=0", "tokens=0,0"),
                STATE.encode().upper(),
            ):
                answer = await site.http.post(route, content=body, headers={STREAM: value})
                assert answer.status_code == 400
        assert site.engine.core.stats().kv_usage == 0
        again = (await site.send(ROUTES[1], site.fields(ROUTES[1], max_tokens=9))).content
        assert without_cached(without_names(again)) == without_cached(without_names(canary))

    scripted(test)

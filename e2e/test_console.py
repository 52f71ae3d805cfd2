"""The console over a whole fleet, in Chromium: an engine is killed under a chat, which goes on; the page says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.fleet_process import FleetProcess
from tests.fakes.chromium import Chromium, Page, opened_chromium

pytestmark = pytest.mark.fleet

NUM_TOKENS = 999
RUNNING = "pagefleet_engine_requests_running"
STREAMING = "document.querySelector('.answer > .prose')?.textContent.length > 100"
# Has answers last for as long as a test needs them to; the page itself asks for no such thing.
ASK_FOR_LONG = f"""(() => {{
    const asks = window.fetch;
    window.fetch = (path, how) => asks(path, how?.method !== "POST" ? how :
        {{...how, body: JSON.stringify({{...JSON.parse(how.body), ignore_eos: true, max_tokens: {NUM_TOKENS}}})}});
}})()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    yield from opened_chromium(tmp_path_factory.mktemp("chromium"))


def names(page: Page) -> list[str]:
    found: list[str] = page.run("[...document.querySelectorAll('.engines tbody tr')].map((one) => one.innerText)")
    return sorted(text.split()[0] for text in found if "\tready" in text.replace("\n", "\t"))


def explain_last_request(page: Page) -> str:
    """Return what the page says of it."""
    page.run("location.hash = '#requests'")
    page.wait("document.querySelector('.requests tbody button')")
    page.click(".requests tbody button")
    page.wait("document.querySelector('.steps li')")
    return page.text(".steps")


def test_a_chat_outlives_its_engine_and_the_page_says_what_happened(chromium: Chromium, tmp_path: Path) -> None:
    with FleetProcess(tmp_path, replicas=2, router={"explain": True}) as fleet:
        fleet.until(lambda: fleet.serves(2))
        with chromium.page(f"{fleet.url}/#fleet", height=980) as page:
            page.wait("document.querySelector('#health').textContent.includes('2 of 2 ready')")
            assert names(page) == ["tiny-engine-0", "tiny-engine-1"]
            page.run("location.hash = '#chat'")
            page.run(ASK_FOR_LONG)
            page.wait("document.querySelector('.welcome h1')?.textContent.includes('tiny')")
            page.type("What is a KV cache?")
            page.press("Enter")
            page.wait(STREAMING)
            with fleet.frozen("tiny-engine-0", "tiny-engine-1"):
                (victim,) = (name for name, series in fleet.engine_metrics().items() if series[RUNNING])
                os.kill(fleet.pids()[victim], signal.SIGKILL)
            fleet.until(lambda: page.run("document.querySelector('.why')?.hidden") is False)
            assert page.text(".turn:last-child .tally").startswith(f"{NUM_TOKENS} tokens")
            assert not page.run("document.querySelector('.trouble:not([hidden])')")
            assert page.text(".why summary") == f"Answered by {victim}", "it began there"
            page.run("document.querySelector('.why summary').click()")
            weighed = page.text(".why table")
            assert "tiny-engine-0" in weighed
            assert "tiny-engine-1" in weighed

            (other,) = {"tiny-engine-0", "tiny-engine-1"} - {victim}
            steps = explain_last_request(page)
            assert f"{victim} was tried, and failed it." in steps
            assert f"{other} got its prompt" in steps
            assert f"with {NUM_TOKENS} tokens: 200." in steps

            page.run("location.hash = '#fleet'")
            page.wait(f"document.querySelector('.fleet').innerText.includes('Engine {victim} was lost')")
            assert "Its log says why: the most frequent reason is a lack of memory." in page.text(".fleet")
            page.wait("document.querySelector('#health').textContent.includes('2 of 2 ready')")
            assert page.complaints == []

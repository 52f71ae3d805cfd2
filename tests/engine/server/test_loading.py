"""The port while the engine loads: what it answers, and what is told in a log and in a terminal."""

from __future__ import annotations

import asyncio
import io
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from pagefleet_engine.server.access import ApiKeys
from pagefleet_engine.server.lifecycle import FrontDoor, bind
from pagefleet_engine.server.loading import Loading, LoadingApp, LoadingLines, Terminal, bar, loading_page, tell_loading
from pagefleet_protocol.console_state import STATE_PATH, decode_state
from pagefleet_protocol.load_progress import LoadProgress, decode_loading
from pagefleet_protocol.settings.log import LineFormatter, can_erase
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.fakes.http_faults import Fault
from tests.fakes.hub_server import tiny_hub
from tests.fakes.screen import TerminalProgram

GIB = 2**30
HALF = LoadProgress("weights", GIB, 2 * GIB, 3.0)


async def served(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


def with_door(test: Callable[[FrontDoor, httpx.AsyncClient], Awaitable[None]], page: ASGIApp | None = None) -> None:
    async def run() -> None:
        with bind("127.0.0.1", 0) as listener:
            async with (
                httpx.AsyncClient(base_url=listener.url, timeout=60) as http,
                FrontDoor(listener.sock, LoadingApp(lambda: HALF, page)) as door,
            ):
                while True:
                    try:
                        await http.get("/livez")
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.01)
                await test(door, http)

    asyncio.run(run())


def test_a_port_that_loads_says_how_far_it_is_and_closes() -> None:
    async def test(door: FrontDoor, http: httpx.AsyncClient) -> None:
        live, ready = await http.get("/livez"), await http.get("/readyz")
        assert (live.status_code, ready.status_code) == (200, 503)
        assert decode_loading(ready.content) == HALF
        assert ready.headers["connection"] == "close"
        assert (await http.get("/health")).content == ready.content
        for path in ("/v1/chat/completions", "/v1/messages", "/metrics", "/nowhere"):
            refused = await http.post(path, content=b"x" * 100_000)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "engine_loading"
        assert (await http.post("/v1/messages")).json()["type"] == "error"

    with_door(test)


BROWSER = {"accept": "text/html,application/xhtml+xml"}
KEY = "k" * 32


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_browser_gets_the_console_while_the_engine_loads(has_keys: bool) -> None:
    keys = ApiKeys([KEY]) if has_keys else None

    async def test(door: FrontDoor, http: httpx.AsyncClient) -> None:
        page = await http.get("/", headers=BROWSER)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await http.get("/console/app.js")).status_code == 200
        assert (await http.get("/console/nothing.js")).status_code == 404
        for program in ("/", "/v1/models", "/docs"):
            assert (await http.get(program)).json()["error"]["code"] == "engine_loading"
        assert [(await http.get(probe)).status_code for probe in ("/livez", "/readyz")] == [200, 503]
        plain = await http.get(STATE_PATH)
        assert plain.status_code == (401 if has_keys else 200)
        assert (await http.get(f"{STATE_PATH}?api_key={KEY}")).status_code == 400
        state = decode_state((await http.get(STATE_PATH, headers={"authorization": f"Bearer {KEY}"})).content)
        (engine,) = state.engines
        assert (engine.phase, engine.load, engine.model) == ("loading", 0.5, "org/tiny")
        assert engine.reason == "reads weights: 50%, 1.0 of 2.0 GiB"
        assert state.service.models == ()

    with_door(test, loading_page("org/tiny", lambda: HALF, keys))


def test_without_a_console_a_browser_gets_what_programs_get() -> None:
    async def test(door: FrontDoor, http: httpx.AsyncClient) -> None:
        for path in ("/", "/console/app.js", STATE_PATH):
            answer = await http.get(path, headers=BROWSER)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_loading")

    with_door(test)


def test_an_opened_door_answers_at_once_with_the_headers_of_the_engine() -> None:
    async def test(door: FrontDoor, http: httpx.AsyncClient) -> None:
        assert "x-engine" not in (await http.get("/readyz")).headers
        door.open(served, (("X-Engine", "one"),))
        answer = await http.get("/readyz")
        assert (answer.text, answer.headers["x-engine"]) == ("served", "one")
        await asyncio.sleep(1.2)  # uvicorn makes its own headers anew once a second
        assert (await http.get("/readyz")).headers["x-engine"] == "one"

    with_door(test)


def test_a_log_has_a_line_for_each_phase_and_now_and_then_one_of_a_long_one() -> None:
    lines = LoadingLines()
    moments = (
        LoadProgress("starting"),
        LoadProgress("imports", seconds=1.0),
        LoadProgress("imports", seconds=5.0),
        LoadProgress("weights", seconds=6.0),
        LoadProgress("weights", GIB // 2, 2 * GIB, 6.5),
        LoadProgress("weights", GIB, 2 * GIB, 16.0),
        LoadProgress("weights", GIB, 2 * GIB, 16.5),
        LoadProgress("kv_pool", seconds=17.0),
        LoadProgress("graphs", seconds=17.4),
        LoadProgress("graphs", 1, 9, seconds=18.0),
    )
    seen = [lines.next_line(progress) for progress in moments]
    assert [line for line in seen if line] == [
        "loading: reads weights: 25%, 0.5 of 2.0 GiB",
        "loading: reads weights: 50%, 1.0 of 2.0 GiB",
        "loading: captures graphs: 1 of 9",
    ]


def test_a_download_is_followed_and_then_the_engine() -> None:
    loading = Loading()
    assert loading.progress().phase == "starting"
    loading.download.expect(4 * GIB, 2)
    loading.download.begin("downloading")
    loading.download.add_bytes(GIB)
    told = loading.progress()
    assert (told.phase, told.share) == ("download", 0.25)
    assert told.describe().startswith("downloads the model: 25%, 1.0 of 4.0 GiB, ")
    assert told.describe().endswith("/s")
    loading.follow(lambda: [HALF])
    assert loading.progress() == HALF


def test_what_is_here_is_verified_and_not_downloaded() -> None:
    loading = Loading()
    loading.download.expect(4 * GIB, 2)
    loading.download.begin("verifying")
    loading.download.add_found(GIB)
    assert loading.progress().describe() == "verifies the model's files: 25%, 1.0 of 4.0 GiB"


@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
def test_a_bar_fits_the_terminal(width: int) -> None:
    for progress in (HALF, LoadProgress("graphs"), LoadProgress("weights", 2 * GIB, 2 * GIB, 100.0)):
        assert len(bar(progress, width, ("#", "-"))) < max(width, 1) + (width == 1)
    if width >= 80:
        assert bar(HALF, width, ("#", "-")) == "###############--------------- reads weights: 50%, 1.0 of 2.0 GiB, 3 s"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def tell_for_a_moment(terminal: Terminal | None, ranks: int = 1) -> None:
    async def run() -> None:
        began = time.monotonic()
        progress = lambda: [LoadProgress("weights", GIB, 2 * GIB, 3.0 + time.monotonic() - began)] * ranks  # noqa: E731
        telling = asyncio.create_task(tell_loading(progress, terminal))
        await asyncio.sleep(1.0)
        telling.cancel()
        await asyncio.wait({telling})

    asyncio.run(run())


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind() -> None:
    screen = Screen()
    assert Terminal.of(screen, {"TERM": "dumb"}) is None
    assert Terminal.of(io.StringIO(), {"TERM": "xterm"}) is None
    tell_for_a_moment(Terminal.of(screen, {"TERM": "xterm"}))
    written = screen.getvalue()
    assert "reads weights: 50%" in written
    assert written.endswith("\r\x1b[K")
    assert "\n" not in written


def test_a_log_gets_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = logging.getLogger("pagefleet_engine")  # as it is before a server that another test began has set it up
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", True)
    with caplog.at_level(logging.INFO, "pagefleet_engine.server.loading"):
        tell_for_a_moment(None)
    assert caplog.messages == ["loading: reads weights: 50%, 1.0 of 2.0 GiB"]
    caplog.clear()
    with caplog.at_level(logging.INFO, "pagefleet_engine.server.loading"):
        tell_for_a_moment(None, ranks=2)
    assert caplog.messages == [f"rank {rank}: loading: reads weights: 50%, 1.0 of 2.0 GiB" for rank in range(2)]


def test_every_rank_has_a_bar_and_none_stays() -> None:
    screen = Screen()
    tell_for_a_moment(Terminal.of(screen, {"TERM": "xterm"}), ranks=3)
    *drawn, last = screen.getvalue().split("\x1b[2A")
    assert last == ""
    for rank, line in enumerate(drawn[0].split("\n")):
        assert line.startswith(f"\r\x1b[Krank {rank}: ")
        assert "reads weights: 50%" in line
    assert drawn[-1] == "\r" + "\n".join(["\r\x1b[K"] * 3)


@pytest.mark.fleet
@pytest.mark.parametrize("columns", [80, 200])
def test_lines_of_the_log_are_written_over_the_bar(columns: int) -> None:
    command = [sys.executable, "-m", "pagefleet_engine.cli", "builtin://tiny", "--port", "0", "--num-kv-blocks", "64"]
    with TerminalProgram(command, columns, 30) as program:
        program.wait_for("imports libraries, ", 120)
        text = program.wait_for("INFO server: serving tiny on", 120)
        assert "imports libraries" not in text
        assert all(line[:4].isdigit() for line in text.splitlines() if " INFO " in line), (
            "no line begins behind a rest of the bar"
        )
        program.process.send_signal(signal.SIGINT)
        assert program.wait() == 0


@pytest.mark.fleet
def test_a_download_has_the_same_bar_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    with tiny_hub() as hub:
        hub.faults["model.safetensors"] = [Fault("stall", after=300_000)]
        folders = dict.fromkeys(("XDG_CACHE_HOME", "HF_HOME"), str(tmp_path))
        command = [sys.executable, "-m", "pagefleet_engine.cli", "org/tiny", "--port", "0"]
        with TerminalProgram(command, 120, 30, {**folders, "HF_ENDPOINT": hub.url}) as program:
            program.wait_for("downloads the model: ", 120)
            program.wait_for("█")
            program.type("\x03")
            assert program.wait() == 0
            assert b"Traceback" not in program.written
            assert "downloads" not in program.text, "the bar leaves nothing behind"


def test_a_log_that_no_terminal_shows_has_no_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    assert not can_erase(io.StringIO(), {"TERM": "xterm"})
    assert not can_erase(Screen(), {"TERM": "dumb"})
    assert can_erase(Screen(), {"TERM": "xterm"})
    record = logging.LogRecord("any", logging.INFO, "file", 1, "text\x1b[K", None, None)
    assert LineFormatter("server").format(record).endswith("INFO server: text\\x1b[K")
    assert LineFormatter("server", over_a_bar=True).format(record).startswith("\x1b[K2")

"""`pagefleet serve --api-server-count N`: one engine, whoever of its API processes is asked, and whoever dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagefleet_protocol import metric_names
from pagefleet_protocol.console_state import STATE_PATH, decode_state
from pagefleet_protocol.engine_facts import FACTS_PATH, TEXT_PATH, decode_facts, text_digest

from tests.engine.server.test_process import PATIENCE_S, ServerProcess, _is_alive
from tests.fakes.slow_requests import SLOW, slow

pytestmark = pytest.mark.fleet

MODEL = "builtin://tiny"
NUM = 12
"""Connections that Linux spreads over two processes."""
NUM_SPREAD = 40
"""All of them go to one once in 2 ** 39 runs."""
SILENT = "pagefleet_engine_silent_api_processes_total"
RESTARTS = "pagefleet_engine_api_process_restarts_total"
RANKS_RUNNING = "pagefleet_engine_rank_requests_running"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess(MODEL, "--api-server-count", "2", "--max-model-len", "2048")
    yield server
    assert server.stop() == 0


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start_one(*flags: str) -> ServerProcess:
        started.append(ServerProcess(MODEL, "--api-server-count", "2", SLOW, *flags))
        return started[-1]

    yield start_one
    for server in started:
        server.stop()


def api_pid(server: ServerProcess) -> int:
    """Of the process beside the first."""
    (pid,) = (pid for pid in server.core_pids if b"api_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


def core_pid(server: ServerProcess) -> int:
    (pid,) = set(server.core_pids) - {api_pid(server)}
    return pid


def ask(server: ServerProcess, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    """Ask over a connection of its own."""
    body = {"model": "small", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, **fields}
    return httpx.post(server.url + path, json=body, timeout=PATIENCE_S)


def page_of_all(server: ServerProcess) -> str:
    """Return figures in which neither process is left out, as one that the machine stalls is."""
    silent: float | None = None
    while True:
        page = get(server, "/metrics").text
        now = sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(SILENT + " "))
        if now in (0.0, silent):
            return page
        silent = now


def get(server: ServerProcess, path: str, **query: str) -> httpx.Response:
    return httpx.get(server.url + path, params=query, timeout=PATIENCE_S)


class Streams:
    """Long requests, each over a connection of its own, none of which ends before `until` is there.

    The last `in_turn` begin one after another.
    """

    def __init__(
        self, server: ServerProcess, num: int = NUM, until: Path | None = None, in_turn: int = 0, **fields: Any
    ) -> None:
        self.texts = [""] * num
        """What came, up to now."""
        self.broken = [False] * num
        body = {"model": "small", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, **fields}
        body["vllm_xargs"] = slow(until)
        self._threads = [
            threading.Thread(target=self._run, args=(index, server.url, body), daemon=True) for index in range(num)
        ]
        for index, thread in enumerate(self._threads):
            if index >= num - in_turn:
                self._come(server, index)
            thread.start()
        self._come(server, num)

    def _come(self, server: ServerProcess, num: int) -> None:
        server.wait_until(lambda: all(self.texts[:num]))

    def _run(self, index: int, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=PATIENCE_S) as response:
                for piece in response.iter_text():
                    self.texts[index] += piece
        except httpx.TransportError:
            self.broken[index] = True

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_whoever_is_asked_answers_for_one_engine(server: ServerProcess) -> None:
    with ThreadPoolExecutor(NUM) as pool:
        answers = [one.json() for one in pool.map(lambda _: ask(server), range(NUM))]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    generated = metric_names.ENGINE_GENERATION_TOKENS
    expected = f'{generated}{{model_name="small"}} {6.0 * NUM}'
    idle = f'{metric_names.ENGINE_REQUESTS_RUNNING}{{model_name="small"}} 0.0'

    def all_tell() -> bool:  # once the core has told both processes that it is at rest
        pages = [page_of_all(server) for _ in range(NUM)]
        return all(expected in page and idle in page for page in pages)

    server.wait_until(all_tell)
    facts = {get(server, FACTS_PATH).content for _ in range(NUM)}
    assert len(facts) == 1
    texts = {get(server, TEXT_PATH).content for _ in range(NUM)}
    assert {text_digest(text) for text in texts} == {decode_facts(facts.pop()).text_digest}
    assert {get(server, "/v1/models").text for _ in range(NUM)} == {get(server, "/v1/models").text}

    def state_of_all() -> tuple[int, int]:  # of both processes, unless the machine stalls one
        state = decode_state(get(server, STATE_PATH).content)
        return state.workers, len(state.requests)

    server.wait_until(lambda: state_of_all() == (2, NUM))


def test_stored_responses_are_found_from_everywhere(server: ServerProcess) -> None:
    asked = {"model": "small", "input": "Once upon a time", "max_output_tokens": 16}
    made = [httpx.post(server.url + "/v1/responses", json=asked, timeout=PATIENCE_S).json() for _ in range(3)]
    for one in made:
        assert {get(server, f"/v1/responses/{one['id']}").json()["id"] for _ in range(NUM)} == {one["id"]}
    then = [
        httpx.post(
            server.url + "/v1/responses", json={**asked, "previous_response_id": made[0]["id"]}, timeout=PATIENCE_S
        )
        for _ in range(NUM)
    ]
    assert {answer.status_code for answer in then} == {200}
    assert httpx.delete(f"{server.url}/v1/responses/{made[0]['id']}", timeout=PATIENCE_S).json()["deleted"]
    assert {get(server, f"/v1/responses/{made[0]['id']}").status_code for _ in range(NUM)} == {404}


def test_what_runs_without_its_client_is_followed_and_cancelled_from_everywhere(server: ServerProcess) -> None:
    asked = {"model": "small", "input": "Tell", "max_output_tokens": 1900, "ignore_eos": True}
    asked |= {"background": True, "stream": True}
    core = core_pid(server)
    os.kill(core, signal.SIGSTOP)  # so that nothing ends
    try:
        with httpx.stream("POST", server.url + "/v1/responses", json=asked, timeout=PATIENCE_S) as response:
            events = response.iter_lines()
            created = next(json.loads(line[6:]) for line in events if line.startswith("data: "))
            path = f"/v1/responses/{created['response']['id']}"
        for _ in range(NUM):
            with httpx.stream("GET", server.url + path, params={"stream": "true"}, timeout=PATIENCE_S) as followed:
                assert "response.created" in next(followed.iter_lines())
        assert get(server, path).json()["status"] in ("queued", "in_progress")
        assert httpx.post(f"{server.url}{path}/cancel", timeout=PATIENCE_S).json()["status"] == "cancelled"
        assert get(server, path).json()["status"] == "cancelled"
    finally:
        os.kill(core, signal.SIGCONT)
    server.wait_until(lambda: server.running() == 0)


def test_a_body_that_is_too_long_is_refused_by_all(server: ServerProcess) -> None:
    long = {"model": "small", "input": "x" * (9 * 2**20)}
    assert {httpx.post(server.url + "/v1/responses", json=long, timeout=PATIENCE_S).status_code for _ in range(6)} == {
        413
    }


def test_without_the_key_no_body_is_waited_for(start: Callable[..., ServerProcess]) -> None:
    server = start("--api-key", "secret")
    head = (
        b"POST /v1/responses HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    )
    for _ in range(NUM):
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 20) as client:
            client.sendall(head)
            assert client.recv(12) == b"HTTP/1.1 401"


def test_clients_that_leave_end_their_requests(server: ServerProcess) -> None:
    for path in ("/v1/completions", "/v1/responses"):
        body: dict[str, Any] = {"model": "small", "stream": True, "ignore_eos": True}
        body |= {"prompt": "Once", "max_tokens": 1900} if path == "/v1/completions" else {"input": "Once"}
        with contextlib.ExitStack() as open_streams:
            for _ in range(6):
                stream = httpx.stream("POST", server.url + path, json=body, timeout=PATIENCE_S)
                next(open_streams.enter_context(stream).iter_lines())
        server.wait_until(lambda: server.running() == 0)


def test_a_process_that_dies_takes_its_own_requests_only(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = start("--data-parallel-size", "2")
    is_dead = tmp_path / "dead"
    # Processes that choose at the same moment may choose the same rank: what comes in turn makes up for it.
    streams, victim = Streams(server, NUM_SPREAD, is_dead, in_turn=4, max_tokens=600), api_pid(server)
    # Each process knows what the other gave the ranks.
    server.wait_until(lambda: server.gauges(RANKS_RUNNING) == [NUM_SPREAD / 2] * 2)
    os.kill(victim, signal.SIGKILL)
    is_dead.touch()
    streams.join()
    assert 0 < sum(streams.broken) < NUM_SPREAD
    whole = [text.endswith("data: [DONE]\n\n") for text in streams.texts]
    assert whole == [not broken for broken in streams.broken]
    server.wait_until(lambda: server.running() == 0)
    server.wait_until(lambda: server.gauge(RESTARTS) == 1 and not _is_alive(victim))
    with ThreadPoolExecutor(NUM) as pool:
        assert {one.status_code for one in pool.map(lambda _: ask(server), range(NUM))} == {200}
    server.wait_until(lambda: server.running() == 0)


def test_a_core_that_dies_ends_all(start: Callable[..., ServerProcess]) -> None:
    server = start()
    streams, other = Streams(server, max_tokens=1900), api_pid(server)
    os.kill(core_pid(server), signal.SIGKILL)
    assert server.process.wait(PATIENCE_S) == 1
    streams.join()
    assert all('"code":"engine_dead"' in text for text in streams.texts)
    server.wait_until(lambda: not _is_alive(other))


def test_the_first_process_takes_all_with_it(start: Callable[..., ServerProcess]) -> None:
    server = start()
    streams, children = Streams(server, max_tokens=1900), server.core_pids
    server.process.kill()
    server.wait_until(lambda: not any(map(_is_alive, children)))
    streams.join()
    ended = [
        broken or '"code":"engine_dead"' in text for broken, text in zip(streams.broken, streams.texts, strict=True)
    ]
    assert all(ended)


def test_a_signal_lets_the_requests_of_all_end(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server, is_told = start("--drain-timeout", "600"), tmp_path / "told"
    streams, children = Streams(server, until=is_told), server.core_pids
    server.process.send_signal(signal.SIGTERM)
    is_told.touch()
    streams.join()
    assert server.process.wait(PATIENCE_S) == 0
    assert all(text.endswith("data: [DONE]\n\n") for text in streams.texts)
    assert not any(map(_is_alive, children))


def test_what_may_wait_is_counted_over_all(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = start("--max-num-seqs", "2", "--max-num-queued-reqs", "1", "--max-num-batched-tokens", "64")
    may_end = tmp_path / "end"
    long: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "vllm_xargs": slow(may_end)}
    with ThreadPoolExecutor(NUM) as pool:
        answers = [pool.submit(ask, server, **long) for _ in range(NUM)]
        try:
            server.wait_until(lambda: sum(answer.done() for answer in answers) >= NUM - 3)
        finally:
            may_end.touch()
        statuses = [answer.result().status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) <= 3, "two that run, and one that waits"

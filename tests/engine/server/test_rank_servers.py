"""Data ranks with ports of their own: each is an engine, which a router balances and whose loss it survives."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from pagefleet_engine.server.rank_servers import ProbeAnswer, lives, readiness
from pagefleet_protocol import headers
from pagefleet_protocol import metric_names as names
from pagefleet_protocol.engine_facts import FACTS_PATH, decode_facts
from pagefleet_protocol.load_progress import LoadProgress, decode_loading, encode_loading

from tests.engine.server.test_process import PATIENCE_S
from tests.fakes.fleet_processes import all_gone, child_pids
from tests.fakes.free_ports import free_ports

OK, REFUSED, SILENT, FAILING = ProbeAnswer(200), ProbeAnswer(0), ProbeAnswer(-1), ProbeAnswer(503)


def loading(progress: LoadProgress) -> ProbeAnswer:
    return ProbeAnswer(503, encode_loading(progress))


def test_every_rank_has_to_live_and_one_that_starts_does() -> None:
    assert lives([OK, REFUSED])[0] == 200
    status, body = lives([OK, SILENT, FAILING])
    assert status == 503
    assert msgspec.json.decode(body)["ranks"] == [1, 2]


def test_ready_is_who_has_loaded_all_and_then_has_any() -> None:
    behind, ahead = LoadProgress("weights", 1, 4), LoadProgress("warm_up")
    status, body = readiness([loading(ahead), loading(behind)], ready_once=False, stopping=False)
    assert (status, decode_loading(body)) == (503, behind)
    assert readiness([OK, loading(ahead)], ready_once=False, stopping=False)[0] == 503
    status, body = readiness([OK, REFUSED], ready_once=True, stopping=False)
    assert (status, msgspec.json.decode(body)["ranks"]) == (200, [0])
    assert readiness([SILENT, REFUSED], ready_once=True, stopping=False)[0] == 503
    assert readiness([OK, OK], ready_once=True, stopping=True)[0] == 503


class Process:
    """A program of ours, and what it says."""

    def __init__(self, module: str, *flags: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", module, *flags], stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(iter(self.process.stderr.readline, ""))
        self.process.stderr.close()

    def until(self, condition: Callable[[], Any]) -> None:
        started = time.monotonic()
        while not self._holds(condition):
            assert self.process.poll() is None, "".join(self.log)
            assert time.monotonic() - started < PATIENCE_S, "".join(self.log)
            time.sleep(0.02)

    def _holds(self, condition: Callable[[], Any]) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return bool(condition())
        return False

    def ended(self) -> int:
        status = self.process.wait(PATIENCE_S)
        self._reader.join(10)
        return status

    def stop(self) -> int:
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
        return self.ended()


class Ranks(Process):
    """`pagefleet serve` of two ranks with ports of their own."""

    def __init__(self, model: str = "builtin://tiny", *flags: str) -> None:
        self.port, events = free_ports(3), free_ports(6)
        self.urls = [f"http://127.0.0.1:{self.port + rank}" for rank in range(2)]
        settings = ("--served-model-name", "m", "--num-threads", "2", "--num-kv-blocks", "1024", "--dtype", "float32")
        ports = ("--port", str(self.port), "--kv-events-port", str(events))
        own = ("-dp", "2", "--data-parallel-multi-port-external-lb", *ports)
        super().__init__("pagefleet_engine.cli", model, *own, *settings, *flags)

    def ready(self) -> list[int]:
        """The ranks that are, once all have been."""
        answer = httpx.get(f"http://127.0.0.1:{self.port + 2}/readyz", timeout=10)
        return list(answer.json()["ranks"]) if answer.status_code == 200 else []

    def pids(self) -> list[int]:
        """Of the ranks' servers, in their order: each listens on its port."""
        found = {}
        for pid in child_pids(self.process.pid):
            sockets = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()}
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                port = int(fields[1].partition(":")[2], 16)
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets and port in (self.port, self.port + 1):
                    found[port] = pid
        return [pid for _, pid in sorted(found.items())]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    try:
        ranks.until(lambda: ranks.ready() == [0, 1])
        yield ranks
    finally:
        ranks.stop()


@pytest.fixture
def router(ranks: Ranks) -> Iterator[str]:
    port = free_ports()
    engines = (word for url in ranks.urls for word in ("--engine", url))
    router = Process("pagefleet_router.cli", *engines, "--model-name", "m", "--port", str(port), "--explain")
    url = f"http://127.0.0.1:{port}"
    try:
        router.until(lambda: 'pagefleet_router_endpoints{state="ready"} 2' in page_of(url))
        router.until(lambda: gauge(url, "pagefleet_router_kv_engines_followed") == 2)
        router.until(lambda: any("the tokenizer of " in line for line in router.log))
        yield url
    finally:
        router.stop()


def ask(url: str, prompt: str) -> tuple[str, str, int]:
    """Return the port that a router chose, the answer, and the prompt's full blocks."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    port, said = answer.headers.get(headers.ENGINE_ID, "").rpartition(":")[2], answer.json()
    return port, said["choices"][0]["text"], said["usage"]["prompt_tokens"] // 16


def page_of(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text


def gauge(url: str, name: str) -> float:
    lines = (line for line in page_of(url).splitlines() if line.startswith(f"{name} "))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def filled(ranks: Ranks, router: str, place: str) -> tuple[list[str], list[tuple[str, str, int]]]:
    """New prompts, each cached by a rank, as the router knows, and what `ask` is to say of them."""
    known = gauge(router, "pagefleet_router_kv_blocks")
    # Of more than `MIN_BODY_BYTES`, so that the router goes by blocks, and of no block that another place has too.
    prompts = [
        f"{place}, {name}: " + f"the {name} had a house in the {place}, " * 70 for name in ("fox", "bear", "owl", "cat")
    ]
    told = [
        (url.rpartition(":")[2], *ask(url, prompt)[1:]) for url, prompt in zip(ranks.urls * 2, prompts, strict=True)
    ]
    ranks.until(lambda: gauge(router, "pagefleet_router_kv_blocks") >= known + sum(one[2] for one in told))
    return prompts, told


@pytest.mark.fleet
def test_a_router_keeps_a_prefix_at_its_rank_and_goes_on_when_one_is_lost(ranks: Ranks, router: str) -> None:
    facts = [decode_facts(httpx.get(url + FACTS_PATH, timeout=PATIENCE_S).content) for url in ranks.urls]
    assert len({one.incarnation for one in facts}) == len({one.kv_events_port for one in facts}) == 2
    for place in ("wood", "city", "field", "cave"):
        late = gauge(router, names.ROUTER_PROMPTS_LATE)
        prompts, first = filled(ranks, router, place)
        again = [ask(router, prompt) for prompt in prompts]
        if gauge(router, names.ROUTER_PROMPTS_LATE) == late:
            break  # else the machine is so busy that the router went by the text
    assert again == first

    victim = ranks.pids()[0]
    core = child_pids(victim)
    os.kill(victim, signal.SIGKILL)
    assert [ask(router, prompt)[1] for prompt in prompts] == [one[1] for one in first]
    assert ranks.process.poll() is None
    ranks.until(lambda: ranks.ready() == [0, 1])
    assert ranks.pids()[0] != victim
    assert all_gone(core)


@pytest.mark.fleet
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_and_so_does_the_loss_of_who_started_them(ranks: Ranks, number: signal.Signals) -> None:
    pids = [one for pid in ranks.pids() for one in (pid, *child_pids(pid))]
    assert len(pids) == 4
    ranks.process.send_signal(number)
    assert ranks.ended() == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    assert all_gone(pids)


@pytest.mark.fleet
def test_a_rank_that_cannot_start_ends_all_and_says_why(tmp_path: Path) -> None:
    with socket.socket() as taken:
        ranks = Ranks(str(tmp_path / "none"))
        assert ranks.ended() == 3
        assert any(re.search("none", line) and "error:" in line for line in ranks.log)
        assert any(re.search(r"data rank [01] exited with status 3: see the log", line) for line in ranks.log)
        taken.bind(("127.0.0.1", free_ports()))
        taken.listen()
        busy = Process(
            "pagefleet_engine.cli", "builtin://tiny", "-dp", "2", "--data-parallel-multi-port-external-lb",
            "--port", str(taken.getsockname()[1] - 1),
        )  # fmt: skip
        assert busy.ended() == 1
        assert "give another host or port" in "".join(busy.log)

"""An engine of two data ranks under `pagefleet up`: two engines for its router, also with prefill and decode apart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from pagefleet_protocol import headers

from e2e.fleet_process import PATIENCE_S, SERVICE, FleetProcess
from tests.fakes.fleet_processes import child_pids

pytestmark = pytest.mark.fleet

READY = 'pagefleet_router_endpoints{state="ready"}'
FIRST = f"{SERVICE}-engine-0"
PROMPTS = [f"{name}: " + f"the {name} had a little house in the wood, " * 20 for name in ("fox", "bear", "owl", "cat")]


def route_to(fleet: FleetProcess, engines: Sequence[str]) -> bool:
    """Whether the router sends to these, and no others."""
    try:
        listed = [one.id for one in fleet.endpoints() if not one.draining and not one.coming]
        return sorted(listed) == sorted(engines) and fleet.metrics(fleet.url).get(READY) == len(engines)
    except (OSError, ValueError, httpx.TransportError):
        return False  # still starting


def ask(url: str, prompt: str) -> tuple[str, str]:
    """Return the engine that answered, and the answer."""
    body = {"model": SERVICE, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return reply.headers[headers.ENGINE_ID], reply.json()["choices"][0]["text"]


def ask_at_once(url: str, prompts: Sequence[str]) -> list[tuple[str, str]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(url, prompt), prompts))


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    with FleetProcess(tmp_path_factory.mktemp("data"), parallelism={"data": 2}) as fleet:
        fleet.until(lambda: route_to(fleet, [FIRST, f"{FIRST}.1"]))
        fleet.until(lambda: fleet.metrics(fleet.url).get("pagefleet_router_kv_engines_followed") == 2)
        yield fleet


def test_a_prefix_stays_with_its_rank_and_one_that_is_lost_takes_none_with_it(ranks: FleetProcess) -> None:
    first = ask_at_once(ranks.url, PROMPTS)
    assert {engine for engine, _ in first} == {FIRST, f"{FIRST}.1"}
    assert [ask(ranks.url, prompt) for prompt in PROMPTS] == first

    supervisor = ranks.pids()[FIRST]
    victim = child_pids(supervisor)[0]
    os.kill(victim, signal.SIGKILL)
    assert [ask(ranks.url, prompt)[1] for prompt in PROMPTS] == [text for _, text in first]
    ranks.until(lambda: len(child_pids(supervisor)) == 2 and ranks.metrics(ranks.url).get(READY) == 2)
    assert ranks.pids()[FIRST] == supervisor, "it is the rank that starts again, not the engine"
    assert [text for _, text in ask_at_once(ranks.url, PROMPTS)] == [text for _, text in first]


def test_prefill_ranks_compute_for_one_decode_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    both = {"prefill": {"parallelism": {"data": 2}}, "threshold": 1}
    engine = {"dtype": "float32"}
    with FleetProcess(tmp_path_factory.mktemp("apart"), disaggregation=both, engine=engine) as fleet:
        prefill, decode = f"{SERVICE}-prefill-0", f"{SERVICE}-decode-0"
        fleet.until(lambda: route_to(fleet, [prefill, f"{prefill}.1", decode]))
        found = ask_at_once(fleet.url, [f"Number {number}. {prompt}" for number in range(3) for prompt in PROMPTS])
        assert {name for name, _ in found} == {decode}
        assert fleet.received_blocks() > 0
        sent = "pagefleet_engine_kv_transfer_sent_blocks_total"
        own = {name: series[sent] for name, series in fleet.engine_metrics().items() if name != decode}
        assert min(own.values()) > 0, own
        alone = next(one.url for one in fleet.endpoints() if one.id == prefill)
        for (_, text), prompt in zip(found[:4], PROMPTS, strict=True):
            body = {"model": SERVICE, "prompt": f"Number 0. {prompt}", "max_tokens": 8, "temperature": 0}
            reply = httpx.post(f"{alone}/v1/completions", json=body, timeout=PATIENCE_S)
            assert reply.json()["choices"][0]["text"] == text

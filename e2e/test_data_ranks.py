"""An engine of two data ranks under `pagefleet up`: two engines for its router, also with prefill and decode apart; or
one, whose ranks share experts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pagefleet_protocol import headers
from pagefleet_protocol import metric_names as names

from e2e.fleet_process import ENGINE_ARGS, PATIENCE_S, SERVICE, FleetProcess
from tests.fakes.fleet_processes import child_pids
from tests.fakes.small_model import write_small_model

pytestmark = pytest.mark.fleet

SENT = "pagefleet_engine_kv_transfer_sent_blocks_total"
KNOWN = "pagefleet_router_kv_blocks"
RANK_RUNNING = "pagefleet_engine_rank_requests_running"
READY = 'pagefleet_router_endpoints{state="ready"}'
BLOCK = 16
FIRST = f"{SERVICE}-engine-0"


def prompts_of(place: str) -> list[str]:
    """Prompts that share no block with those of another place, of more than the router's `MIN_BODY_BYTES`: it goes by
    the blocks of those alone."""
    return [
        f"{place}, {name}: " + f"the {name} had a little house in the {place}, " * 60
        for name in ("fox", "bear", "owl", "cat")
    ]


def route_to(fleet: FleetProcess, engines: Sequence[str]) -> bool:
    """Whether the router sends to these, and no others."""
    try:
        listed = [one.id for one in fleet.endpoints() if not one.draining and not one.coming]
        return sorted(listed) == sorted(engines) and fleet.metrics(fleet.url).get(READY) == len(engines)
    except (OSError, ValueError, httpx.TransportError):
        return False  # still starting


def ask(url: str, prompt: str) -> tuple[str, str, int]:
    """Return the engine that a router chose, the answer, and the prompt's full blocks."""
    body = {"model": SERVICE, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return reply.headers.get(headers.ENGINE_ID, ""), body["choices"][0]["text"], body["usage"]["prompt_tokens"] // BLOCK


def ask_at_once(url: str, prompts: Sequence[str]) -> list[tuple[str, str, int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(url, prompt), prompts))


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    with FleetProcess(tmp_path_factory.mktemp("data"), parallelism={"data": 2}) as fleet:
        fleet.until(lambda: route_to(fleet, [FIRST, f"{FIRST}.1"]))
        fleet.until(lambda: fleet.metrics(fleet.url).get("pagefleet_router_kv_engines_followed") == 2)
        fleet.until(lambda: "the tokenizer of " in fleet.output)  # the router knows what is cached from here on
        yield fleet


def figure(fleet: FleetProcess, name: str) -> float:
    """One of the router's."""
    return fleet.metrics(fleet.url).get(name, 0.0)


def cached(fleet: FleetProcess, prompts: Sequence[str]) -> list[tuple[str, str, int]]:
    """Have the ranks compute prompts in turns, and the router know; returns what `ask` is to say of them."""
    known = figure(fleet, KNOWN)
    urls = {one.id: one.url for one in fleet.endpoints()}
    home = [FIRST, f"{FIRST}.1"] * 2
    told = [(engine, *ask(urls[engine], prompt)[1:]) for engine, prompt in zip(home, prompts, strict=True)]
    fleet.until(lambda: figure(fleet, KNOWN) >= known + sum(one[2] for one in told))
    return told


def test_a_prefix_stays_with_its_rank_and_one_that_is_lost_takes_none_with_it(ranks: FleetProcess) -> None:
    for place in ("wood", "city", "field", "cave"):
        late = figure(ranks, names.ROUTER_PROMPTS_LATE)
        prompts = prompts_of(place)
        first = cached(ranks, prompts)
        again = [ask(ranks.url, prompt) for prompt in prompts]
        if figure(ranks, names.ROUTER_PROMPTS_LATE) == late:
            break  # else the machine is so busy that the router went by the text
    assert again == first

    supervisor = ranks.pids()[FIRST]
    victim = child_pids(supervisor)[0]
    os.kill(victim, signal.SIGKILL)
    assert [ask(ranks.url, prompt)[1] for prompt in prompts] == [text for _, text, _ in first]
    ranks.until(lambda: len(child_pids(supervisor)) == 2 and ranks.metrics(ranks.url).get(READY) == 2)
    assert ranks.pids()[FIRST] == supervisor, "it is the rank that starts again, not the engine"
    assert [text for _, text, _ in ask_at_once(ranks.url, prompts)] == [text for _, text, _ in first]


def test_prefill_ranks_compute_for_one_decode_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    both = {"prefill": {"parallelism": {"data": 2}}, "threshold": 1}
    engine = {"dtype": "float32"}
    with FleetProcess(tmp_path_factory.mktemp("apart"), disaggregation=both, engine=engine) as fleet:
        prefill, decode = f"{SERVICE}-prefill-0", f"{SERVICE}-decode-0"
        fleet.until(lambda: route_to(fleet, [prefill, f"{prefill}.1", decode]))
        alone = next(one.url for one in fleet.endpoints() if one.id == prefill)
        for number in range(20):  # requests that do not meet each other all go to one rank
            prompts = [f"Number {number}. {prompt}" for prompt in prompts_of("wood")]
            found = ask_at_once(fleet.url, prompts)
            assert {name for name, _, _ in found} == {decode}
            assert [text for _, text, _ in found] == [text for _, text, _ in ask_at_once(alone, prompts)]
            sent = {name: series[SENT] for name, series in fleet.engine_metrics().items() if name != decode}
            if min(sent.values()) > 0:
                break
        assert min(sent.values()) > 0, sent
        fleet.until(lambda: fleet.received_blocks() > 0)  # figures come a moment after the answers


def test_ranks_that_share_experts_are_one_engine_and_answer_as_one_does(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    kind = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    folder = write_small_model(tmp_path_factory.mktemp("mixture"), **kind)
    engine = {"dtype": "float32", "args": [*ENGINE_ARGS, "--load-format", "dummy"]}
    model = {"uri": folder.as_uri()}
    prompts = [f"The quick brown fox {number}" for number in range(6)]
    spec: dict[str, Any] = {"model": model, "engine": engine, "parallelism": {"data": 2, "expert": True}}
    with FleetProcess(tmp_path_factory.mktemp("experts"), **spec) as fleet:
        fleet.until(lambda: route_to(fleet, [FIRST]))
        together = ask_at_once(fleet.url, prompts)
        assert {name for name, _, _ in together} == {FIRST}
        ranks = [name for name in fleet.engine_metrics()[FIRST] if name.startswith(RANK_RUNNING)]
        assert len(ranks) == 2, "it is one engine that tells of two ranks"
        before = fleet.pids()[FIRST]
        fleet.edit(parallelism={})
        fleet.until(lambda: before not in fleet.pids().values() and fleet.serves(1))
        assert [text for _, text, _ in ask_at_once(fleet.url, prompts)] == [text for _, text, _ in together]

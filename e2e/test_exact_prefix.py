"""Three engines behind two routers: both know what an engine has cached, until it is lost, and for its tenant only."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx
import pytest
from pagefleet_protocol import headers, metric_names
from pagefleet_protocol.handoff import CACHE_SALT, tenant_salt

from e2e.fleet_process import PATIENCE_S, SERVICE, FleetProcess
from tests.fakes.fleet_processes import all_gone

pytestmark = pytest.mark.fleet

T = TypeVar("T")
BLOCK = 16
RED, BLUE = "sk-of-the-red-tenant", "sk-of-the-blue-tenant"
KEYS = f"{RED} tenant=red\n{BLUE} tenant=blue\n"


@dataclass(frozen=True)
class Answered:
    """What an answer says of itself."""

    engine: str
    prompt_tokens: int
    cached_tokens: int
    expected_tokens: dict[str, int]
    """Cached tokens that the router expected, by engine."""

    @property
    def full(self) -> int:
        """Cached tokens where everything is cached that can be."""
        return (self.prompt_tokens - 1) // BLOCK * BLOCK


def document(name: str) -> str:
    """Return a prompt that shares no block with others, and is long enough for routers to tokenize it."""
    return " ".join(f"{name} {number} says what a page fleet is, and what it is not." for number in range(45))


def ask(url: str, prompt: str, key: str = RED, **more: str) -> Answered:
    reply = httpx.post(
        f"{url}/v1/completions",
        json={"model": SERVICE, "prompt": prompt, "max_tokens": 2, "temperature": 0},
        headers={"authorization": f"Bearer {key}", headers.EXPLAIN: "1", **more},
        timeout=PATIENCE_S,
    )
    assert reply.status_code == 200, reply.text
    usage: dict[str, Any] = reply.json()["usage"]
    rows = json.loads(reply.headers[headers.EXPLAIN])
    return Answered(
        reply.headers[headers.ENGINE_ID],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        {row["engine"]: row["cached_tokens"] for row in rows},
    )


def urls(fleet: FleetProcess) -> tuple[str, str]:
    """Return the routers' addresses."""
    found = [
        next(
            line for line in fleet.output.splitlines() if f"{SERVICE}-router-{number} " in line and "listening" in line
        )
        for number in (0, 1)
    ]
    first, second = (line.partition("listening on ")[2].partition(",")[0] for line in found)
    return first, second


def follows(fleet: FleetProcess, engines: int) -> bool:
    """Whether both routers hear what so many engines have cached."""
    name = "pagefleet_router_kv_engines_followed"
    return fleet.serves(engines) and all(fleet.metrics(url).get(name) == engines for url in urls(fleet))


def known_blocks(fleet: FleetProcess, url: str) -> float:
    return fleet.metrics(url)["pagefleet_router_kv_blocks"]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    folder = tmp_path_factory.mktemp("trio")
    (folder / "keys").write_text(KEYS)
    environment = {"PAGEFLEET_ROUTER_API_KEY_FILE": str(folder / "keys")}
    router = {"replicas": 2, "explain": True}
    with FleetProcess(folder, environment=environment, replicas=3, router=router) as fleet:
        fleet.until(lambda: follows(fleet, 3) and fleet.output.count("tokenizer") == 2)
        yield fleet


def tell(fleet: FleetProcess, url: str, other: str, prompts: Sequence[str]) -> list[Answered]:
    """Ask one router, three at a time, and wait until the other one has heard of everything."""
    before = known_blocks(fleet, other)
    with ThreadPoolExecutor(3) as clients:  # at once, so that they meet several engines
        answers = list(clients.map(partial(ask, url), prompts))
    more = sum(one.prompt_tokens // BLOCK for one in answers)
    fleet.until(lambda: known_blocks(fleet, other) >= before + more)
    return answers


def in_time(fleet: FleetProcess, work: Callable[[int], T]) -> T:
    """Return what is found where routers have the time to read all prompts: else they go by the text of some.

    Args:
        fleet: whose routers.
        work: asks them; told another number each time, so that its prompts are others.
    """

    def num_late() -> float:
        return sum(fleet.metrics(url).get(metric_names.ROUTER_PROMPTS_LATE, 0.0) for url in urls(fleet))

    for number in range(8):
        before, found = num_late(), work(number)
        if num_late() == before:
            return found
    raise AssertionError("they never had it")


def test_a_router_finds_what_came_through_the_other(trio: FleetProcess) -> None:
    first, second = urls(trio)

    def twice(number: int) -> tuple[list[Answered], list[Answered]]:
        prompts = [document(f"Page {number} {letter}") for letter in "ABCDEFGHI"]
        return tell(trio, first, second, prompts), [ask(second, prompt) for prompt in prompts]

    told, again = in_time(trio, twice)
    assert len({one.engine for one in told}) > 1
    assert [one.engine for one in again] == [one.engine for one in told]
    assert [one.cached_tokens for one in again] == [one.full for one in told]
    assert all(one.full > 500 for one in told)
    assert [one.expected_tokens[one.engine] for one in again] == [one.full for one in told]


def test_what_an_engine_had_is_forgotten_with_it(trio: FleetProcess) -> None:
    routers = first, second = urls(trio)

    def after_the_loss(number: int) -> list[Answered]:
        prompts = [document(f"Lost {number} {letter}") for letter in "ABCD"]
        told = tell(trio, first, second, prompts)
        victim = Counter(one.engine for one in told).most_common(1)[0][0]
        lost = [prompt for prompt, one in zip(prompts, told, strict=True) if one.engine == victim][:2]
        server, core = trio.pids()[victim], trio.core_pid(victim)
        os.kill(server, signal.SIGKILL)
        assert all_gone([server, core])
        trio.until(lambda: trio.pids().get(victim, server) != server and follows(trio, 3))
        return [ask(url, prompt) for url, prompt in zip(routers, lost, strict=True)]

    answers = in_time(trio, after_the_loss)
    assert [one.cached_tokens for one in answers] == [0, 0]
    assert [set(one.expected_tokens.values()) for one in answers] == [{0}, {0}]


def test_tenants_share_no_cache_and_a_forged_salt_changes_nothing(trio: FleetProcess) -> None:
    first, second = urls(trio)

    def of_both(number: int) -> tuple[Answered, Answered, Answered, Answered]:
        prompt = document(f"Secret {number}")
        (told,) = tell(trio, first, second, [prompt])
        other = ask(first, prompt, BLUE, **{CACHE_SALT: tenant_salt("red")})
        again = ask(first, prompt, BLUE, **{CACHE_SALT: "t-of-its-own"})
        return told, other, again, ask(second, prompt, RED)

    told, other, again, mine = in_time(trio, of_both)
    assert (other.cached_tokens, set(other.expected_tokens.values())) == (0, {0})
    assert (again.engine, again.cached_tokens) == (other.engine, other.full)
    assert (mine.engine, mine.cached_tokens) == (told.engine, told.full)

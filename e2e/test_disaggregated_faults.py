"""Two prefill engines and three decode engines under load, of which each kind is killed, and one is frozen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from e2e.fleet_process import FleetProcess
from e2e.load import Load
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet
HELD = ("kv_usage_ratio", "requests_running", "requests_waiting", "kv_transfer_pinned_blocks")
SENTENCES = 60
"""Of each stream's prompt: enough for routers, which choose by cost, to have it computed elsewhere."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    both = {"prefill": {"replicas": 2}, "decode": {"replicas": 3}, "threshold": 0}
    with FleetProcess(Path(tmp_path_factory.mktemp("pairs")), disaggregation=both) as fleet:
        fleet.until(lambda: fleet.serves(5))
        yield fleet


@contextmanager
def killed(fleet: FleetProcess, engine: str) -> Iterator[None]:
    os.kill(fleet.core_pid(engine), signal.SIGKILL)
    yield


def under_load(fleet: FleetProcess, exchanges: Sequence[Exchange], fault: AbstractContextManager[None]) -> Load:
    """Return how questions and streams of long prompts ended, a fault among them once K/V goes between engines."""

    async def scenario() -> Load:
        before = fleet.received_blocks()
        async with Load(fleet.url, exchanges, streamers=8, stream_tokens=20, sentences=SENTENCES) as load:
            await load.progress(20)
            await asyncio.to_thread(fleet.until, lambda: fleet.received_blocks() > before)
            with fault:
                await load.progress(40)
        return load

    load = asyncio.run(scenario())
    fleet.until(lambda: fleet.serves(5))
    fleet.until(lambda: at_baseline(fleet))
    return load


def at_baseline(fleet: FleetProcess) -> bool:
    return all(
        series.get(f"pagefleet_engine_{name}", 0) == 0 for series in fleet.engine_metrics().values() for name in HELD
    )


def test_load_is_answered_and_leaves_nothing_held(pairs: FleetProcess, exchanges: Sequence[Exchange]) -> None:
    load = under_load(pairs, exchanges, nullcontext())
    assert load.failures == []
    assert all(stream.whole for stream in load.streams)


def test_a_prefill_engine_that_is_killed_under_load_fails_no_request(
    pairs: FleetProcess, exchanges: Sequence[Exchange]
) -> None:
    load = under_load(pairs, exchanges, killed(pairs, "tiny-prefill-0"))
    assert load.failures == []
    assert all(stream.whole for stream in load.streams)


def test_a_prefill_engine_that_is_frozen_under_load_fails_no_request(
    pairs: FleetProcess, exchanges: Sequence[Exchange]
) -> None:
    load = under_load(pairs, exchanges, pairs.frozen("tiny-prefill-1"))
    assert load.failures == []
    assert all(stream.whole for stream in load.streams)


def test_a_decode_engine_that_is_killed_under_load_spoils_no_answer(
    pairs: FleetProcess, exchanges: Sequence[Exchange]
) -> None:
    load = under_load(pairs, exchanges, killed(pairs, "tiny-decode-0"))
    assert load.failures == []  # none had an answer's first byte, so each is asked again elsewhere
    assert all(stream.whole or stream.cut for stream in load.streams)

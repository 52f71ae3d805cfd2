"""Two prefill engines and three decode engines under load, of which each kind is killed, and one is frozen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from e2e.fleet_process import FleetProcess
from e2e.load import Load
from tiny.dataset import Exchange

pytestmark = pytest.mark.fleet
HELD = ("kv_usage_ratio", "requests_running", "requests_waiting", "kv_transfer_pinned_blocks")


@pytest.fixture
def conversations(exchanges: Sequence[Exchange]) -> Sequence[Exchange]:
    """Those with the longest prompts: a question alone has no whole block to pass."""
    return exchanges[-100:]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    both = {"prefill": {"replicas": 2}, "decode": {"replicas": 3}, "threshold": 0}
    with FleetProcess(Path(tmp_path_factory.mktemp("pairs")), disaggregation=both) as fleet:
        fleet.until(lambda: fleet.serves(5))
        yield fleet


def at_baseline(fleet: FleetProcess) -> bool:
    return all(
        series.get(f"pagefleet_engine_{name}", 0) == 0 for series in fleet.engine_metrics().values() for name in HELD
    )


def test_load_is_answered_and_leaves_nothing_held(pairs: FleetProcess, conversations: Sequence[Exchange]) -> None:
    async def scenario() -> Load:
        async with Load(pairs.url, conversations, askers=8, streamers=0) as load:
            await load.progress(60)
        return load

    load = asyncio.run(scenario())
    assert load.failures == []
    pairs.until(lambda: at_baseline(pairs))


def test_a_prefill_engine_that_is_killed_under_load_fails_no_request(
    pairs: FleetProcess, conversations: Sequence[Exchange]
) -> None:
    async def scenario() -> Load:
        async with Load(pairs.url, conversations, askers=8, streamers=2, stream_tokens=40) as load:
            await load.progress(20)
            os.kill(pairs.core_pid("tiny-prefill-0"), signal.SIGKILL)
            await load.progress(60)
        return load

    load = asyncio.run(scenario())
    assert load.failures == []
    assert all(stream.whole for stream in load.streams)
    pairs.until(lambda: pairs.serves(5))
    pairs.until(lambda: at_baseline(pairs))


def test_a_prefill_engine_that_is_frozen_under_load_fails_no_request(
    pairs: FleetProcess, conversations: Sequence[Exchange]
) -> None:
    async def scenario() -> Load:
        async with Load(pairs.url, conversations, askers=8, streamers=0) as load:
            await load.progress(20)
            frozen = pairs.core_pid("tiny-prefill-1")
            os.kill(frozen, signal.SIGSTOP)
            try:
                await load.progress(60)
            finally:
                os.kill(frozen, signal.SIGCONT)
        return load

    assert asyncio.run(scenario()).failures == []
    pairs.until(lambda: pairs.serves(5))
    pairs.until(lambda: at_baseline(pairs))


def test_a_decode_engine_that_is_killed_under_load_spoils_no_answer(
    pairs: FleetProcess, conversations: Sequence[Exchange]
) -> None:
    async def scenario() -> Load:
        async with Load(pairs.url, conversations, askers=8, streamers=2, stream_tokens=40) as load:
            await load.progress(20)
            os.kill(pairs.core_pid("tiny-decode-0"), signal.SIGKILL)
            await load.progress(60)
        return load

    load = asyncio.run(scenario())
    assert load.failures == []  # none had an answer's first byte, so each is asked again elsewhere
    assert all(stream.whole or stream.cut for stream in load.streams)
    pairs.until(lambda: pairs.serves(5))
    pairs.until(lambda: at_baseline(pairs))

"""Ends from outside: a client that leaves its stream, and a fleet that is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from pagefleet_protocol import metric_names

from e2e.fleet_process import PATIENCE_S, FleetProcess
from e2e.load import Streamed, long_request, read_stream
from tests.fakes.fleet_processes import all_gone

pytestmark = pytest.mark.fleet


def test_client_that_leaves_frees_its_blocks_soon(fleet: FleetProcess) -> None:
    urls = {one.id: one.url for one in fleet.endpoints()}
    # Many choices, so that a busy machine cannot see the answer end before it has looked at the engine's load.
    body = long_request(900) | {"n": 12, "logprobs": 5}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=120) as reply:
        engine = urls[reply.headers["x-pagefleet-engine"]]

        def held() -> tuple[float, float]:
            metrics = fleet.metrics(engine)
            return metrics[metric_names.ENGINE_REQUESTS_RUNNING], metrics[metric_names.ENGINE_KV_USAGE_RATIO]

        lines = reply.iter_lines()  # kept: an iterator that is let go of closes the connection
        assert next(lines).startswith("data: ")
        fleet.until(lambda: min(held()) > 0)
        generated = fleet.metrics(engine)[metric_names.ENGINE_GENERATION_TOKENS]
    # The house rule is a second. A busy machine may take longer, but the answer does not go on to its end.
    fleet.until(lambda: held() == (0, 0))
    assert fleet.metrics(engine)[metric_names.ENGINE_GENERATION_TOKENS] - generated < 12 * 900 / 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_lets_a_stream_finish_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    async def scenario(fleet: FleetProcess) -> tuple[Streamed, list[int]]:
        streamed = Streamed()
        async with httpx.AsyncClient(base_url=fleet.url, timeout=PATIENCE_S) as http:
            reading = asyncio.create_task(read_stream(http, long_request(1900), streamed))
            while streamed.num_texts < 3:  # noqa: ASYNC110 - counted by the reader
                await asyncio.sleep(0.005)
            pids = fleet.all_pids()
            if number == signal.SIGINT:
                os.killpg(fleet.process.pid, number)  # as a terminal does
            else:
                fleet.process.send_signal(number)
            assert not streamed.num_done
            await reading
        return streamed, pids

    with FleetProcess(tmp_path) as fleet:
        fleet.until(lambda: fleet.serves(1))
        streamed, pids = asyncio.run(scenario(fleet))
        assert fleet.process.wait(PATIENCE_S) == 0
        assert len(pids) == 3
        assert all_gone(pids, 0)
        assert streamed.whole
        assert fleet.output.endswith("\nstopped\n")
        assert "Traceback" not in fleet.output

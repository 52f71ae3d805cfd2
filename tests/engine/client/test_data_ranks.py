"""Several real core processes with a fake model behind one client: what they do as one engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.client import data_ranks
from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.data_ranks import (
    core_processes,
    furthest_behind,
    joint_ready,
    joint_stats,
    rank_configs,
    rank_devices,
)
from pagefleet_engine.client.stream import Generation
from pagefleet_engine.config import EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.engine_core.messages import CoreStats, Ready
from pagefleet_engine.engine_core.output_text import OutputSoFar
from pagefleet_engine.errors import ConfigError, EngineDead, ModelLoadError
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.settings import engine_config
from pagefleet_protocol.beam_search import BeamSearchParams
from pagefleet_protocol.kv_handoff import KvTransfer
from pagefleet_protocol.load_progress import LoadProgress
from pagefleet_protocol.sampling_params import SamplingParams

from tests.engine.client.test_async_client import COMMAND, LONG, TOKENIZER, eventually, run, tokens_of

pytestmark = pytest.mark.fleet

SHORT = SamplingParams(max_tokens=3)


def config(options: str = "", ranks: int = 2) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_num_queued_reqs=8)
    model = ModelConfig(model=f"fake?{options}", device="cpu")
    return EngineConfig(model=model, scheduler=scheduler, parallel=Parallelism(data_parallel_size=ranks))


@contextlib.asynccontextmanager
async def running(
    options: str = "", on_death: Callable[[], None] | None = None, ranks: int = 2
) -> AsyncIterator[AsyncEngineClient]:
    client = await AsyncEngineClient.start(config(options, ranks), TOKENIZER, on_death, COMMAND)
    try:
        yield client
    finally:
        await client.close()


def prompt_tokens(client: AsyncEngineClient) -> list[int]:
    """Of each rank: prompt tokens that it looked up."""
    return [0 if one is None else one.prefix_cache_queries_tokens for one in client.rank_stats]


def test_answers_are_right_and_every_rank_gives_some() -> None:
    async def scenario() -> None:
        async with running(ranks=3) as client:
            several = [tokens_of(client, 10 * n, SHORT, f"r{n}") for n in range(24)]
            assert await asyncio.gather(*several) == [[10 * n + 1, 10 * n + 2, 10 * n + 3] for n in range(24)]
            await eventually(lambda: prompt_tokens(client) == [8, 8, 8])
            stats = client.stats
            assert stats is not None
            assert stats.prefix_cache_queries_tokens == 24
            assert stats.steps == sum(one.steps for one in client.rank_stats if one is not None)
            assert client.ready.num_blocks == 3 * 256

    run(scenario)


def test_the_outputs_of_a_prompt_are_one_rank_s_and_its_prompts_are_shared_out() -> None:
    async def scenario() -> None:
        async with running() as client:
            found: dict[int, list[int]] = {}
            asked = Generation("r", [[10], [50]], SamplingParams(n=3, max_tokens=2))
            async for index, chunk in client.generate(asked):
                found.setdefault(index, []).extend(chunk.token_ids)
            assert found == {index: [11, 12] if index < 3 else [51, 52] for index in range(6)}
            await eventually(lambda: prompt_tokens(client) == [3, 3])
            so_far = [OutputSoFar([11], 0), None, OutputSoFar([11], 0), None, OutputSoFar([51], 0), None]
            resumed = Generation("s", [[10], [50]], SamplingParams(n=3, max_tokens=2), resumed=so_far)
            ranks: dict[int, set[int]] = {}
            async for _ in client.generate(resumed):
                for stream in client._streams.values():
                    ranks.setdefault(stream.index // 3, set()).add(stream.seat.rank)
            assert all(len(own) == 1 for own in ranks.values())
            assert not client._streams
            assert [(load.outputs, load.held_tokens) for load in client._balance.loads] == [(0, 0)] * 2

    run(scenario)


def test_a_prefix_stays_with_its_rank() -> None:
    async def scenario() -> None:
        async with running() as client:
            prompts = [[10 * name + n % 7 for n in range(128)] for name in range(4)]
            for _ in range(5):
                for prompt in prompts:
                    assert [chunk async for chunk in client.generate(Generation("r", [prompt], SHORT))]
            await eventually(lambda: prompt_tokens(client) == [5 * 2 * 128] * 2)
            stats = client.stats
            assert stats is not None
            assert stats.prefix_cache_hits_tokens >= 4 * 4 * 120
            client.reset_prefix_cache()
            before = stats.prefix_cache_hits_tokens
            assert [chunk async for chunk in client.generate(Generation("r", [prompts[0]], SHORT))]
            await eventually(lambda: sum(prompt_tokens(client)) == 21 * 128)
            assert client.stats is not None
            assert client.stats.prefix_cache_hits_tokens == before

    run(scenario)


def test_a_leg_of_a_transfer_is_the_rank_s_that_was_told() -> None:
    async def scenario() -> None:
        async with running(ranks=3) as client:
            for rank in (2, 2, 0):
                leg = KvTransfer("prefill", "1" * 32, "b" * 32, told=client.incarnations[rank])
                assert [chunk async for chunk in client.generate(Generation("r", [[10]], SHORT, transfer=leg))]
            await eventually(lambda: prompt_tokens(client) == [1, 0, 2])

    run(scenario)


def test_a_request_is_ended_at_every_rank() -> None:
    async def scenario() -> None:
        async with running("delay=0.05") as client:
            reasons: list[str | None] = []

            async def read() -> None:
                asked = Generation("both", [[10], [50]], LONG)
                reasons.extend([chunk.finish_reason async for _, chunk in client.generate(asked)])

            reading = asyncio.create_task(read())
            await eventually(lambda: [one is not None and one.requests_running for one in client.rank_stats] == [1, 1])
            client.abort("both")
            await reading
            assert reasons[-2:] == ["abort", "abort"]
            await eventually(lambda: client.stats is not None and client.stats.requests_running == 0)
            assert client.stats is not None
            assert client.stats.kv_usage == 0

    run(scenario)


def test_a_rank_that_is_killed_ends_the_engine() -> None:
    async def scenario() -> None:
        deaths: list[float] = []
        async with running("delay=0.1", lambda: deaths.append(time.monotonic())) as client:
            crowd = [asyncio.create_task(tokens_of(client, 1, LONG, f"r{n}")) for n in range(8)]
            await eventually(lambda: len(client._streams) == 8)
            pids, folders = client.core_pids, [core.process.folder for core in client._cores]
            killed_at = time.monotonic()
            os.kill(pids[1], signal.SIGKILL)
            results = await asyncio.gather(*crowd, return_exceptions=True)
            assert time.monotonic() - killed_at < 60
            assert [type(result) for result in results] == [EngineDead] * 8
            assert len(deaths) == 1
            assert not client.health().alive
            with pytest.raises(EngineDead):
                await tokens_of(client, 1, SHORT)
        for pid, folder in zip(pids, folders, strict=True):
            assert not folder.exists()
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(scenario)


def test_the_engine_is_as_stalled_as_its_worst_rank() -> None:
    async def scenario() -> None:
        async with running("delay=0.001") as client:
            os.kill(client.core_pids[1], signal.SIGSTOP)
            assert client.health().stalled_s == 0, "an idle core that is stopped owes nothing yet"
            waiting = [asyncio.create_task(tokens_of(client, 10 * n, SHORT, f"r{n}")) for n in range(2)]
            await eventually(lambda: client.health().stalled_s > 0.3)
            assert client.health().alive
            os.kill(client.core_pids[1], signal.SIGCONT)
            assert await asyncio.gather(*waiting) == [[1, 2, 3], [11, 12, 13]]
            assert client.health().stalled_s == 0

    run(scenario)


def test_a_rank_that_cannot_load_ends_the_start_and_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ModelLoadError, match=r"^the fake model is torn$"):
            async with running("broken=torn"):
                pass
        never = tmp_path / "loaded"
        client = AsyncEngineClient(core_processes(config(f"load_when={never}"), COMMAND), TOKENIZER, None)
        loading = asyncio.create_task(client.load())
        await eventually(lambda: all(one.phase == "weights" for one in client.loading()))
        pids = client.core_pids
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(ModelLoadError, match="was killed by signal 9 while it loaded the model"):
            await loading
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(scenario)


def test_a_rank_that_dies_while_another_loads_ends_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        may_end = tmp_path / "loaded"
        processes = [core_processes(config(options, 1), COMMAND)[0] for options in ("", f"load_when={may_end}")]
        client = AsyncEngineClient(processes, TOKENIZER, None)
        loading = asyncio.create_task(client.load())
        await eventually(client._cores[0]._started.done)
        os.kill(client.core_pids[0], signal.SIGKILL)
        with pytest.raises(ModelLoadError, match="killed by signal 9 of data rank 0 while others loaded the model"):
            await loading

    run(scenario)


def test_a_search_is_one_request() -> None:
    async def scenario() -> None:
        async with running() as client:
            beams = BeamSearchParams(beam_width=1, max_tokens=4)
            asked = Generation("b", [[10], [50]], SamplingParams(n=1, max_tokens=4), beams=beams)
            found = [chunk.token_ids async for _, chunk in client.generate(asked)]
            assert [list(tokens) for tokens in found] == [[11, 12, 13, 14], [51, 52, 53, 54]]

    run(scenario)


def test_every_rank_gets_its_share() -> None:
    engine = engine_config(
        {
            "model": "m", "data_parallel_size": 2, "num_threads": 5, "kv_connector": "offload", "device": "cpu",
            "kv_offload_memory": 1000, "kv_offload_disk": 500, "kv_offload_dir": "/disk",
        }
    )  # fmt: skip
    ranks = rank_configs(engine)
    assert [one.model.num_threads for one in ranks] == [2, 2]
    assert [(one.kv_transfer.kv_offload_memory, one.kv_transfer.kv_offload_disk) for one in ranks] == [(500, 250)] * 2
    assert [one.kv_transfer.kv_offload_dir for one in ranks] == ["/disk/rank-0", "/disk/rank-1"]
    assert len({one.model.seed for one in ranks}) == 2, "or two ranks would draw the same answers"
    assert (engine.max_requests, engine.max_in_flight) == (512, 512 + 2 * 4096)
    alone = engine_config({"model": "m", "num_threads": 5})
    assert rank_configs(alone) == [alone]
    with pytest.raises(ConfigError, match="num_threads is 0"):
        rank_configs(engine_config({"model": "m", "num_threads": 0, "data_parallel_size": 2}))


def gpus_of(gpus: list[str], **settings: Any) -> list[str | None]:
    engine = engine_config({"model": "m", **settings})
    return [one.get("CUDA_VISIBLE_DEVICES") for one in rank_devices(engine, gpus)]


def test_every_rank_gets_gpus_of_its_own() -> None:
    assert gpus_of(["2", "GPU-4f", "5"], data_parallel_size=2) == ["2", "GPU-4f"]
    assert gpus_of(["0", "1"], data_parallel_size=2, device="cpu") == [None, None]
    assert gpus_of([], data_parallel_size=2) == [None, None]
    with pytest.raises(ConfigError, match="data_parallel_size 3 takes 3 GPUs, and 2 can be seen"):
        gpus_of(["0", "1"], data_parallel_size=3)


def test_a_machine_is_not_buried_under_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_ranks, "usable_cores", lambda: 2)
    assert gpus_of([], data_parallel_size=8, tensor_parallel_size=2) == [None] * 8
    says = "data_parallel_size 9 takes 18 processes that compute, and 2 cores can be used: give 8 at most"
    with pytest.raises(ConfigError, match=says):
        gpus_of([], data_parallel_size=9, tensor_parallel_size=2)


def test_the_start_is_as_far_as_the_rank_that_is_furthest_behind() -> None:
    ranks = [LoadProgress("warm_up"), LoadProgress("weights", 3, 4), LoadProgress("weights", 1, 4)]
    assert furthest_behind(ranks) is ranks[2]


def test_ranks_are_told_as_one_engine() -> None:
    ready = [
        Ready(512, 300, 100, 16, "float32", {"weights": 1.0, "imports": 2.0}),
        Ready(256, 300, 50, 16, "float32", {"weights": 3.0, "imports": 1.0}),
    ]
    both = joint_ready(ready)
    assert (both.max_model_len, both.num_blocks) == (256, 150)
    assert both.startup_seconds == {"weights": 3.0, "imports": 2.0}
    one = CoreStats(1, 2, 0.5, 10, 4, 1, 7, forms={"grammars_waiting": 1.0}, step_sizes=[1, 2], step_tokens=5)
    two = CoreStats(3, 0, 0.2, 30, 6, 0, 9, forms={"form_requests_total": 2.0}, step_sizes=[1], step_tokens=6)
    joint = joint_stats([one, two], [100, 50])
    assert joint == CoreStats(
        4, 2, 0.4, 40, 10, 1, 16, forms={"grammars_waiting": 1.0, "form_requests_total": 2.0}, step_sizes=[2, 2],
        step_tokens=11, prefix_misses_tokens=[], kv_transfer={},
    )  # fmt: skip
    assert joint_stats([one], [100]) is one
    assert joint_stats([None], [100]) is None
    assert joint_stats([None, None], [1, 1]) is None
    half = joint_stats([None, one], [100, 100])
    assert half is not None
    assert (half.kv_usage, half.requests_running) == (0.25, 1)

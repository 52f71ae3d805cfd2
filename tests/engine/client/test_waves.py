"""Real core processes whose model steps together over data ranks: the tokens of one rank, and no hang."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pagefleet_engine import LLM
from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.core_ahead import CORE_COMMAND
from pagefleet_engine.client.stream import Generation
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.settings import engine_config
from pagefleet_protocol.sampling_params import SamplingParams

from bench.record_steps import recorded, recording
from tests.engine.client.test_async_client import ROOT, TOKENIZER, eventually, run
from tests.fakes.slow_requests import slow

pytestmark = pytest.mark.fleet

COMMAND = (
    sys.executable,
    "-c",
    "import sys; sys.path.insert(0, sys.argv[1]); from tests.fakes import together_model; "
    "sys.exit(together_model.run())",
    str(ROOT),
)


MODEL = "builtin://tiny"
SETTINGS: dict[str, object] = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 256, "num_threads": 1}
ASKED = ((0, 40), *((number, 4 + 9 * (number % 3)) for number in range(12)), (5, 12))
"""Requests, and how many tokens each gets: one alone, twelve at once, and one after a rest."""
OneRank = Callable[[str], list[list[int]]]
Make = Callable[..., Path]


async def start(ranks: int, command: tuple[str, ...] = COMMAND, **settings: object) -> AsyncEngineClient:
    config = engine_config({"model": MODEL, **SETTINGS, "data_parallel_size": ranks, **settings})
    return await AsyncEngineClient.start(config, TOKENIZER, None, command)


def prompt_of(number: int) -> list[int]:
    return [(7 * number + place) % 250 for place in range(3 + 5 * (number % 4))]


def greedy(max_tokens: int, **extra: object) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra or None
    )


async def tokens(client: AsyncEngineClient, number: int, max_tokens: int = 12, **extra: object) -> list[int]:
    asked = Generation(f"r{number}", [prompt_of(number)], greedy(max_tokens, **extra))
    return [token async for _, chunk in client.generate(asked) for token in chunk.token_ids]


async def all_tokens(client: AsyncEngineClient) -> list[list[int]]:
    """Of what is `ASKED`: some ranks have nothing, then all have something."""
    first = await tokens(client, *ASKED[0])
    several = await asyncio.gather(*(tokens(client, *one) for one in ASKED[1:-1]))
    await eventually(lambda: client.stats is not None and not client.stats.requests_running)
    return [first, *several, await tokens(client, *ASKED[-1])]


@pytest.fixture(scope="module")
def of_one_rank() -> OneRank:
    """Returns the same tokens of one rank, by an engine in this process: found once for each model."""
    found: dict[str, list[list[int]]] = {}

    def tokens_of(model: str) -> list[list[int]]:
        if model not in found:
            with LLM(model, skip_tokenizer_init=True, **SETTINGS) as llm:
                results = llm.generate(
                    [{"prompt_token_ids": prompt_of(number)} for number, _ in ASKED],
                    [greedy(max_tokens) for _, max_tokens in ASKED],
                )
            found[model] = [list(result.outputs[0].token_ids) for result in results]
        return found[model]

    return tokens_of


@pytest.mark.parametrize("ranks", [2, 3])
def test_tokens_are_those_of_one_rank(ranks: int, of_one_rank: OneRank) -> None:
    expected = of_one_rank(MODEL)

    async def test() -> None:
        together = await start(ranks)
        assert await all_tokens(together) == expected
        told = [stats for stats in together.rank_stats if stats is not None and stats.steps]
        assert len(told) == ranks, "each rank computed some"
        await together.close()

    run(test)


MOVING = {"enable_eplb": True, "num_redundant_experts": 3, "eplb_window_size": 8, "eplb_step_interval": 8}


@pytest.mark.parametrize(
    ("family", "ranks", "settings"),
    [
        ("qwen3_moe", 2, MOVING),
        ("deepseek_v3", 3, {"all2all_backend": "all2allv"}),
        ("qwen3_moe", 2, {"tensor_parallel_size": 2, **MOVING}),
        ("qwen2_moe", 2, {"pipeline_parallel_size": 2, "all2all_backend": "all2allv"}),
        pytest.param(
            "qwen2_moe",
            2,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **MOVING},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_copies_that_have_each_expert_once_among_them(
    family: str, ranks: int, settings: dict[str, object], make_checkpoint: Make, of_one_rank: OneRank
) -> None:
    """And where experts move among them meanwhile."""
    model = str(make_checkpoint(family))
    expected = of_one_rank(model)

    async def test() -> None:
        together = await start(ranks, CORE_COMMAND, model=model, enable_expert_parallel=True, **settings)
        assert await all_tokens(together) == expected
        told = [stats for stats in together.rank_stats if stats is not None and stats.steps]
        assert len(told) == ranks, "each rank computed some"
        if "enable_eplb" in settings:
            stats = together.stats
            assert stats is not None
            load = dict(stats.experts)
            assert 1 <= load.pop("pagefleet_engine_expert_busiest_ratio") <= len(load)
            assert len(load) == ranks * (2 if "tensor_parallel_size" in settings else 1)
        await together.close()

    run(test)


IN_HALVES = {
    "enable_expert_parallel": True,
    "enable_dbo": True,
    "dbo_decode_token_threshold": 2,
    "dbo_prefill_token_threshold": 4,
}


@pytest.mark.parametrize(
    ("family", "ranks", "settings"),
    [
        ("qwen3_moe", 2, MOVING),
        ("deepseek_v3", 2, {"all2all_backend": "all2allv"}),
        ("qwen3_moe", 2, {"tensor_parallel_size": 2, **MOVING}),
        ("qwen2_moe", 2, {"pipeline_parallel_size": 2, "all2all_backend": "all2allv"}),
        pytest.param(
            "qwen3_moe",
            2,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_sequence_parallelism": True},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_copies_that_compute_in_halves(
    family: str, ranks: int, settings: dict[str, object], make_checkpoint: Make, of_one_rank: OneRank, tmp_path: Path
) -> None:
    """Prompts and decodes, and steps in which a rank has nothing, which are whole."""
    model = str(make_checkpoint(family))
    expected = of_one_rank(model)

    async def test() -> None:
        together = await start(ranks, recording(tmp_path), model=model, **IN_HALVES, **settings)
        assert await all_tokens(together) == expected
        await together.close()

    run(test)
    steps = recorded(tmp_path)
    halved = [max(map(max, step["new"])) for step in steps if step["in_halves"]]
    assert 1 in halved, "steps that decode"
    if "pipeline_parallel_size" not in settings:  # stages have prompts in steps of their own, at whatever time
        assert max(halved) > 1, "steps with prompts"
    assert any([] in step["new"] for step in steps)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("how", ["killed", "stopped", "failed"])
def test_a_rank_that_is_lost_in_halves_ends_all(how: str, make_checkpoint: Make) -> None:
    """Also one that fails in the second half, while the first is on its way."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); from tests.fakes import failing_half; failing_half.run()"
    command = CORE_COMMAND if how != "failed" else (sys.executable, "-c", program, str(ROOT))

    async def test() -> None:
        client = await start(2, command, model=str(make_checkpoint("qwen3_moe")), **IN_HALVES, logits_processors="slow")
        extra = {} if how == "failed" else slow()
        running = [asyncio.create_task(tokens(client, number, 400, **extra)) for number in range(8)]
        if how != "failed":
            await eventually(lambda: client.stats is not None and client.stats.steps > 20)
            os.kill(client.core_pids[1], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        for task in running:
            with pytest.raises(EngineDead):
                await task
        await client.close()

    run(test)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_in_a_wave_ends_all(how: signal.Signals) -> None:
    async def test() -> None:
        client = await start(2, logits_processors="slow")
        running = asyncio.create_task(tokens(client, 0, 2000, **slow()))
        await eventually(lambda: client.stats is not None and client.stats.steps > 20)
        stats = client.rank_stats
        busy = next(rank for rank in range(2) if (told := stats[rank]) is not None and told.requests_running)
        os.kill(client.core_pids[1 - busy], how)
        with pytest.raises(EngineDead):
            await running
        await client.close()

    run(test)


def test_a_rank_alone_waits_for_nobody() -> None:
    async def test() -> None:
        client = await start(1)
        assert len(await tokens(client, 0)) == 12
        await client.close()

    run(test)

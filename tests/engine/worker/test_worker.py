"""A real model with random weights behind the scheduler: output does not hang on what the batch does."""

from __future__ import annotations

import json
import logging
import random
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.request import Request
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.core.step import NewRow, ScheduledRow, ScheduledRows, StepPlan
from pagefleet_engine.errors import ConfigError, StepOutOfMemory
from pagefleet_engine.executor.in_process import InProcessExecutor
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.worker.model_runner import ModelRunner
from pagefleet_engine.worker.worker import Worker, resolve_max_model_len
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams
from torch import Tensor

from tests.fakes.architectures import llama_arch, llama_config

Prompts = list[tuple[list[int], SamplingParams]]


pytestmark = pytest.mark.usefixtures("same_threads_after")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    (path / "config.json").write_text(json.dumps(llama_config()))
    return path


def make_config(folder: Path, cache: CacheConfig | None = None, max_model_len: int | None = 256) -> EngineConfig:
    model = ModelConfig(
        model=str(folder),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_model_len=max_model_len,
    )
    return EngineConfig(model=model, cache=cache or CacheConfig(num_kv_blocks=200))


def run(
    folder: Path, prompts: Prompts, cache: CacheConfig | None = None, settings: SchedulerConfig | None = None
) -> tuple[list[list[int]], Scheduler]:
    """Output of each request, and the scheduler that ran them."""
    config = replace(make_config(folder, cache), scheduler=settings or SchedulerConfig())
    worker = Worker(config, folder, llama_arch())
    kv_cache = KVCache(worker.cache.num_blocks, worker.cache.block_size)
    scheduler = Scheduler(config.scheduler, kv_cache, ModelLimits(worker.cache.max_model_len, 300))
    output: dict[str, list[int]] = {}
    for index, (prompt, sampling) in enumerate(prompts):
        name = f"r{index}"
        output[name] = []
        scheduler.add(Request(name, prompt, sampling, (2,), PrefixScope("test")))
    while scheduler.has_work:
        plan = scheduler.schedule()
        for update in scheduler.update(plan, worker.launch(plan).result()):
            assert update.failure is None
            output[update.request_id] += update.new_token_ids
    return list(output.values()), scheduler


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    rng = random.Random(5)
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, seed=7),
        SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=8, top_p=0.9, top_k=40),
    ]
    return [([rng.randrange(3, 300) for _ in range(rng.randrange(1, 90))], kinds[index % 4]) for index in range(8)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: Prompts) -> list[list[int]]:
    """Each request's output when it runs alone."""
    torch.set_num_threads(1)
    return [run(folder, [prompt])[0][0] for prompt in prompts]


def test_a_batch_gives_what_each_request_gives_alone(folder: Path, prompts: Prompts, expected: list[list[int]]) -> None:
    output, _ = run(folder, prompts)
    assert output == expected
    assert all(len(tokens) == 20 for tokens in output)


def test_chunks_of_odd_sizes_change_nothing(folder: Path, prompts: Prompts, expected: list[list[int]]) -> None:
    output, _ = run(
        folder,
        prompts,
        settings=SchedulerConfig(max_num_batched_tokens=37, max_num_seqs=5, long_prefill_token_threshold=13),
    )
    assert output == expected


def test_preemption_changes_nothing(folder: Path, prompts: Prompts, expected: list[list[int]]) -> None:
    small = CacheConfig(num_kv_blocks=32, block_size=8)
    output, scheduler = run(folder, prompts, small, SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8))
    assert scheduler.stats().preemptions > 0
    assert output == expected


def test_cached_prefixes_change_nothing(folder: Path, prompts: Prompts) -> None:
    system = [9, 8, 7, 6] * 20
    shared = [([*system, *prompt], sampling) for prompt, sampling in prompts[:4]]
    alone = [run(folder, [prompt])[0][0] for prompt in shared]
    output, scheduler = run(folder, shared, settings=SchedulerConfig(max_num_seqs=1))
    assert scheduler.stats().lookups.hit_tokens >= 3 * 64
    assert output == alone


def plan_of(name: str, prompt: list[int]) -> StepPlan:
    new = NewRow(name, prompt, len(prompt), SamplingParams(temperature=0.0), (2,))
    return StepPlan(
        1, (), [new], ScheduledRows.of([ScheduledRow(name, 0, len(prompt), (range(4),), True)]), len(prompt)
    )


def test_the_executor_runs_plans_until_it_is_shut_down(folder: Path) -> None:
    executor = InProcessExecutor(make_config(folder), folder, llama_arch())
    assert executor.cache.num_blocks == 200
    assert executor.cache.bytes_per_block == 2 * 2 * 2 * 16 * 16 * 4
    assert executor.max_model_len == 256
    (tokens,) = executor.launch(plan_of("a", [5, 6, 7])).result().sampled
    assert len(tokens) == 1
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(AssertionError, match="after shutdown"):
        executor.launch(plan_of("b", [5]))


@pytest.mark.parametrize("kept", [CacheConfig(), CacheConfig(kv_cache_dtype="fp8")], ids=["auto", "fp8"])
def test_float16_is_computed_over_keys_of_any_type(folder: Path, kept: CacheConfig) -> None:
    """By torch, also where there are compiled kernels, which take none."""
    config = make_config(folder, replace(kept, num_kv_blocks=20))
    config = replace(config, model=replace(config.model, dtype="float16"))
    (tokens,) = Worker(config, folder, llama_arch()).launch(plan_of("a", [5, 6, 7])).result().sampled
    assert len(tokens) == 1


def test_start_says_what_was_loaded_and_how_much_fits(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagefleet_engine"):
        worker = Worker(make_config(folder, CacheConfig(kv_cache_memory=2 * 1024**2)), folder, llama_arch())
    assert "loaded llama" in caplog.text
    assert "float32 on 1 CPU threads" in caplog.text
    assert "KV cache: 0.00 GiB, 256 blocks of 16 tokens = 4096 tokens, 16 requests of 256 tokens at once" in caplog.text
    assert worker.cache.num_blocks == 256


def test_the_pool_follows_from_free_memory(folder: Path) -> None:
    worker = Worker(make_config(folder, CacheConfig()), folder, llama_arch())
    assert worker.cache.num_blocks == 256 * 256 // 16


def test_a_context_that_was_not_asked_for_shrinks_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(make_config(folder, CacheConfig(num_kv_blocks=3), None), folder, llama_arch())
    assert worker.cache.max_model_len == 48
    assert [record.levelname for record in caplog.records if "requests end at" in record.message] == ["WARNING"]


def test_a_context_that_was_asked_for_must_fit(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 48 at most, or --num-kv-blocks 16 at least"):
        Worker(make_config(folder, CacheConfig(num_kv_blocks=3)), folder, llama_arch())


@pytest.mark.parametrize(
    "settings", [SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1), SchedulerConfig(max_num_seqs=3)]
)
@pytest.mark.parametrize("cache", [CacheConfig(num_kv_blocks=1, block_size=2), CacheConfig(num_kv_blocks=7)])
def test_warming_up_fits_the_smallest_engines(folder: Path, cache: CacheConfig, settings: SchedulerConfig) -> None:
    config = replace(make_config(folder, cache, None), scheduler=settings)
    worker = Worker(config, folder, llama_arch())
    plan = StepPlan(
        1,
        (),
        [NewRow("a", [4], 1, SamplingParams(temperature=0.0), ())],
        ScheduledRows.of([ScheduledRow("a", 0, 1, ([0],), True)]),
        1,
    )
    assert len(worker.launch(plan).result().sampled[0]) == 1


def test_max_model_len_is_checked_against_the_model() -> None:
    assert resolve_max_model_len(None, 512, 512) == 512
    assert resolve_max_model_len(None, 512, 128) == 128
    assert resolve_max_model_len(100, 512, 512) == 100
    assert resolve_max_model_len(500, 512, 128) == 500
    with pytest.raises(ConfigError, match="made for 512: give at most that"):
        resolve_max_model_len(513, 512, 128)
    with pytest.raises(ConfigError, match="give at least 2"):
        resolve_max_model_len(1, 512, 512)


@pytest.mark.parametrize("cache", [CacheConfig(num_kv_blocks=10**15), CacheConfig(kv_cache_memory=2**62)])
def test_a_pool_beyond_this_machine_is_refused_in_one_line(folder: Path, cache: CacheConfig) -> None:
    with pytest.raises(ConfigError, match=r"^a KV cache of \d+ blocks takes .* are free: give --num-kv-blocks \d+"):
        Worker(make_config(folder, cache), folder, llama_arch())


def test_a_model_that_computes_no_numbers_is_said_at_the_start(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderModel, "logits", lambda _, hidden_SD: torch.full((len(hidden_SD), 300), torch.nan))
    Worker(make_config(folder), folder, llama_arch())
    assert "not a number" in caplog.text
    assert "overflows in float32" in caplog.text


def test_a_step_without_memory_keeps_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(make_config(folder), folder, llama_arch())
    computed: list[weakref.ref[Tensor]] = []

    def out_of_memory(runner: ModelRunner, plan: StepPlan) -> None:
        hidden_TD = torch.zeros(plan.num_tokens, 8)
        computed.append(weakref.ref(hidden_TD))
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(ModelRunner, "launch", out_of_memory)
    with pytest.raises(StepOutOfMemory, match="a step of 5 tokens in 0 requests: tried to allocate 2 GiB"):
        worker.launch(StepPlan(1, (), (), ScheduledRows.of(()), 5))
    assert [reference() for reference in computed] == [None]

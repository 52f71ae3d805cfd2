"""`--metrics-names vllm`: which of vLLM's figures are served, under its names, and which are not."""

from __future__ import annotations

import re
from pathlib import Path

from pagefleet_engine.core.outputs import Waits
from pagefleet_engine.engine_core.messages import CoreStats
from pagefleet_engine.metrics import EngineMetrics
from pagefleet_engine.vllm_metrics import VLLM_NAMES
from prometheus_client.parser import text_string_to_metric_families

DOCUMENT = Path(__file__).parents[3] / "docs" / "coming-from-vllm.md"
NAME = re.compile(r"`vllm:(\w+)`")
NAMES = """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason num_requests_kv_fetch_by_stage
    engine_sleep_state kv_cache_usage_perc corrupted_requests watermark_requests prefix_cache_queries prefix_cache_hits
    external_prefix_cache_queries external_prefix_cache_hits mm_cache_queries mm_cache_hits num_preemptions
    prompt_tokens prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source generation_tokens
    request_success admission_rejections request_prompt_tokens request_generation_tokens iteration_tokens_total
    request_max_num_generation_tokens request_params_n request_params_max_tokens time_to_first_token_seconds
    inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
    request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
    request_decode_time_seconds request_num_preemptions request_prefill_kv_computed_tokens kv_block_lifetime_seconds
    kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds lora_requests_info cache_config_info
"""
"""Every family of the engine's own logger in vLLM 0.32."""
IN_VLLM = frozenset(NAMES.split())
TYPES = {"cache_config_info": "gauge", "iteration_tokens_total": "histogram", "request_success": "counter"}


def served() -> EngineMetrics:
    counts = [0] * 21
    counts[3] = 2
    stats = CoreStats(2, 1, 0.25, 100, 40, 3, 2, nan_requests=1, step_sizes=counts, step_tokens=12)
    metrics = EngineMetrics("m", lambda: stats)
    metrics.cache_config({"block_size": 16, "num_blocks": 64, "kv_cache_dtype": "auto"})
    metrics.add_vllm_names()
    metrics.finished("stop")
    metrics.requests.begins(2, 50)
    metrics.requests.first_token(30, 10, Waits(1.0, 2.0), 5.0)
    metrics.requests.ended(5, 5.0, 7.0, Waits(1.0, 2.0))
    metrics.requests.ended(1, 5.0, 5.0, None)
    return metrics


def samples() -> dict[str, tuple[dict[str, str], float]]:
    return {
        sample.name: (dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(served().render().decode())
        for sample in family.samples
        if sample.name.startswith("vllm:") and "le" not in sample.labels
    }


def test_what_is_served_is_vllm_s() -> None:
    assert set(VLLM_NAMES.values()) <= IN_VLLM
    assert len(VLLM_NAMES) >= 25
    families = {
        family.name.removeprefix("vllm:"): family.type
        for family in text_string_to_metric_families(served().render().decode())
        if family.name.startswith("vllm:") and not family.name.endswith("_created")
    }
    assert families.keys() == set(VLLM_NAMES.values())
    assert {name: families[name] for name in TYPES} == TYPES


def test_the_document_lists_what_is_served_and_what_is_not() -> None:
    _, _, section = DOCUMENT.read_text().partition("\n## Metrics\n")
    there, _, missing = section.partition("\nNot served")
    assert set(NAME.findall(there)) == set(VLLM_NAMES.values())
    assert set(NAME.findall(missing.partition("\n## ")[0])) == IN_VLLM - set(VLLM_NAMES.values())


def test_labels_are_vllm_s() -> None:
    plain = {"model_name": "m", "engine": "0"}
    cache = {"engine": "0", "block_size": "16", "num_gpu_blocks": "64", "cache_dtype": "auto"}
    expected = {
        "vllm:num_requests_running": (plain, 2.0),
        "vllm:prefix_cache_hits_total": (plain, 40.0),
        "vllm:request_success_total": ({**plain, "finished_reason": "stop"}, 1.0),
        "vllm:cache_config_info": (cache, 1.0),
    }
    found = samples()
    assert {name: found[name] for name in expected} == expected


def test_times_of_a_request_are_those_of_its_parts() -> None:
    found = {name.removeprefix("vllm:"): value for name, (_, value) in samples().items()}
    assert found["request_queue_time_seconds_sum"] == 1.0
    assert found["request_prefill_time_seconds_sum"] == 3.0
    assert found["request_decode_time_seconds_sum"] == 2.0
    assert found["request_inference_time_seconds_sum"] == 5.0
    assert found["request_time_per_output_token_seconds_sum"] == 0.5
    assert found["request_time_per_output_token_seconds_count"] == 1
    assert found["request_prefill_kv_computed_tokens_sum"] == 20
    assert found["request_generation_tokens_sum"] == 6
    assert (found["request_params_n_sum"], found["request_params_max_tokens_sum"]) == (2, 50)
    assert (found["iteration_tokens_total_sum"], found["iteration_tokens_total_count"]) == (12, 2)


def test_steps_are_in_their_buckets() -> None:
    buckets = {
        sample.labels["le"]: sample.value
        for family in text_string_to_metric_families(served().render().decode())
        for sample in family.samples
        if sample.name == "pagefleet_engine_iteration_tokens_bucket"
    }
    assert (buckets["4.0"], buckets["8.0"], buckets["+Inf"]) == (0, 2, 2)


def test_without_the_option_vllm_s_names_are_not_served() -> None:
    assert b"vllm:" not in EngineMetrics("m", lambda: None).render()

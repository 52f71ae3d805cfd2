"""What Prometheus, and with it the router, sees."""

from __future__ import annotations

from collections.abc import Callable

from pagefleet_engine.core.step import ExpertLoad
from pagefleet_engine.engine_core.messages import CoreStats
from pagefleet_engine.metrics import EngineMetrics
from pagefleet_protocol import metric_names
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.server.conftest import LiveServer
from tests.fakes.scripted_engine import answer


def samples(text: str) -> dict[str, float]:
    """Return `name{label=value,...}` without the model's label -> value; every sample must have that label."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "scripted"
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found[f"{sample.name}{{{shown}}}"] = sample.value
    return found


def test_a_request_is_counted(start_server: Callable[..., LiveServer]) -> None:
    server = start_server()
    server.complete(max_tokens=8, n=2, metadata={"a": "b"}, unheard_of=1)
    server.complete(max_tokens=8, stop=answer("Hello", 8)[5])
    server.complete(max_tokens=0)
    server.http.get("/v1/models/some/model")
    server.http.get("/made/up/path")
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    seen = samples(response.text)
    prefix = "pagefleet_engine_"
    assert seen[prefix + "time_to_first_token_seconds_count{}"] == 3
    assert seen[prefix + "request_duration_seconds_count{}"] == 3
    assert seen[prefix + "prompt_tokens_total{}"] == 15
    assert seen[prefix + "requests_finished_total{finish_reason=length}"] == 2
    assert seen[prefix + "requests_finished_total{finish_reason=stop}"] == 1
    tokens = seen[prefix + "generation_tokens_total{}"]
    assert seen[prefix + "inter_token_latency_seconds_count{}"] == tokens - 3
    assert 16 < tokens <= 22
    assert seen[prefix + "request_generation_tokens_sum{}"] == tokens
    assert seen[prefix + "request_generation_tokens_count{}"] == 3
    assert seen[prefix + "request_computed_prompt_tokens_count{}"] == 3
    assert seen[prefix + "request_time_per_output_token_seconds_count{}"] == 3
    assert (seen[prefix + "request_params_n_count{}"], seen[prefix + "request_params_n_sum{}"]) == (2, 3)
    assert seen[prefix + "request_params_max_tokens_sum{}"] == 16
    assert seen[prefix + "ignored_fields_total{}"] == 1
    assert seen[prefix + "http_requests_total{route=/v1/completions,status=200}"] == 2
    assert seen[prefix + "http_requests_total{route=/v1/completions,status=400}"] == 1
    assert seen[prefix + "http_requests_total{route=/v1/models/{model:path},status=404}"] == 1
    assert seen[prefix + "http_requests_total{route=other,status=404}"] == 1


def test_the_names_that_the_router_reads(start_server: Callable[..., LiveServer]) -> None:
    seen = samples(start_server().http.get("/metrics").text)
    assert seen[metric_names.ENGINE_REQUESTS_RUNNING + "{}"] == 2
    assert seen[metric_names.ENGINE_REQUESTS_WAITING + "{}"] == 1
    assert seen[metric_names.ENGINE_KV_USAGE_RATIO + "{}"] == 0.25
    assert seen[metric_names.ENGINE_PREFIX_CACHE_QUERIES_TOKENS + "{}"] == 100
    assert seen[metric_names.ENGINE_PREFIX_CACHE_HITS_TOKENS + "{}"] == 40
    assert seen["pagefleet_engine_preemptions_total{}"] == 3


def test_before_the_first_step_the_gauges_are_zero() -> None:
    seen = samples(EngineMetrics("scripted", lambda: None).render().decode())
    assert seen[metric_names.ENGINE_REQUESTS_RUNNING + "{}"] == 0
    assert seen[metric_names.ENGINE_KV_USAGE_RATIO + "{}"] == 0


def test_garbage_on_the_socket_is_counted() -> None:
    metrics = EngineMetrics("scripted", lambda: CoreStats(0, 0, 0.0, 0, 0, 0, 0, messages_dropped=4))
    seen = samples(metrics.render().decode())
    assert seen["pagefleet_engine_messages_dropped_total{}"] == 4


def test_what_the_device_suffered_is_told() -> None:
    stats = CoreStats(0, 0, 0.0, 0, 0, 0, 0, gpu_idle_seconds=1.5, nan_requests=2, out_of_memory_steps=3)
    seen = samples(EngineMetrics("scripted", lambda: stats).render().decode())
    assert seen[metric_names.ENGINE_GPU_IDLE_SECONDS + "{}"] == 1.5
    assert seen[metric_names.ENGINE_NAN_REQUESTS + "{}"] == 2
    assert seen[metric_names.ENGINE_OUT_OF_MEMORY_STEPS + "{}"] == 3


def test_what_ranks_with_experts_computed_is_told() -> None:
    stats = CoreStats(0, 0, 0.0, 0, 0, 0, 0, experts=ExpertLoad((3.0, 5.0), 1.25).stats())
    seen = samples(EngineMetrics("scripted", lambda: stats).render().decode())
    assert seen["pagefleet_engine_expert_busiest_ratio{}"] == 1.25
    assert seen["pagefleet_engine_expert_rank_tokens_total{rank=1}"] == 5


def test_the_start_is_told_by_phase() -> None:
    metrics = EngineMetrics("scripted", lambda: None, {"weights": 2.5, "kv_cache": 0.25})
    seen = samples(metrics.render().decode())
    phases = {name: value for name, value in seen.items() if name.startswith(metric_names.ENGINE_STARTUP_SECONDS)}
    assert phases == {
        metric_names.ENGINE_STARTUP_SECONDS + "{phase=weights}": 2.5,
        metric_names.ENGINE_STARTUP_SECONDS + "{phase=kv_cache}": 0.25,
    }


def test_two_engines_in_one_process_share_nothing() -> None:
    first = EngineMetrics("scripted", lambda: None)
    second = EngineMetrics("scripted", lambda: CoreStats(1, 0, 0.0, 0, 0, 0, 0))
    first.generation_tokens.inc(5)
    assert samples(first.render().decode())["pagefleet_engine_generation_tokens_total{}"] == 5
    assert samples(second.render().decode())["pagefleet_engine_generation_tokens_total{}"] == 0

"""Figures of several workers as those of one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.workers.exposition import merge
from pagefleet_protocol.workers.siblings import FIGURES, Siblings
from pagefleet_router.engines.endpoints import EngineView, PolledLoad, Snapshot
from pagefleet_router.telemetry.metrics import RouterMetrics
from pagefleet_router.workers.figures import WorkersFigures, rule_of
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.pair_fleet import pair_facts


def metrics(num_requests: int, num_running: float, generated: float) -> RouterMetrics:
    load = PolledLoad(num_running, 1.0, 0.5)
    engine = EngineView(Endpoint("e0", "http://127.0.0.1:1", "m"), ready=True, load=load)
    made = RouterMetrics(lambda: Snapshot((engine,)), lambda: num_requests, lambda: generated)
    for _ in range(num_requests):
        made.finished("/v1/models", 200, 0.02)
    made.failures["refused"] += num_requests
    return made


def merged_text(own: bytes, others: Iterable[bytes]) -> bytes:
    return merge(own, others, rule_of)


def values(text: bytes) -> dict[str, float]:
    """Samples by name and labels, as Prometheus' own parser reads them."""
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counts_add_up_and_what_all_see_counts_once() -> None:
    merged = values(merged_text(metrics(2, 4.0, 100.0).text(), [metrics(3, 5.0, 700.0).text()]))
    assert merged["pagefleet_router_requests_total,route=/v1/models,status=200"] == 5
    assert merged["pagefleet_router_upstream_failures_total,reason=refused"] == 5
    assert merged["pagefleet_router_requests_in_flight"] == 5
    assert merged["pagefleet_router_request_seconds_bucket,le=0.025,route=/v1/models"] == 5
    assert merged["pagefleet_router_request_seconds_bucket,le=0.01,route=/v1/models"] == 0
    assert merged["pagefleet_router_request_seconds_sum,route=/v1/models"] == pytest.approx(0.1)
    assert merged["pagefleet_router_endpoints,state=ready"] == 1
    assert merged["pagefleet_router_engine_requests_running,engine=e0"] == 4
    assert merged["pagefleet_router_fleet_requests_running"] == 4
    assert merged["pagefleet_router_fleet_engines"] == 1
    assert merged["pagefleet_router_fleet_generated_tokens_total"] == 700
    assert [value for name, value in merged.items() if name.startswith("pagefleet_router_build_info")] == [1]


def test_engines_of_a_role_count_once_and_their_prompts_add_up() -> None:
    def page(tokens: int) -> bytes:
        engine = EngineView(
            Endpoint("p0", "http://127.0.0.1:1", "m"), ready=True, facts=pair_facts("0" * 32, "prefill")
        )
        engine.tally.begin(tokens, 0.0)
        return RouterMetrics(lambda: Snapshot((engine,)), lambda: 0, lambda: 0.0).text()

    merged = values(merged_text(page(300), [page(500)]))
    assert merged["pagefleet_router_role_engines,model=m,role=prefill"] == 1
    assert merged["pagefleet_router_role_requests,model=m,role=prefill"] == 1
    assert merged["pagefleet_router_role_prefill_tokens_in_flight,model=m,role=prefill"] == 800


def test_what_is_learned_is_the_mean_of_those_who_know() -> None:
    head = b"# TYPE pagefleet_router_decode_tokens_per_second gauge\n"
    own = head + b'pagefleet_router_decode_tokens_per_second{model="a b"} 10\n'
    other = head + b'pagefleet_router_decode_tokens_per_second{model="a b"} 30\n'
    assert b'{model="a b"} 20.0\n' in merged_text(own, [other, head])


def test_one_alone_is_unchanged() -> None:
    text = metrics(2, 4.0, 100.0).text()
    assert values(merged_text(text, [])) == values(text)


def test_families_that_only_others_have_are_there() -> None:
    made = metrics(1, 0.0, 0.0)
    made.retries["status"] += 1
    merged = values(merged_text(metrics(1, 0.0, 0.0).text(), [made.text()]))
    assert merged["pagefleet_router_retries_total,reason=status"] == 1
    extra = b"# HELP x_total X.\n# TYPE x_total counter\nx_total 3.0\n"
    assert merged_text(b"", [extra]) == extra


def test_a_silent_worker_is_left_out_and_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = b"# TYPE b gauge\nb 1.0\n"
        workers = [Siblings(tmp_path, index, 3, {FIGURES: lambda: text}) for index in range(2)]
        for worker in workers:
            await worker.start()
        figures = WorkersFigures(lambda: text, workers[0])
        assert await figures.gather() == b"# TYPE b gauge\nb 2.0\n"
        (counted,) = figures.collect()
        assert [sample.value for sample in counted.samples] == [1]
        for worker in workers:
            await worker.stop()

    asyncio.run(scenario())

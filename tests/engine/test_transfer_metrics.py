"""The KV connector's figures as a scrape shows them."""

from __future__ import annotations

from pagefleet_engine.engine_core.messages import CoreStats
from pagefleet_engine.metrics import EngineMetrics

FIGURES = {
    "pagefleet_engine_kv_transfer_sent_bytes_total": 4096.0,
    "pagefleet_engine_kv_transfer_seconds_sum": 1.5,
    "pagefleet_engine_kv_transfer_seconds_count": 3.0,
    "pagefleet_engine_kv_transfer_communicators": 2.0,
    'pagefleet_engine_kv_transfer_peers{state="ready"}': 1.0,
    'pagefleet_engine_kv_transfer_peers{state="dead"}': 2.0,
}


def scrape(figures: dict[str, float]) -> list[str]:
    stats = CoreStats(0, 0, 0.0, 0, 0, 0, 0, kv_transfer=figures)
    lines = EngineMetrics("m", lambda: stats).render().decode().splitlines()
    return [line for line in lines if "kv_transfer" in line]


def test_each_figure_is_a_series_of_its_kind() -> None:
    lines = scrape(FIGURES)
    assert 'pagefleet_engine_kv_transfer_sent_bytes_total{model_name="m"} 4096.0' in lines
    assert 'pagefleet_engine_kv_transfer_seconds_count{model_name="m"} 3.0' in lines
    assert 'pagefleet_engine_kv_transfer_seconds_sum{model_name="m"} 1.5' in lines
    assert 'pagefleet_engine_kv_transfer_communicators{model_name="m"} 2.0' in lines
    assert 'pagefleet_engine_kv_transfer_peers{model_name="m",state="ready"} 1.0' in lines
    assert 'pagefleet_engine_kv_transfer_peers{model_name="m",state="dead"} 2.0' in lines
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert kinds == {
        "pagefleet_engine_kv_transfer_sent_bytes_total": "counter",
        "pagefleet_engine_kv_transfer_seconds": "summary",
        "pagefleet_engine_kv_transfer_communicators": "gauge",
        "pagefleet_engine_kv_transfer_peers": "gauge",
    }


def test_an_engine_without_a_connector_has_none() -> None:
    assert scrape({}) == []

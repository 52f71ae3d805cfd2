"""docs/metrics.md lists every metric that is served: its name, type and labels, and no other."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from pagefleet_engine.config import EngineConfig, ModelConfig
from pagefleet_engine.core.parking import Suppliers
from pagefleet_engine.core.step import ExpertLoad
from pagefleet_engine.engine_core.messages import CoreStats
from pagefleet_engine.grammars.compiler import GrammarCompiler
from pagefleet_engine.grammars.vocabulary import VocabularyFiles
from pagefleet_engine.metrics import EngineMetrics, energy_series, rank_series
from pagefleet_engine.server.api_processes import restart_series
from pagefleet_engine.server.figures import silent_series
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.lifecycle import Drain
from pagefleet_engine.server.responses_api.shelf import ResponseShelf
from pagefleet_engine.server.responses_api.store import ResponseStore, StoreLimits
from pagefleet_engine.server.tracing import span_stats
from pagefleet_operator.handlers.autoscaler import ScalingGauge
from pagefleet_operator.handlers.metrics import Gauges, OperatorMetrics, TrialGauge
from pagefleet_protocol.endpoints import Endpoint, OnTrial
from pagefleet_protocol.tracing import NO_TRACER
from pagefleet_protocol.workers.siblings import Siblings
from pagefleet_router.admission.gate import GateLimits, collect_admission
from pagefleet_router.config import RouterConfig
from pagefleet_router.engines.endpoints import EndpointTable, EngineView, PolledLoad, Snapshot, build_snapshot
from pagefleet_router.errors import no_engine
from pagefleet_router.events.fleet_caches import FleetCaches
from pagefleet_router.exchange.tracing import RequestTraces
from pagefleet_router.picker.picks import Picks
from pagefleet_router.telemetry.metrics import RouterMetrics
from pagefleet_router.tokens.tokenized_prompts import TokenizedPrompts
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.workers.figures import WorkersFigures
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.connector_kinds import connected
from tests.fakes.device_planes import DeviceEnd, nccl_maker
from tests.fakes.gate_scene import GateScene
from tests.fakes.nccl_world import FakeNccl, NcclWorld
from tests.fakes.pair_fleet import pair_facts
from tests.fakes.scripted_core import scripted_core

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(?P<name>pagefleet_\w+)` \| (?P<type>\w+) \|(?P<labels>[^|]*)\| [^|]+ \|$", re.M)
"""One metric: name as it is queried, type, labels, meaning."""

Metric = tuple[str, str, frozenset[str]]


def of_connectors() -> Mapping[str, float]:
    """What connectors of every kind tell."""
    figures: dict[str, float] = {}
    for kind in ("p2p,offload", "file"):
        with tempfile.TemporaryDirectory() as folder, connected(kind, Path(folder)) as ends:
            given, wanted = ends.request(1)
            ends.give(given)
            ends.taker.loadable(wanted)
            ends.taker.load_and_wait(wanted, 1)
            stats = ends.taker.connector.stats()
            figures |= {**stats.counters, **stats.gauges}
    world = NcclWorld()
    device = DeviceEnd("d", nccl_maker(world, FakeNccl(world)))
    figures |= {f"pagefleet_engine_kv_transfer_{name}": value for name, value in device.plane.counters().items()}
    device.plane.close()
    return figures


def of_forms() -> Mapping[str, float]:
    """What a core with a compiler tells."""
    compiler = GrammarCompiler(VocabularyFiles("", "", 300), "auto", None)
    core = scripted_core(EngineConfig(model=ModelConfig(model="fake")), suppliers=Suppliers(grammars=compiler))
    figures = core.stats().forms
    core.shutdown()
    return figures


class Meter:
    """Implements EnergyMeter."""

    def joules(self) -> float:
        return 2.5


def of_engine() -> str:
    stats = CoreStats(
        0,
        0,
        0.0,
        0,
        0,
        0,
        0,
        prefix_misses_tokens=(1, 2, 3, 4),
        step_sizes=[0] * 21,
        kv_transfer=of_connectors(),
        forms=of_forms(),
        experts=ExpertLoad((1.0, 2.0), 1.0).stats(),
    )
    metrics = EngineMetrics("m", lambda: stats, {"weights": 1.0})
    metrics.include(lambda: span_stats(NO_TRACER))
    store = ResponseStore(sqlite3.connect(":memory:"), None, StoreLimits(1, 1.0))
    metrics.include(lambda: silent_series(Siblings(Path("."), 0, 2)))
    metrics.include(lambda: restart_series(0))
    metrics.include(ResponseShelf(store, Drain(1), OpenRequests()).stats)
    metrics.cache_config(
        dict.fromkeys(
            ("block_size", "num_blocks", "kv_cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"), 1
        )
    )
    metrics.include(lambda: energy_series(Meter()))
    metrics.include(lambda: rank_series([stats, None]))
    metrics.finished("stop")
    metrics.http_request("/v1/models", 200)
    return metrics.render().decode()


def of_router() -> str:
    facts = pair_facts("0" * 32, "decode")
    endpoint = Endpoint("e0", "http://127.0.0.1:1", "m", on_trial=OnTrial("r", 5))
    engine = EngineView(endpoint, ready=True, load=PolledLoad(), facts=facts)
    engine.rates.transfer.bandwidth.observe(1.0, 0.0)
    engine.rates.prefill.observe(1.0, 0.0)
    engine.rates.decode.observe(1.0, 0.0)
    metrics = RouterMetrics(lambda: Snapshot((engine,)), lambda: 0, lambda: 0.0)
    metrics.finished("/v1/models", 200, 0.1)
    metrics.retries["refused"] += 1
    metrics.failures["refused"] += 1
    metrics.pairs.choices["remote"] += 1
    metrics.pairs.retries["kv_lost"] += 1
    metrics.arrivals["m"] += 1
    metrics.continued["m"] += 1
    metrics.prompt_tokens["m"] += 1
    metrics.first_token["m"].observe(0.1)
    metrics.token_seconds["m"].observe(0.1)
    metrics.revisions.answered(engine, build_snapshot([engine]).trials, 200)
    metrics.include(FleetCaches(RouterConfig(engine=("http://127.0.0.1:1",), model_name="m"), EndpointTable()).collect)
    metrics.include(TokenizedPrompts(EndpointTable()).collect)
    scene = GateScene(capacity=0, limits=GateLimits(0, 60.0, 0.0, 0))
    scene.come()
    metrics.include(lambda: collect_admission(scene.gate))
    metrics.include(RequestTraces().collect)
    picks = Picks()
    picks.refused(no_engine(), ClientRequest())
    metrics.include(picks.collect)
    metrics.include(WorkersFigures(metrics.text, Siblings(Path("."), 0, 1, {})).collect)
    return metrics.text().decode()


def of_operator() -> str:
    metrics = OperatorMetrics()
    metrics.reconcile_done(0.1, "Refused")
    metrics.request_done("apply", "Deployment", 200, 0.1)
    metrics.scaling_decided("Steady")
    scaled = [ScalingGauge(("apps", "qwen"), "engine", 2, 1, 0.5)]
    live = (lambda: True, lambda: 0, lambda: 0.0, lambda: 0.0, lambda: 0, lambda: [("True", "Serving")])
    metrics.show(Gauges(*live, lambda: scaled, lambda: [TrialGauge(("apps", "qwen"), "Analysing", 5)]))
    return metrics.text().decode()


def served(text: str) -> set[Metric]:
    """Every metric of an exposition, without what the library adds: the times at which series began."""
    found = set()
    for family in text_string_to_metric_families(text):
        if not family.name.endswith("_created"):
            labels = frozenset(name for sample in family.samples for name in sample.labels) - {"le", "model_name"}
            name = family.name + "_total" if family.type == "counter" else family.name
            found.add((name, family.type, labels))
    return found


def documented(component: str) -> set[Metric]:
    rows = ROW.finditer(DOCUMENT.read_text())
    return {
        (row["name"], row["type"], frozenset(re.findall(r"`(\w+)`", row["labels"])))
        for row in rows
        if row["name"].startswith(f"pagefleet_{component}_")
    }


@pytest.mark.parametrize(
    ("component", "text"), [("engine", of_engine), ("router", of_router), ("operator", of_operator)]
)
def test_the_document_lists_what_is_served(component: str, text: Callable[[], str]) -> None:
    assert documented(component) == served(text())


def test_every_series_of_an_engine_names_its_model() -> None:
    samples = [sample for family in text_string_to_metric_families(of_engine()) for sample in family.samples]
    assert {sample.labels.get("model_name") for sample in samples} == {"m"}


def test_every_row_of_the_document_is_read() -> None:
    assert len(ROW.findall(DOCUMENT.read_text())) == DOCUMENT.read_text().count("\n| `pagefleet_")

"""A new revision that is tried out: it replaces the old one by itself, or goes back by itself, and says why.

One service goes through all of it, so the tests run in this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagefleet_protocol.kube_names import LABEL_REVISION

from e2e.kubernetes.cluster import Cluster, Images, wait_until
from e2e.kubernetes.conftest import FLEET
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.load import Load
from e2e.kubernetes.service import Service

PATIENCE_S = 300
TOLD_WITHIN_S = 15
"""Objects are applied before the status tells why."""
ILL_ENGINE = Path(__file__).with_name("ill_engine.py")
# Of a busy machine latencies say little: another engine has the cores.
ANALYSIS = {"minRequests": 10, "maxTtft": 10_000, "maxItl": 10_000, "patience": 120}
STEPS = [{"percent": 20, "seconds": 5}, {"percent": 50, "seconds": 5}]
BACK = "The old one serves on; correct the spec, or undo the edit"


def rollout(**analysis: Any) -> dict[str, Any]:
    return {"drainSeconds": 20, "canary": {"steps": STEPS, "analysis": {**ANALYSIS, **analysis}}}


def ill(illness: str) -> dict[str, Any]:
    """Return the podTemplate of engines that fail requests, or answer late."""
    command = ["python", "-c", ILL_ENGINE.read_text(), illness]
    return {"spec": {"containers": [{"name": "engine", "command": command}]}}


@pytest.fixture(scope="module")
def tried(cluster: Cluster, installation: Installation) -> Iterator[Service]:
    service = Service(cluster, installation.namespace, "tried")
    service.apply(**{**FLEET, "rollout": rollout()})
    service.wait_until_settled()
    yield service
    service.delete()


@pytest.fixture
def load(cluster: Cluster, images: Images, tried: Service) -> Iterator[Load]:
    with Load(cluster, images.operator, tried) as running:
        yield running


def canary(service: Service) -> dict[str, Any]:
    return dict(service.status.get("canary") or {})


def follow(service: Service, revision: str, engines: set[str], end: str) -> dict[str, Any]:
    """Wait until the trial of another revision than this has ended so; until then these engines all stay."""
    seen: dict[str, Any] = {}

    def over() -> bool:
        seen.update(canary(service))
        return seen.get("revision") != revision and seen.get("phase") in ("Promoted", "RolledBack")

    def ended() -> bool:
        if not over() and not engines <= service.pod_names("engine"):
            wait_until(over, "old engines go only once the new revision is promoted", TOLD_WITHIN_S)
        return over()

    try:
        wait_until(ended, "the trial ends", PATIENCE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}: {seen}") from None
    assert seen["phase"] == end, seen
    return seen


def trials(service: Service) -> list[str]:
    """Return the Deployments of revisions that are tried out, or, of pairs, of any revision."""
    labels = f"pagefleet.dev/service={service.name},{LABEL_REVISION}"
    found = service.cluster.list("apps/v1", "Deployment", service.namespace, labels)
    return sorted(str(one["metadata"]["name"]) for one in found)


def events(service: Service, reason: str) -> list[str]:
    return [str(one["message"]) for one in service.events() if one["reason"] == reason]


def went_back(service: Service, why: str) -> None:
    """Hold that the trial is over, that everybody is told why, and that the old engines serve as before."""
    told = canary(service)["message"]
    assert re.fullmatch(f"the new revision went back at step 1: {why}. {BACK}", told), told
    assert told in service.wait_for("Progressing", "CanaryFailed")
    assert service.condition("Ready")["status"] == "True"
    wait_until(lambda: any(told in one for one in events(service, "CanaryFailed")), "an event says why")
    wait_until(lambda: not trials(service), "no engine of the new revision is left")


def test_a_good_revision_replaces_the_old_one_step_by_step(tried: Service, load: Load) -> None:
    old, engines = tried.role("engine")["revision"], tried.pod_names("engine")
    tried.edit(engine={**tried.spec["engine"], "args": ["--max-num-seqs", "64"]})
    said = tried.wait_for("Progressing", "Canary", PATIENCE_S)
    assert "step 1 of 2: " in said
    found = follow(tried, "", engines, "Promoted")
    assert found["revision"] != old
    assert found["step"] == 2
    counts = re.search(r"0 of (\d+) requests failed, of the old revision's 0 of (\d+)", found["message"])
    assert counts, found["message"]
    assert min(map(int, counts.groups())) >= ANALYSIS["minRequests"], "both revisions had their share"
    tried.wait_until_settled(PATIENCE_S)
    assert tried.role("engine")["revision"] == found["revision"]
    assert engines.isdisjoint(tried.pod_names("engine"))
    assert trials(tried) == []
    starting, analysing = events(tried, "CanaryStarting"), events(tried, "CanaryAnalysing")
    assert any("1 for 20 % of the requests" in one for one in starting)
    assert any("1 for 50 % of the requests" in one for one in starting)
    assert any(one.startswith("step 1 of 2: the new revision gets 20 % of the requests") for one in analysing)
    assert any(one.startswith("step 2 of 2: the new revision gets 50 % of the requests") for one in analysing)
    assert found["message"] in events(tried, "CanaryPromoted")
    assert load.go_on().failures == ()


def test_a_revision_that_fails_goes_back_and_no_request_is_lost(tried: Service, load: Load) -> None:
    engines, before = tried.pod_names("engine"), canary(tried)["revision"]
    tried.edit(podTemplate=ill("fails"))
    follow(tried, before, engines, "RolledBack")
    went_back(tried, r"\d+ of its \d+ requests fail, of the old revision's 0.0 %")
    assert tried.pod_names("engine") == engines
    assert load.go_on().failures == (), "what failed there was asked again at an old engine"


def test_a_slow_revision_goes_back(tried: Service, load: Load) -> None:
    engines, before = tried.pod_names("engine"), canary(tried)["revision"]
    tried.edit(podTemplate=ill("3"), rollout=rollout(maxTtft=200))
    follow(tried, before, engines, "RolledBack")
    went_back(tried, r"its first tokens take [1-9][.]\d+ s, the old revision's 0[.]\d+ s")
    assert tried.pod_names("engine") == engines
    assert load.go_on().failures == ()


def test_without_figures_it_waits_and_then_goes_back(tried: Service) -> None:
    engines, before = tried.pod_names("engine"), canary(tried)["revision"]
    spec = {name: value for name, value in tried.spec.items() if name not in ("model", "podTemplate")}
    tried.apply(**spec | {"engine": {**spec["engine"], "maxModelLen": 1024}, "rollout": rollout(patience=10)})
    wait_until(lambda: canary(tried)["phase"] == "Analysing", "the trial begins", PATIENCE_S)
    follow(tried, before, engines, "RolledBack")
    went_back(tried, "no router said what became of its requests")
    assert tried.pod_names("engine") == engines
    tried.edit(engine={**FLEET["engine"], "args": ["--max-num-seqs", "64"]})
    tried.wait_until_settled()
    assert tried.pod_names("engine") == engines, "the old revision is wanted again, and has never gone"


@pytest.fixture(scope="module")
def apart(cluster: Cluster, installation: Installation) -> Iterator[Service]:
    """One prefill and one decode engine."""
    service = Service(cluster, installation.namespace, "apart-tried")
    spec = {name: value for name, value in FLEET.items() if name != "replicas"}
    service.apply(**{**spec, "rollout": rollout(), "disaggregation": {"threshold": 0}})
    service.wait_until_settled(PATIENCE_S)
    yield service
    service.delete()


@pytest.fixture
def long_prompts(cluster: Cluster, images: Images, apart: Service) -> Iterator[Load]:
    with Load(cluster, images.operator, apart, sentences=12) as running:
        yield running


def test_prefill_and_decode_engines_are_tried_out_together(apart: Service, long_prompts: Load) -> None:
    engines = apart.pod_names("engine")
    apart.edit(engine={**apart.spec["engine"], "args": ["--max-num-seqs", "64"]})
    revision = follow(apart, "", engines, "Promoted")["revision"]
    apart.wait_until_settled(PATIENCE_S)
    assert trials(apart) == [f"{apart.name}-decode-{revision}", f"{apart.name}-prefill-{revision}"]
    assert engines.isdisjoint(apart.pod_names("engine"))
    assert long_prompts.go_on().failures == ()


def test_a_pair_that_fails_goes_back_and_no_request_is_lost(apart: Service, long_prompts: Load) -> None:
    engines, before, both = apart.pod_names("engine"), canary(apart).get("revision", ""), trials(apart)
    apart.edit(podTemplate=ill("fails"))
    follow(apart, before, engines, "RolledBack")
    assert re.search(r"\d+ of its \d+ requests fail", canary(apart)["message"])
    apart.wait_for("Progressing", "CanaryFailed")
    wait_until(lambda: trials(apart) == both, "no engine of the new revision is left")
    assert apart.pod_names("engine") == engines
    assert long_prompts.go_on().failures == (), "what failed there was asked again at the old ones"

"""Changes under load: what is asked while engines, routers and the operator are replaced is answered."""

from __future__ import annotations

import time

from e2e.kubernetes.cluster import wait_until
from e2e.kubernetes.installation import Installation
from e2e.kubernetes.load import Load
from e2e.kubernetes.service import Service

TOLD_WITHIN_S = 30


def test_nothing_is_lost_while_everything_is_replaced(installation: Installation, fleet: Service, load: Load) -> None:
    engines, routers = fleet.pod_names("engine"), fleet.pod_names("router")
    revision = fleet.role("engine")["revision"]

    fleet.edit(engine={**fleet.spec["engine"], "maxModelLen": 1536})
    fleet.wait_for("Progressing", "RollingOut")
    fleet.wait_until_settled(180)
    assert fleet.pod_names("engine").isdisjoint(engines)
    assert fleet.role("engine")["revision"] != revision
    assert fleet.pod_names("router") == routers, "a change of engines is none of routers"
    assert load.go_on().failures == ()

    fleet.edit(router={**fleet.spec["router"], "policy": "least-load"})
    fleet.wait_for("Progressing", "RollingOut")
    fleet.wait_until_settled(180)
    assert fleet.pod_names("router").isdisjoint(routers)
    assert load.go_on().failures == ()

    operators = installation.operator_names()
    serving = fleet.pod_names("engine") | fleet.pod_names("router")
    installation.upgrade({"operator": {"podAnnotations": {"season": "summer"}, "resyncSeconds": 240}})
    wait_until(lambda: not operators & installation.operator_names(), "the operators of before are gone")
    fleet.edit(rollout={"drainSeconds": 20, "progressSeconds": 1799})
    fleet.wait_until_settled(60)
    assert fleet.pod_names("engine") | fleet.pod_names("router") == serving, "an upgrade that changes no pod"
    assert load.go_on().failures == ()


def test_a_revision_that_fails_stops_and_the_old_one_serves(fleet: Service, load: Load) -> None:
    engines, right = fleet.pod_names("engine"), fleet.spec["engine"]

    began = time.monotonic()
    fleet.edit(engine={**right, "image": "pagefleet.invalid/engine:none"})
    stopped = fleet.wait_for("Progressing", "RolloutStopped", TOLD_WITHIN_S)
    assert time.monotonic() - began < TOLD_WITHIN_S
    assert "2 of 2 engines keep serving. Correct the spec, or undo the edit" in stopped
    assert 'cannot pull an image: image "pagefleet.invalid/engine:none"' in stopped
    assert fleet.condition("Ready")["status"] == "True"
    assert load.go_on().failures == ()

    fleet.edit(engine={**right, "args": ["--no-such-flag"]})
    wait_until(lambda: "--no-such-flag" in fleet.condition("Degraded").get("message", ""), "the flag is told")
    stopped = fleet.wait_for("Progressing", "RolloutStopped", TOLD_WITHIN_S)
    assert "2 of 2 engines keep serving. Correct the spec, or undo the edit" in stopped
    assert "refuses its settings" in stopped
    assert fleet.condition("Ready")["status"] == "True"
    assert engines <= fleet.pod_names("engine")
    assert load.go_on().failures == ()

    fleet.edit(engine=right)
    fleet.wait_until_settled()
    assert fleet.pod_names("engine") == engines, "the old revision is wanted again, and has never gone"
    assert load.go_on().failures == ()

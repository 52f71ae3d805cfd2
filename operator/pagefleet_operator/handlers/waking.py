"""Wakes a service that sleeps at zero engines while its spec is refused: by what was accepted last.

A plan that is refused touches nothing. But a sleeping service answers nobody, so its engines' Deployment, which is the
last accepted spec as it was carried out, gets its engines back, and nothing else changes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pagefleet_protocol.inference_status import InferenceServiceStatus
from pagefleet_protocol.kube_names import LABEL_COMPONENT, LABEL_ROLE

from pagefleet_operator.apply.cluster import Cluster
from pagefleet_operator.apply.kinds import BY_NAME
from pagefleet_operator.handlers.cluster_view import Key
from pagefleet_operator.plan.observed import Observed
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_operator.render.revision import as_scaled

_LOG = logging.getLogger(__name__)


async def wake_asleep(cluster: Cluster, key: Key, previous: InferenceServiceStatus | None, observed: Observed) -> None:
    """Give engines to a refused service that has none, if its autoscaler wants some.

    Args:
        cluster: to be changed.
        key: of the service.
        previous: its last status, which says whether pagefleet scales it.
        observed: its children, and what the autoscaler decided.

    Raises:
        ClusterError: it was not done; the look has to be repeated.
    """
    counts = _wanted(previous, observed)
    for (kind, name), child in observed.children.items():
        wanted = counts.get(_role(child.body), 0) if kind == "Deployment" and child.ours else 0
        if wanted and _replicas(child.body) == 0:
            body = await cluster.get(BY_NAME[kind], key[0], name)
            if body is None or _replicas(body) != 0:
                continue
            await cluster.apply(as_scaled(body, wanted))
            _LOG.info("%s/%s: %s wakes up with %d engines, though the spec is refused", *key, name, wanted)


def _wanted(previous: InferenceServiceStatus | None, observed: Observed) -> Mapping[str, int]:
    """Return the engines that autoscalers want, for whole requests and of both parts, where pagefleet scales them."""
    if previous is None:
        return {}
    rules = {"engine": previous.scaling} | {one.name: one.scaling for one in previous.role_scaling}
    scaled = {role for role, rule in rules.items() if rule is not None and rule.mode == "Internal"}
    seen = {"engine": observed.scaling} | dict(observed.role_scaling)
    counts = {role: one.desired for role, one in seen.items() if one is not None and role in scaled}
    # Parts wake together: neither answers alone.
    awake = any(counts.get(role) for role in PAIR_ROLES)
    return counts | {role: max(1, counts[role]) for role in PAIR_ROLES if awake and role in counts}


def _role(body: Mapping[str, Any]) -> str:
    """Return what a Deployment's pods are: engine, prefill, decode; empty: no engines."""
    labels = (body.get("metadata") or {}).get("labels") or {}
    return str(labels.get(LABEL_ROLE, "engine")) if labels.get(LABEL_COMPONENT) == "engine" else ""


def _replicas(body: Mapping[str, Any]) -> object:
    return (body.get("spec") or {}).get("replicas")

"""Wakes a service that sleeps at zero engines while its spec is refused: by what was accepted last.

A plan that is refused touches nothing. But a sleeping service answers nobody, so its engines' Deployment, which is the
last accepted spec as it was carried out, gets its engines back, and nothing else changes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pagefleet_protocol.inference_status import InferenceServiceStatus
from pagefleet_protocol.kube_names import LABEL_COMPONENT

from pagefleet_operator.apply.cluster import Cluster
from pagefleet_operator.apply.kinds import BY_NAME
from pagefleet_operator.handlers.cluster_view import Key
from pagefleet_operator.plan.observed import Observed

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
    wanted = observed.scaling.desired if observed.scaling is not None else 0
    if wanted < 1 or previous is None or previous.scaling is None or previous.scaling.mode != "Internal":
        return
    for (kind, name), child in observed.children.items():
        if kind == "Deployment" and child.ours and _is_engine(child.body) and _replicas(child.body) == 0:
            body = await cluster.get(BY_NAME[kind], key[0], name)
            if body is None or _replicas(body) != 0:
                continue
            spec = {**body["spec"], "replicas": wanted}
            await cluster.replace(BY_NAME[kind], key[0], {**body, "spec": spec})
            _LOG.info("%s/%s: %s wakes up with %d engines, though the spec is refused", *key, name, wanted)


def _is_engine(body: Mapping[str, Any]) -> bool:
    return ((body.get("metadata") or {}).get("labels") or {}).get(LABEL_COMPONENT) == "engine"


def _replicas(body: Mapping[str, Any]) -> object:
    return (body.get("spec") or {}).get("replicas")

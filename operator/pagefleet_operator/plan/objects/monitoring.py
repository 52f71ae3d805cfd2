"""The ServiceMonitor, by which the Prometheus operator reads routers and engines."""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.kube_names import LABEL_COMPONENT, LABEL_SERVICE

from pagefleet_operator.plan.objects.names_and_labels import PORT_NAME, Object, metadata, names_of


def service_monitor(service: InferenceService) -> Object:
    """Return the ServiceMonitor of both Services. The user's labels are for being selected; ours stay as they are."""
    made = metadata(service, names_of(service).service, "router")
    made["labels"] = {**service.spec.monitoring.labels, **made["labels"]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": made,
        "spec": {
            "selector": {"matchLabels": {LABEL_SERVICE: service.name}},
            "targetLabels": [LABEL_SERVICE, LABEL_COMPONENT],
            "endpoints": [{"port": PORT_NAME, "path": "/metrics"}],
        },
    }

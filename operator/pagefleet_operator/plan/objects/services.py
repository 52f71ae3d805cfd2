"""The address that clients use, and the one by which routers find engines."""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.kube_names import SERVING_PORT

from pagefleet_operator.plan.objects.engine_deployment import kv_ports
from pagefleet_operator.plan.objects.names_and_labels import PORT_NAME, Object, metadata, names_of, selector
from pagefleet_operator.plan.observed import Component

CLIENT_PORT = 80


def client_service(service: InferenceService) -> Object:
    """Return the Service in front of the routers."""
    return _service(service, names_of(service).service, {"type": "ClusterIP"}, CLIENT_PORT, "router")


def engine_service(service: InferenceService) -> Object:
    """Return the headless Service. It has EndpointSlices, and no address that could hide an engine from the routers."""
    headless = {"type": "ClusterIP", "clusterIP": "None"}
    return _service(service, names_of(service).engine, headless, SERVING_PORT, "engine")


def prefill_service(service: InferenceService) -> Object:
    """Return the headless Service by which decode engines find prefill engines."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, names_of(service).part("prefill"), "engine"),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            # It says who may be asked, not who is ready: an engine that leaves still hands over what it has computed.
            "publishNotReadyAddresses": True,
            "selector": selector(service.name, "engine", "prefill"),
            "ports": [one | {"targetPort": one["name"]} for one in kv_ports("port")],
        },
    }


def openai_config(service: InferenceService) -> Object:
    """Return the ConfigMap that makes OpenAI's clients in an application's pod talk to the model, by `envFrom`."""
    # Without the cluster's domain: every pod's own search path has it.
    base_url = f"http://{names_of(service).service}.{service.metadata.namespace}.svc/v1"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, names_of(service).openai, "router"),
        "data": {"OPENAI_BASE_URL": base_url, "OPENAI_MODEL": service.model_name},
    }


def _service(service: InferenceService, name: str, kind: Object, port: int, component: Component) -> Object:
    entry = {"name": PORT_NAME, "port": port, "targetPort": PORT_NAME, "protocol": "TCP", "appProtocol": "http"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, name, component),
        "spec": {**kind, "selector": selector(service.name, component), "ports": [entry]},
    }

"""The address that clients use, and the one by which routers find engines."""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.kube_names import LABEL_COMPONENT, LABEL_SERVICE, SERVING_PORT

from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import Component
from pagefleet_operator.render.engine_deployment import kv_ports
from pagefleet_operator.render.labels import PORT_NAME, Object, metadata, selector

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


def ingress(service: InferenceService) -> Object:
    """Return the Ingress of everything under one host name."""
    expose, name = service.spec.expose, names_of(service).service
    assert expose.host is not None, "expose.host is needed for type Ingress; the spec's rules see to it"
    backend = {"service": {"name": name, "port": {"name": PORT_NAME}}}
    paths = [{"path": "/", "pathType": "Prefix", "backend": backend}]
    spec: Object = {"rules": [{"host": expose.host, "http": {"paths": paths}}]}
    if expose.class_name:
        spec["ingressClassName"] = expose.class_name
    if expose.tls:
        spec["tls"] = [{"hosts": [expose.host], "secretName": expose.tls.secret_name}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": metadata(service, name, "router"),
        "spec": spec,
    }


def http_route(service: InferenceService) -> Object:
    """Return the HTTPRoute of everything under one host name."""
    expose, name = service.spec.expose, names_of(service).service
    assert expose.gateway_ref is not None, "expose.gatewayRef is needed for type Gateway; the spec's rules see to it"
    assert expose.host is not None, "expose.host is needed for type Gateway; the spec's rules see to it"
    gateway = expose.gateway_ref.model_dump(mode="json", by_alias=True, exclude_none=True)
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [{"name": name, "port": CLIENT_PORT}],
        # Answers are streamed for as long as they take; 0 switches a gateway's own limits off.
        "timeouts": {"request": "0s", "backendRequest": "0s"},
    }
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata(service, name, "router"),
        "spec": {
            "parentRefs": [gateway],
            "hostnames": [expose.host],
            "rules": [rule],
        },
    }


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

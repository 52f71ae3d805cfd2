"""The address that clients use, and the one by which routers find engines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.kube_names import LABEL_COMPONENT, LABEL_SERVICE, PICKER_PORT, PORT_NAME, SERVING_PORT

from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import Component
from pagefleet_operator.render.labels import PICKER_NAME, Object, child_object, selector
from pagefleet_operator.render.ports import kv_ports, serving_ports

CLIENT_PORT = 80
POOL_GROUP = "inference.networking.k8s.io"
_HEADLESS: Object = {"type": "ClusterIP", "clusterIP": "None"}


def client_service(service: InferenceService) -> Object:
    made = _service(service, names_of(service).service, {"type": "ClusterIP"}, CLIENT_PORT, "router")
    if service.spec.router.inference_pool is not None:
        made["spec"]["ports"].append(
            {
                "name": PICKER_NAME,
                "port": PICKER_PORT,
                "targetPort": PICKER_NAME,
                "protocol": "TCP",
                "appProtocol": "http2",
            }
        )
    return made


def engine_service(
    service: InferenceService, ranks: int = 1, share: Mapping[str, str] = MappingProxyType({})
) -> Object:
    """Return the headless Service. It has EndpointSlices, and no address that could hide an engine from the routers.

    Args:
        ranks: ports for requests that any of the pods has.
        share: labels that tell routers how many requests a new revision gets.
    """
    made = _service(service, names_of(service).engine, _HEADLESS, SERVING_PORT, "engine")
    made["spec"]["ports"] = [_http_port(name, number) for name, number in serving_ports(ranks).items()]
    made["metadata"]["labels"] = {**made["metadata"]["labels"], **share}
    return made


def prefill_service(service: InferenceService, ranks: int = 1) -> Object:
    """Return the headless Service by which decode engines find prefill engines."""
    spec = {
        **_HEADLESS,
        # It says who may be asked, not who is ready: an engine that leaves still hands over what it has computed.
        "publishNotReadyAddresses": True,
        "selector": selector(service.name, "engine", "prefill"),
        "ports": [
            {"name": name, "port": number, "protocol": "TCP", "targetPort": name}
            for name, number in kv_ports(ranks).items()
        ],
    }
    return child_object("v1 Service", service, names_of(service).part("prefill"), "engine", spec=spec)


def openai_config(service: InferenceService) -> Object:
    """Return the ConfigMap that makes OpenAI's clients in an application's pod talk to the model, by `envFrom`."""
    # Without the cluster's domain: every pod's own search path has it.
    base_url = f"http://{names_of(service).service}.{service.metadata.namespace}.svc/v1"
    data = {"OPENAI_BASE_URL": base_url, "OPENAI_MODEL": service.model_name}
    return child_object("v1 ConfigMap", service, names_of(service).openai, "router", data=data)


def _service(service: InferenceService, name: str, kind: Object, port: int, component: Component) -> Object:
    spec = {**kind, "selector": selector(service.name, component), "ports": [_http_port(PORT_NAME, port)]}
    return child_object("v1 Service", service, name, component, spec=spec)


def _http_port(name: str, port: int) -> Object:
    return {"name": name, "port": port, "targetPort": name, "protocol": "TCP", "appProtocol": "http"}


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
    return child_object("networking.k8s.io/v1 Ingress", service, name, "router", spec=spec)


def http_route(service: InferenceService, *, to_pool: bool) -> Object:
    """Return the HTTPRoute of everything under one host name: to the routers, or to their InferencePool."""
    expose, name = service.spec.expose, names_of(service).service
    assert expose.gateway_ref is not None, "expose.gatewayRef is needed for type Gateway; the spec's rules see to it"
    assert expose.host is not None, "expose.host is needed for type Gateway; the spec's rules see to it"
    gateway = expose.gateway_ref.model_dump(mode="json", by_alias=True, exclude_none=True)
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [
            {"group": POOL_GROUP, "kind": "InferencePool", "name": name}
            if to_pool
            else {"name": name, "port": CLIENT_PORT}
        ],
        # Answers are streamed for as long as they take; 0 switches a gateway's own limits off.
        "timeouts": {"request": "0s", "backendRequest": "0s"},
    }
    spec = {"parentRefs": [gateway], "hostnames": [expose.host], "rules": [rule]}
    return child_object("gateway.networking.k8s.io/v1 HTTPRoute", service, name, "router", spec=spec)


def inference_pool(service: InferenceService, ranks: int = 1) -> Object:
    """Return the InferencePool of the engines, which asks the routers."""
    pool, name = service.spec.router.inference_pool, names_of(service).service
    assert pool is not None
    spec = {
        "selector": {"matchLabels": selector(service.name, "engine")},
        "targetPorts": [{"number": number} for number in serving_ports(ranks).values()],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": name,
            "port": {"number": PICKER_PORT},
            "failureMode": pool.failure_mode,
        },
    }
    return child_object(f"{POOL_GROUP}/v1 InferencePool", service, name, "router", spec=spec)


def service_monitor(service: InferenceService, ranks: int = 1) -> Object:
    """Return the ServiceMonitor of both Services. The user's labels are for being selected; ours stay as they are."""
    spec = {
        "selector": {"matchLabels": {LABEL_SERVICE: service.name}},
        "targetLabels": [LABEL_SERVICE, LABEL_COMPONENT],
        "endpoints": [{"port": name, "path": "/metrics"} for name in serving_ports(ranks)],
    }
    made = child_object(
        "monitoring.coreos.com/v1 ServiceMonitor", service, names_of(service).service, "router", spec=spec
    )
    made["metadata"]["labels"] = {**service.spec.monitoring.labels, **made["metadata"]["labels"]}
    return made

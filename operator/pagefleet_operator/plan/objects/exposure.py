"""How clients outside the cluster get in: an Ingress, or an HTTPRoute at somebody's Gateway."""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService

from pagefleet_operator.plan.objects.names_and_labels import PORT_NAME, Object, metadata, names_of
from pagefleet_operator.plan.objects.services import CLIENT_PORT


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

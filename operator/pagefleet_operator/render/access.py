"""Accounts of the pods, and the one right that one of them has."""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService

from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import Component
from pagefleet_operator.render.labels import Object, metadata

_RBAC = "rbac.authorization.k8s.io"


def access(service: InferenceService) -> tuple[Object, ...]:
    """Return ServiceAccounts, Role and RoleBinding."""
    names = names_of(service)
    return (
        _account(service, names.engine, "engine"),
        _account(service, names.router, "router"),
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "Role",
            "metadata": metadata(service, names.router, "router"),
            "rules": [
                {
                    "apiGroups": ["discovery.k8s.io"],
                    "resources": ["endpointslices"],
                    # By name it cannot be: nobody knows what a slice will be called.
                    "verbs": ["get", "list", "watch"],
                }
            ],
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(service, names.router, "router"),
            "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": names.router},
            "subjects": [
                {"kind": "ServiceAccount", "name": names.router, "namespace": service.metadata.namespace},
            ],
        },
    )


def _account(service: InferenceService, name: str, component: Component) -> Object:
    # Nobody gets a token by being in the pod; the router's template mounts one into one container.
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, name, component),
        "automountServiceAccountToken": False,
    }

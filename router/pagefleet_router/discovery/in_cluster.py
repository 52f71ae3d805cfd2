"""How a pod finds its API server: two variables and the folder of its service account."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from pagefleet_router.discovery.kubernetes import KubernetesSource, ServiceRef
from pagefleet_router.discovery.slice_api import ApiAccess
from pagefleet_router.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def make_kubernetes_source(
    service: str, namespace: str | None, model: str, environment: Mapping[str, str] = os.environ,
    folder: Path = SERVICE_ACCOUNT,
) -> KubernetesSource:  # fmt: skip
    """Return the source of a Service's pods.

    Args:
        service: its name.
        namespace: None: the pod's own.
        model: what its pods serve.
        environment: the process's.
        folder: token, ca.crt and namespace of the service account.

    Raises:
        ConfigError: this is no pod, or it has no service account's token.
    """
    access = in_cluster_access(environment, folder)
    if namespace is None:
        try:
            namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"{folder / 'namespace'} cannot be read: give --kubernetes-namespace NAME") from None
    return KubernetesSource(access, ServiceRef(namespace, service, model))


def in_cluster_access(environment: Mapping[str, str], folder: Path) -> ApiAccess:
    """Return where the API server is and what the service account's folder holds for it.

    Raises:
        ConfigError: a variable or a file is missing.
    """
    host, port = (environment.get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
    if not host or not port.isdecimal():
        raise ConfigError(
            "--kubernetes-service works in a pod, and KUBERNETES_SERVICE_HOST and _PORT are not set here: "
            "give --endpoints-file FILE or --engine URL"
        )
    token, authority = folder / "token", folder / "ca.crt"
    for file in (token, authority):
        if not os.access(file, os.R_OK):
            raise ConfigError(f"{file} cannot be read: the pod needs automountServiceAccountToken: true")
    return ApiAccess(f"https://{_bracketed(host)}:{port}", token, authority)


def _bracketed(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host

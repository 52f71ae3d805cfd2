"""How to reach the API server: from a pod's service account, or from a kubeconfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import (
    ConfigException,
    list_kube_config_contexts,
    load_incluster_config,
    load_kube_config,
)

from pagefleet_operator.errors import SettingsError

SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_CONNECTIONS = 32
_BEARER = "BearerToken"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client needs besides pagefleet's own: the same account, told in plain values."""

    server: str
    ca_path: str | None
    certificate_path: str | None
    private_key_path: str | None
    insecure: bool
    token: str | None
    proxy: str | None


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """Read where the API server is and who we are. A pod's token is read again when it is a minute old.

    Raises:
        SettingsError: there is neither a kubeconfig nor a service account, or it cannot be used.
    """
    configuration = Configuration(connection_pool_maxsize=MAX_CONNECTIONS)
    try:
        if kubeconfig is None:
            load_incluster_config(configuration)
        else:
            if not kubeconfig.is_file():  # noqa: ASYNC240 - once, before anything runs
                raise SettingsError(f"--kubeconfig {kubeconfig}: there is no such file")
            # Not persisted: a program that reads a person's kubeconfig does not rewrite it.
            await load_kube_config(str(kubeconfig), client_configuration=configuration, persist_config=False)
    except ConfigException as error:
        if kubeconfig is None:
            raise SettingsError(
                f"no service account of a pod here ({error}): outside a cluster give --kubeconfig FILE"
            ) from error
        raise SettingsError(f"--kubeconfig {kubeconfig}: {error}") from error
    return configuration


async def load_own_configuration(kubeconfig: Path | None, context: str | None) -> tuple[Configuration, str]:
    """Read a person's kubeconfig, as kubectl finds it; returns it with the namespace that its context works in.

    Raises:
        SettingsError: there is none, or no such context.
    """
    configuration = Configuration(connection_pool_maxsize=MAX_CONNECTIONS)
    file = None if kubeconfig is None else str(kubeconfig)
    try:
        await load_kube_config(file, context=context, client_configuration=configuration, persist_config=False)
        contexts, active = list_kube_config_contexts(file)
    except (ConfigException, OSError) as error:
        raise SettingsError(f"no cluster is known here ({error}): give --kubeconfig FILE, or set KUBECONFIG") from error
    chosen = active if context is None else next(one for one in contexts if one["name"] == context)
    return configuration, chosen["context"].get("namespace") or "default"


def credentials_of(configuration: Configuration) -> Credentials:
    hook: Any = configuration.refresh_api_key_hook  # set by in-cluster configuration alone
    if hook is not None:
        hook(configuration)
    bearer = configuration.api_key.get(_BEARER)
    return Credentials(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        insecure=not configuration.verify_ssl,
        token=bearer.split(" ", 1)[-1].strip() if bearer else None,
        proxy=configuration.proxy,
    )


def own_namespace(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT_FOLDER) -> str:
    """Return the namespace of the pod that this runs in; empty outside a cluster."""
    if name := environment.get("POD_NAMESPACE"):
        return name
    try:
        return (folder / "namespace").read_text().strip()
    except OSError:
        return ""

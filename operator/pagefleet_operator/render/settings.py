"""What the administrator decided when the operator was installed; the same for all InferenceServices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Constant for the operator's life."""

    engine_image: str
    router_image: str
    operator_image: str
    """Runs the model jobs and init containers: it holds `pagefleet download`."""
    operator_namespace: str
    """Network policies let pods from there ask downloads for their progress."""
    image_pull_secrets: tuple[str, ...] = ()
    cluster_domain: str = "cluster.local"
    hf_endpoint: str = ""
    """Mirror of Hugging Face for services that name none; empty: the hub itself."""
    allowed_images: tuple[str, ...] = ()
    """Beginnings of images that spec.engine.image and podTemplate may name; empty: any."""
    allowed_host_paths: tuple[str, ...] = ()
    """Folders of nodes that cache.path may name or be in; empty: none."""
    allow_any_pod_template: bool = False
    """True: podTemplate may also change service account, host namespaces, host paths and privileges."""
    network_policies: bool = True
    """Whether NetworkPolicies are made."""
    api_server_ports: tuple[int, ...] = (443, 6443)
    """Of the API server as pods reach it; network policies let routers out to these."""

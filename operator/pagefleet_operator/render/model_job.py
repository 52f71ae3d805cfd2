"""The job that works out a model's facts and, for a claim, downloads the model into it."""

from __future__ import annotations

from collections.abc import Mapping

from pagefleet_protocol.exit_status import MISTAKE
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.kube_names import COMPILED_FOLDER, LABEL_REVISION, PORT_NAME, SERVING_PORT

from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import DOWNLOAD
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.render.downloads import (
    MODEL_PATH,
    STORE_PATH,
    Download,
    download_container,
    download_endpoint,
    download_volumes,
    job_tmp_volume,
)
from pagefleet_operator.render.engine_deployment import tolerations_of
from pagefleet_operator.render.labels import Object, child_object, labels
from pagefleet_operator.render.model_files import (
    VOLUME,
    claim_volume,
    image_volume,
    keeps_compiled,
    keeps_one_node,
    model_mount,
    same_node,
    store_folder,
    written_revision,
)
from pagefleet_operator.render.pod import PodParts, pod_template
from pagefleet_operator.render.revision import digest
from pagefleet_operator.render.settings import ClusterSettings
from pagefleet_operator.render.strategic_merge import DIRECTIVE, strategic_merge

_RETRIES = 6
"""With Kubernetes' growing pauses: about ten minutes in which a store may come back."""


def needs_job(resolved: Resolved) -> bool:
    """Whether there is something to find out; nobody but the engine's image holds file:// and builtin:// models."""
    return resolved.uri.scheme not in ("file", "builtin")


def model_job(service: InferenceService, resolved: Resolved, settings: ClusterSettings) -> Object:
    """Return the job. Its name changes with whatever its result depends on, and so does the job."""
    revision = _revision(service, resolved, settings)
    container = download_container(service, resolved, settings, _download(service, resolved, settings))
    container["ports"] = [{"name": PORT_NAME, "containerPort": SERVING_PORT, "protocol": "TCP"}]
    volumes = [job_tmp_volume(), *download_volumes(service, resolved)]
    volume = _model_volume(resolved)
    if volume:
        volumes.append(volume)
        container["volumeMounts"].append(_model_mount(resolved))
    more: Object = {"restartPolicy": "Never"}
    if resolved.cache == "pvc":
        # A claim may be bound to where its first pod runs: engines have to be able to run there too.
        more |= {"nodeSelector": dict(resolved.node_selector)} if resolved.node_selector else {}
        more |= {"tolerations": found} if (found := tolerations_of(resolved)) else {}
    if keeps_one_node(service, resolved):
        more["affinity"] = same_node(service)
    parts = PodParts(
        labels=labels(service.name, "model") | {LABEL_REVISION: revision},
        service_account=names_of(service).engine,
        containers=(container,),
        volumes=tuple(volumes),
        more=more,
    )
    spec = {
        "backoffLimit": _RETRIES,
        "podFailurePolicy": {"rules": _failure_rules()},
        "template": strategic_merge(pod_template(parts, settings), {"spec": _pull_secrets(service, resolved)}),
    }
    return child_object("batch/v1 Job", service, names_of(service).model_job(revision), "model", spec=spec)


def _pull_secrets(service: InferenceService, resolved: Resolved) -> Object:
    """Return what podTemplate says of pulling the model's image: the job pulls it before any engine.

    Nobody has looked at podTemplate's shape yet.
    """
    spec = service.spec.pod_template.get("spec")
    given = spec.get("imagePullSecrets") if resolved.cache == "image" and isinstance(spec, Mapping) else None
    named = [one for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []
    names = [one["name"] for one in named if isinstance(one.get("name"), str) and DIRECTIVE not in one]
    return {"imagePullSecrets": [{"name": name} for name in names]} if names else {}


def _revision(service: InferenceService, resolved: Resolved, settings: ClusterSettings) -> str:
    """Hash what the result depends on, as it is written: what the job itself finds out must not change its name.

    The operator's image is not in it. An upgrade has no reason to ask every store again.
    """
    secret = service.spec.model.secret_ref
    return digest(
        [
            resolved.uri.text,
            written_revision(service),
            download_endpoint(service, settings),
            secret.name if secret else "",
            resolved.claim,
            *([COMPILED_FOLDER] if keeps_compiled(resolved) else []),
            *_pull_secrets(service, resolved).values(),
        ]
    )


def _download(service: InferenceService, resolved: Resolved, settings: ClusterSettings) -> Download:
    if not resolved.uri.remote:
        return Download(uri=f"file://{MODEL_PATH}", folder="", port=SERVING_PORT)
    return Download(
        uri=resolved.uri.text,
        folder=f"{STORE_PATH}/{store_folder(service, resolved)}" if resolved.cache == "pvc" else "",
        revision=written_revision(service),
        endpoint=download_endpoint(service, settings),
        port=SERVING_PORT,
    )


def _model_volume(resolved: Resolved) -> Object | None:
    if resolved.cache == "image":
        return image_volume(resolved)
    return claim_volume(resolved, read_only=not resolved.uri.remote) if resolved.cache == "pvc" else None


def _model_mount(resolved: Resolved) -> Object:
    if resolved.uri.remote:
        return {"name": VOLUME, "mountPath": STORE_PATH}
    return model_mount(resolved.uri.sub_path if resolved.uri.scheme == "pvc" else "")


def _failure_rules() -> list[Object]:
    return [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": DOWNLOAD, "operator": "In", "values": [MISTAKE]},
        },
        # A pod that was evicted, or whose node went, has not failed at anything.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


DEFAULT_SIZE = "100Gi"


def model_claim(service: InferenceService, resolved: Resolved) -> Object:
    """Return the claim. All of it but the size is fixed from the first day; the size can grow where its class can."""
    assert resolved.makes_claim
    cache = service.spec.cache
    spec: Object = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": cache.size or DEFAULT_SIZE}},
    }
    if cache.storage_class is not None:
        spec["storageClassName"] = cache.storage_class
    return child_object("v1 PersistentVolumeClaim", service, resolved.claim, "model", spec=spec)

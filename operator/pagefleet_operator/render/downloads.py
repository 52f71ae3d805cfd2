"""How the downloader is run, in engines' pods or as the model job. Credentials go to it and to no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagefleet_protocol.inference_service import InferenceService

from pagefleet_operator.plan.observed import DOWNLOAD
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.render.labels import Object
from pagefleet_operator.render.pod import container, env, tmp_volume
from pagefleet_operator.render.settings import ClusterSettings

STORE_PATH = "/models"
"""Where a download finds the volume that it fills; one folder in it for each model and revision."""
MODEL_PATH = "/models/model"
"""Where an engine finds the model."""
SECRET_PATH = "/etc/pagefleet/model-secret"  # noqa: S105 a folder
_SECRET_VOLUME = "model-secret"  # noqa: S105 a volume's name
_GOOGLE_KEY = "key.json"
_TERMINATION_LOG = "/dev/termination-log"
_TMP_SIZE = "1Gi"

_REQUIRED_KEYS: Mapping[str, tuple[str, ...]] = {
    "hf": ("HF_TOKEN",),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
}
_OPTIONAL_KEYS: Mapping[str, tuple[str, ...]] = {"s3": ("AWS_SESSION_TOKEN", "AWS_REGION")}
"""Entries of the Secret that become variables, by the model's scheme."""
_UNSIGNED: Mapping[str, str] = {"s3": "AWS_SKIP_SIGNATURE", "gs": "GOOGLE_SKIP_SIGNATURE"}
"""Without a Secret a bucket is one that everybody may read: network policies keep pods from the node's identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """One run of the downloader."""

    uri: str
    folder: str
    """Empty: nothing is kept, the model is only looked at."""
    revision: str = ""
    endpoint: str = ""
    port: int | None = None
    """Where it tells its progress."""


def download_endpoint(service: InferenceService, settings: ClusterSettings) -> str:
    """Return the mirror to download from; empty for the store itself."""
    if service.spec.model.endpoint:
        return service.spec.model.endpoint
    return settings.hf_endpoint if service.spec.model.uri.startswith("hf://") else ""


def download_container(
    service: InferenceService, resolved: Resolved, settings: ClusterSettings, download: Download
) -> Object:
    """Return the container; what it mounts beside /tmp and its Secret is for the caller to add."""
    args = ["download", download.uri, *([download.folder] if download.folder else ["--inspect"])]
    args += [f"--revision={download.revision}"] if download.revision else []
    args += ["--endpoint", download.endpoint] if download.endpoint else []
    args += ["--port", str(download.port)] if download.port else []
    made = container(DOWNLOAD, settings.operator_image, [*args, "--termination-message", _TERMINATION_LOG])
    secret = service.spec.model.secret_ref
    if secret and resolved.uri.remote:
        made["env"] += _credentials(resolved.uri.scheme, secret.name)
        if resolved.uri.scheme == "gs":
            made["volumeMounts"].append({"name": _SECRET_VOLUME, "mountPath": SECRET_PATH, "readOnly": True})
    elif resolved.uri.scheme in _UNSIGNED and settings.network_policies:
        made["env"] += env({_UNSIGNED[resolved.uri.scheme]: "true"})
    made["resources"] = {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    return made


def download_volumes(service: InferenceService, resolved: Resolved) -> tuple[Object, ...]:
    """Return the volumes that the container needs beside /tmp."""
    secret = service.spec.model.secret_ref
    if secret is None or resolved.uri.scheme != "gs":
        return ()
    source = {"secretName": secret.name, "items": [{"key": _GOOGLE_KEY, "path": _GOOGLE_KEY}], "defaultMode": 0o440}
    return ({"name": _SECRET_VOLUME, "secret": source},)


def job_tmp_volume() -> Object:
    """Return /tmp of a pod that does nothing but download; weights never go there."""
    return tmp_volume(_TMP_SIZE)


def _credentials(scheme: str, secret: str) -> list[Object]:
    if scheme == "gs":
        return env({"GOOGLE_APPLICATION_CREDENTIALS": f"{SECRET_PATH}/{_GOOGLE_KEY}"})
    required = [_from_secret(key, secret, optional=False) for key in _REQUIRED_KEYS[scheme]]
    return required + [_from_secret(key, secret, optional=True) for key in _OPTIONAL_KEYS.get(scheme, ())]


def _from_secret(key: str, secret: str, optional: bool) -> Object:
    reference: Object = {"name": secret, "key": key}
    return {"name": key, "valueFrom": {"secretKeyRef": reference | ({"optional": True} if optional else {})}}

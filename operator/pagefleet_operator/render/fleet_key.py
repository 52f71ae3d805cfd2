"""The fleet key: a Secret that the operator makes once and can never read, mounted by engines and routers.

It is no child like the others: to apply one means to know what is in it. The operator may create Secrets and do nothing
else with them, so it makes the key where a pod is going to need it, and leaves it alone when there is one.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.kube_names import FLEET_KEY_ENTRY

from pagefleet_operator.plan.engine_sets import ENGINE_SETS, template_in
from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import Observed
from pagefleet_operator.render.labels import Object, child_object
from pagefleet_operator.render.pod import Gear

KEY_PATH = "/etc/pagefleet/fleet"
_VOLUME = "fleet-key"
_RECENT = timedelta(minutes=2)
"""A node says every minute or two what a pod waits for."""
_MOUNT_FAILED = "FailedMount"


def fleet_key_secret(service: InferenceService, key: bytes) -> Object:
    """Return the Secret with a key. It goes when the service goes, and is never changed by the operator.

    Immutable it is not: a node would give its copy to new pods long after the Secret was deleted, and other nodes a new
    key.
    """
    data = {FLEET_KEY_ENTRY: base64.b64encode(key).decode()}
    return child_object("v1 Secret", service, names_of(service).fleet, "router", type="Opaque", data=data)


def needs_fleet_key(service: InferenceService, wanted: Iterable[Object], observed: Observed) -> bool:
    """Return whether the Secret may be missing: pods that mount it are about to be made, or wait for it."""
    secret = names_of(service).fleet
    keyed = [child for child in wanted if child["kind"] in ENGINE_SETS and _mounts_key(child, secret)]
    seen = [observed.children.get((child["kind"], child["metadata"]["name"])) for child in keyed]
    if any(child is None or not _mounts_key(child.body, secret) for child in seen):
        return True
    lost = f'"{secret}" not found'
    return any(
        event.reason == _MOUNT_FAILED and lost in event.message and observed.now - event.last_seen < _RECENT
        for event in observed.events
    )


def fleet_key(service: InferenceService) -> Gear:
    """Return the key's file. A pod waits for the Secret: without the key it could not be heard."""
    source = {"secretName": names_of(service).fleet, "optional": False, "defaultMode": 0o440}
    return Gear(
        args=("--fleet-key-file", f"{KEY_PATH}/{FLEET_KEY_ENTRY}"),
        mounts=({"name": _VOLUME, "mountPath": KEY_PATH, "readOnly": True},),
        volumes=({"name": _VOLUME, "secret": source},),
    )


def _mounts_key(made: Mapping[str, Any], secret: str) -> bool:
    pod = template_in(made).get("spec", {})
    volumes = pod.get("volumes") or ()
    return any(
        volume.get("name") == _VOLUME and (volume.get("secret") or {}).get("secretName") == secret for volume in volumes
    )

"""The routers: a Deployment whose pods may look at the engines' addresses and at nothing else."""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService, RouterPool
from pagefleet_protocol.kube_names import LIVE_PATH, PICKER_PORT, SERVING_PORT

from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.workloads import Workload, router_workload
from pagefleet_operator.render.fleet_key import fleet_key
from pagefleet_operator.render.labels import PICKER_NAME, Object, child_object, labels, selector
from pagefleet_operator.render.pod import (
    Gear,
    PodParts,
    Probe,
    container,
    deployment_spec,
    grace_s,
    pod_template,
    rolling_update,
    serving,
    spread,
    tmp_volume,
)
from pagefleet_operator.render.settings import ClusterSettings

CONTAINER = "router"
KEYS_PATH = "/etc/pagefleet/keys"
_KEYS_VOLUME = "keys"
_TOKEN_VOLUME = "api-access"  # noqa: S105 a volume's name
_TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 where clients look for it
_TOKEN_LIFE_S = 3600
_TMP_SIZE = "64Mi"
_DEFAULT_CPU = "500m"
_DEFAULT_MEMORY = "512Mi"
_PROBE = Probe(startup_period_s=1, startup_failures=120, ready_period_s=2, startup_path=LIVE_PATH)
"""A router is not ready while no engine is, for as long as a model loads; it has started all the same."""


def router_deployment(service: InferenceService, resolved: Resolved, settings: ClusterSettings) -> Object:
    rollout: Object = {
        "replicas": service.spec.router.replicas,
        "strategy": rolling_update(max_surge=1, max_unavailable=0),
        # Routers wait for engines: they may take as long as those do.
        "progressDeadlineSeconds": service.spec.rollout.progress_seconds,
    }
    spec = deployment_spec(_template(service, resolved, settings), selector(service.name, "router"), rollout)
    return child_object("apps/v1 Deployment", service, names_of(service).router, "router", spec=spec)


def drain_s(service: InferenceService) -> int:
    """Return what a router's open requests get: twice what an engine's do.

    Another fleet key replaces routers and engines at once. A request that has just come then moves, when its engine has
    drained, to another one, and this router is the only one that can go on with it.
    """
    return 2 * service.spec.rollout.drain_seconds


def _template(service: InferenceService, resolved: Resolved, settings: ClusterSettings) -> Object:
    workload = router_workload(service, resolved, drain_s(service))
    gear = (_token(), _keys(service), fleet_key(service) if workload.keyed else Gear())
    parts = PodParts(
        labels=labels(service.name, "router"),
        service_account=names_of(service).router,
        containers=(_container(service, workload, settings, gear),),
        volumes=(tmp_volume(_TMP_SIZE), *(volume for one in gear for volume in one.volumes)),
        more={
            "topologySpreadConstraints": [spread(selector(service.name, "router"))],
            "terminationGracePeriodSeconds": grace_s(round(workload.drain_timeout_s)),
        },
    )
    return pod_template(parts, settings)


def _container(
    service: InferenceService, workload: Workload, settings: ClusterSettings, gear: tuple[Gear, ...]
) -> Object:
    args = [workload.verb, "--kubernetes-service", names_of(service).engine, *workload.args]
    args += ["--inference-service", service.name] if service.spec.router.console else []
    args += ["--host", "0.0.0.0", "--port", str(SERVING_PORT)]  # noqa: S104 pods are reached from outside themselves
    pool = service.spec.router.inference_pool
    args += _picker_args(pool) if pool else []
    args += [word for one in gear for word in one.args]
    made = container(CONTAINER, settings.router_image, args) | serving(_PROBE)
    made["ports"] += [{"name": PICKER_NAME, "containerPort": PICKER_PORT, "protocol": "TCP"}] if pool else []
    made["volumeMounts"] += [mount for one in gear for mount in one.mounts]
    wanted = service.spec.router.resources
    memory = wanted.memory or _DEFAULT_MEMORY
    made["resources"] = {
        "requests": {"cpu": wanted.cpu or _DEFAULT_CPU, "memory": memory},
        "limits": {"memory": memory},
    }
    return made


def _picker_args(pool: RouterPool) -> list[str]:
    port = ["--endpoint-picker-port", str(PICKER_PORT)]
    return port if pool.tls else [*port, "--no-endpoint-picker-tls"]


def _keys(service: InferenceService) -> Gear:
    """Return the API keys. Their mount is a folder, not one file: only folders follow a change of the Secret."""
    auth = service.spec.router.auth
    if auth is None:
        return Gear()
    # The key itself, never all of the Secret. Without it the pod waits: a router that lets everybody in is worse.
    source = {
        "secretName": auth.secret_ref.name,
        "items": [{"key": auth.secret_ref.key, "path": auth.secret_ref.key}],
        "optional": False,
        "defaultMode": 0o440,
    }
    return Gear(
        args=("--api-key-file", f"{KEYS_PATH}/{auth.secret_ref.key}"),
        mounts=({"name": _KEYS_VOLUME, "mountPath": KEYS_PATH, "readOnly": True},),
        volumes=({"name": _KEYS_VOLUME, "secret": source},),
    )


def _token() -> Gear:
    """Return what clients of the API server look for, as automounting would give it to every container of the pod."""
    namespace = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": _TOKEN_LIFE_S}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]
    return Gear(
        mounts=({"name": _TOKEN_VOLUME, "mountPath": _TOKEN_PATH, "readOnly": True},),
        volumes=({"name": _TOKEN_VOLUME, "projected": {"sources": sources, "defaultMode": 0o440}},),
    )

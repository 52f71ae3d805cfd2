"""The engines: a Deployment, and the pod template that podTemplate has the last word on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pagefleet_protocol.inference_profile import Toleration
from pagefleet_protocol.inference_service import EnvVar, InferenceService
from pagefleet_protocol.inference_status import PairRole, Role
from pagefleet_protocol.kube_names import (
    KV_CONTROL_PORT,
    KV_EVENTS_PORT,
    LABEL_REVISION,
    LABEL_SERVICE,
    PORT_NAME,
    RANKS_PORT,
    SERVING_PORT,
)
from pagefleet_protocol.kv_offload import KvOffloadDisk
from pagefleet_protocol.quantities import quantity

from pagefleet_operator.plan.command_lines import DIRECTORY_FLAG, STATE_FLAG, memory_request, node_args
from pagefleet_operator.plan.engine_sets import GROUP_LABEL, LEADER_ADDRESS, NODE_RANK, SET_LABEL
from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.roles import PAIR_ROLES, role_spec
from pagefleet_operator.plan.workloads import Workload, engine_workload
from pagefleet_operator.render.fleet_key import fleet_key
from pagefleet_operator.render.labels import Object, child_object, labels, selector
from pagefleet_operator.render.model_files import cache_args, keeps_one_node, model_files, model_location, same_node
from pagefleet_operator.render.pod import (
    TMP_PATH,
    Gear,
    PodParts,
    Probe,
    container,
    deployment_spec,
    env,
    grace_s,
    patched,
    pod_template,
    rolling_update,
    serving,
    spread,
    tmp_volume,
    with_annotations,
)
from pagefleet_operator.render.ports import container_ports, control_ports, kv_ports, serving_ports, state_port
from pagefleet_operator.render.settings import ClusterSettings

CONTAINER = "engine"
_TMP_SIZE = "8Gi"
"""Compiled code goes there, unless the model's volume keeps it."""
_REVISION_VARIABLE = "PAGEFLEET_ENGINE_DEPLOYMENT_REVISION"
_LOOK_S = 2
_DEAD_AFTER = 6
"""Failures of /livez in a row: a minute, as an engine itself waits for a step. A busy node must not end it sooner."""
_START_S = 3600
"""What an engine gets to load its model, and more where rollout.progressSeconds is more."""


def engine_deployment(
    service: InferenceService, resolved: Resolved, settings: ClusterSettings, replicas: int | None
) -> Object:
    """Return the Deployment.

    Args:
        replicas: engines; None: another manager scales it, it then has no `replicas`, and so no wish of ours.
    """
    rollout: Object = {
        "strategy": rolling_update(resolved.max_surge, resolved.max_unavailable),
        "progressDeadlineSeconds": service.spec.rollout.progress_seconds,
    }
    if replicas is not None:
        rollout["replicas"] = replicas
    template = engine_template(service, resolved, settings)
    spec = deployment_spec(template, selector(service.name, "engine"), rollout)
    return child_object("apps/v1 Deployment", service, names_of(service).engine, "engine", spec=spec)


def engine_template(
    service: InferenceService,
    resolved: Resolved,
    settings: ClusterSettings,
    role: PairRole | None = None,
    *,
    follows: bool = False,
    sources: int = 1,
) -> Object:
    """Return the pod template without its revision, podTemplate merged into it, and then that of the role.

    Args:
        follows: of the pods of an engine on several nodes that serve nobody.
        sources: data ranks of each prefill engine, for a decode engine.
    """
    made = _plain_template(service, resolved, settings, role, follows, sources)
    template = patched(made, service.spec.pod_template)
    if role:
        template = patched(template, role_spec(service, role).pod_template)
    if follows:
        # podTemplate may say what leaders are, and they alone are engines.
        own = template["metadata"]["labels"] | selector(service.name, "follower")
        template = {**template, "metadata": {**template["metadata"], "labels": own}}
    return template


def _plain_template(
    service: InferenceService,
    resolved: Resolved,
    settings: ClusterSettings,
    role: PairRole | None,
    follows: bool,
    sources: int,
) -> Object:
    workload = engine_workload(service, resolved, model_location(resolved), role)
    if follows:  # what all nodes' ranks offload is kept by the leader
        resolved = replace(resolved, kv_offload=None)
    own = labels(service.name, "follower" if follows else "engine", role)
    gear = (
        _shared_memory(resolved),
        fleet_key(service) if workload.keyed else Gear(),
        model_files(service, resolved, settings),
        _kv_disk(resolved, own),
    )
    parts = PodParts(
        labels=own,
        service_account=names_of(service).engine,
        containers=(_container(service, workload, resolved, gear, follows, sources),),
        init_containers=tuple(one for each in gear for one in each.init_containers),
        volumes=(tmp_volume(_TMP_SIZE), *(volume for one in gear for volume in one.volumes)),
        more=_placement(service, resolved, role)
        | {"terminationGracePeriodSeconds": grace_s(round(workload.drain_timeout_s))},
    )
    template = pod_template(parts, settings)
    annotations = resolved.profile.spec.network.annotations if resolved.profile else {}
    return with_annotations(template, annotations) if annotations else template


def tolerations_of(resolved: Resolved) -> list[Object]:
    return [_toleration(one) for one in resolved.profile.spec.tolerations] if resolved.profile else []


def _container(
    service: InferenceService,
    workload: Workload,
    resolved: Resolved,
    gear: tuple[Gear, ...],
    follows: bool,
    sources: int,
) -> Object:
    args = (workload.verb, *_device_args(workload), *cache_args(resolved), *workload.args)
    args += tuple(word for one in gear for word in one.args)
    if workload.nodes > 1:
        args += node_args(NODE_RANK if follows else "0", LEADER_ADDRESS, RANKS_PORT)
    args += () if follows else _fleet_addresses(service, workload, sources)
    args += tuple(word for port in state_port(workload.endpoints).values() for word in (STATE_FLAG, str(port)))
    made = container(CONTAINER, resolved.image, (*args, "--host", "0.0.0.0", "--port", str(SERVING_PORT)))  # noqa: S104
    start_s = max(_START_S, round(workload.progress_s))
    # Of an engine on several nodes, those that follow answer the same probes, and finish when their leader has.
    ranks = workload.endpoints
    asked = next(iter(state_port(ranks)), PORT_NAME)
    probe = Probe(
        startup_period_s=_LOOK_S,
        startup_failures=start_s // _LOOK_S,
        ready_period_s=_LOOK_S,
        port=asked,
        live_failures=_DEAD_AFTER,
    )
    made |= serving(probe)
    made["ports"] = container_ports(serving_ports(ranks) | state_port(ranks))
    made["env"] = _environment(workload, resolved)
    made["volumeMounts"] += [mount for one in gear for mount in one.mounts]
    if workload.role == "prefill" and not follows:
        made["ports"] += container_ports(kv_ports(workload.caches))
    if resources := _resources(resolved):
        made["resources"] = resources
    return made


def _fleet_addresses(service: InferenceService, workload: Workload, sources: int) -> tuple[str, ...]:
    """Return where an engine listens to others of its service."""
    events = ("--kv-events-port", str(KV_EVENTS_PORT)) if workload.kv_events else ()
    return (*_kv_address(service, workload.role, sources), *events)


def _kv_address(service: InferenceService, role: Role, sources: int) -> tuple[str, ...]:
    """Return where an engine listens to others, and whom it may ask: decode asks prefill, and nobody asks decode."""
    if role not in PAIR_ROLES:
        return ()
    port = ("--kv-port", str(KV_CONTROL_PORT))
    if role == "prefill":
        return (*port, "--kv-host", "0.0.0.0")  # noqa: S104 pods are reached from outside themselves
    # Without the cluster's domain: every pod's own search path has it.
    name = f"{names_of(service).part('prefill')}.{service.metadata.namespace}.svc"
    return (*port, "--kv-peers", ",".join(f"dns:{name}:{control}" for control in control_ports(sources)))


def _device_args(workload: Workload) -> tuple[str, ...]:
    """Return flags that the user's own, which come later, may overrule."""
    if workload.gpus:
        # Without a device the engine ends and says so; it does not fall back to a CPU that nobody asked for.
        return ("--device", "cuda")
    threads = math.ceil(quantity(workload.cpu)) if workload.cpu else None
    return ("--num-threads", str(threads)) if threads else ()


def _environment(workload: Workload, resolved: Resolved) -> list[Object]:
    ours = {
        "HOME": TMP_PATH,
        "XDG_CACHE_HOME": f"{TMP_PATH}/cache",
        "TORCHINDUCTOR_CACHE_DIR": f"{TMP_PATH}/inductor",
        # What is served is what was downloaded.
        "HF_HUB_OFFLINE": "1",
    }
    if not workload.gpus:
        # An engine that was promised no GPU must not find one, and its threads share the node with others.
        ours |= {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
    interface = resolved.profile.spec.network.interface if resolved.profile else None
    if workload.nodes > 1 and interface:
        ours |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface.lstrip("=")}
    given = {one.name for one in workload.env}
    # A label's value: a template that held its own hash would be another one.
    told = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{LABEL_REVISION}']"}}
    made = [*env(ours), {"name": _REVISION_VARIABLE, "valueFrom": told}]
    return [one for one in made if one["name"] not in given] + [_variable(one) for one in workload.env]


def _variable(given: EnvVar) -> Object:
    if given.value_from is None:
        return {"name": given.name, "value": given.value or ""}
    reference = given.value_from.secret_key_ref
    return {"name": given.name, "valueFrom": {"secretKeyRef": {"name": reference.name, "key": reference.key}}}


def _resources(resolved: Resolved) -> Object:
    disk = _disk(resolved)
    # Of the disk no limit: /tmp and the logs would count against it, too.
    requests: Object = {"ephemeral-storage": disk.size} if disk and disk.storage_class is None else {}
    limits: Object = {}
    if resolved.cpu:
        # No limit: throttled in the middle of a step, an engine is slower than the share it has.
        requests["cpu"] = resolved.cpu
    if memory := memory_request(resolved):
        requests["memory"] = memory
        if resolved.memory:
            limits["memory"] = memory
    if resolved.gpus:
        limits[resolved.gpu_resource] = str(resolved.gpus)
    profile = resolved.profile.spec if resolved.profile else None
    limits |= {name: str(count) for name, count in profile.network.devices.items()} if profile else {}
    claims = [{"name": one.name} for one in profile.device_claims] if profile else []
    found = (("requests", requests), ("limits", limits), ("claims", claims))
    return {name: values for name, values in found if values}


def _placement(service: InferenceService, resolved: Resolved, role: PairRole | None) -> Object:
    placement: Object = {"topologySpreadConstraints": [_spread(service, resolved, role)]}
    if resolved.profile and resolved.profile.spec.device_claims:
        claims = resolved.profile.spec.device_claims
        placement["resourceClaims"] = [{"name": one.name, "resourceClaimTemplateName": one.template} for one in claims]
    if keeps_one_node(service, resolved):
        del placement["topologySpreadConstraints"]
        placement["affinity"] = same_node(service)
    if resolved.runtime_class:
        placement["runtimeClassName"] = resolved.runtime_class
    if resolved.node_selector:
        placement["nodeSelector"] = dict(resolved.node_selector)
    if tolerations := tolerations_of(resolved):
        placement["tolerations"] = tolerations
    return placement


def _spread(service: InferenceService, resolved: Resolved, role: PairRole | None) -> Object:
    """Return the wish that engines, or the pods of one, are on different nodes."""
    if resolved.nodes == 1:
        return spread(selector(service.name, "engine", role))
    return spread({LABEL_SERVICE: service.name}, (SET_LABEL, GROUP_LABEL))


def _toleration(toleration: Toleration) -> Object:
    given = toleration.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {name: value for name, value in given.items() if value != ""}


DISK_PATH = "/var/cache/pagefleet/kv"
_VOLUME = "kv"


def _kv_disk(resolved: Resolved, labels: Mapping[str, str]) -> Gear:
    """Return the folder that K/V is offloaded to; `labels` are those of a claim that is made for it."""
    disk = _disk(resolved)
    if disk is None:
        return Gear()
    volume: Object = {"emptyDir": {"sizeLimit": disk.size}}
    if disk.storage_class is not None:
        claim = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": disk.storage_class,
            "resources": {"requests": {"storage": disk.size}},
        }
        volume = {"ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": dict(labels)}, "spec": claim}}}
    return Gear(
        args=(DIRECTORY_FLAG, DISK_PATH),
        mounts=({"name": _VOLUME, "mountPath": DISK_PATH},),
        volumes=({"name": _VOLUME, **volume},),
    )


def _shared_memory(resolved: Resolved) -> Gear:
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": resolved.shm}}
    return Gear(mounts=({"name": "shm", "mountPath": "/dev/shm"},), volumes=(volume,))  # noqa: S108


def _disk(resolved: Resolved) -> KvOffloadDisk | None:
    return resolved.kv_offload.disk if resolved.kv_offload else None

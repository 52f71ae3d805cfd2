"""The InferenceProfile, v1alpha1: defaults for one class of GPU, given by the cluster's administrator.

A field of the InferenceService wins over the profile; the profile wins over pagefleet's own defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pagefleet_protocol.inference_service import Engine, Resources
from pagefleet_protocol.parallelism import MAX_RANKS, Parallelism
from pagefleet_protocol.quantities import Quantity
from pagefleet_protocol.resource_base import Labels, Object, ObjectMeta, ObjectName, all_different, matching

_RESOURCE = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"


_TOPOLOGY = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_INTERFACES = r"^=?[A-Za-z0-9][A-Za-z0-9._:,-]{0,127}$"
_CLAIM = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"


class Toleration(Object):
    """Lets engines onto nodes with a taint, as in a pod."""

    key: Annotated[str, Field(max_length=317)] = ""
    """Of the taint; empty with operator Exists: any."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """How key and value are compared."""
    value: Annotated[str, Field(max_length=63)] = ""
    """Of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Of the taint; default: every effect."""


class Network(Object):
    """How ranks on several nodes reach each other."""

    interface: (
        Annotated[str, *matching(_INTERFACES, "must be interfaces as NCCL names them, such as eth1 or =ib0,ib1", 129)]
        | None
    ) = None
    """Interface for the ranks' messages (NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME); default: they choose."""
    annotations: Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=16)] = Field(
        default_factory=dict
    )
    """Of engine pods, by which they get more interfaces, e.g. k8s.v1.cni.cncf.io/networks."""
    devices: Annotated[dict[str, Annotated[int, Field(ge=1, le=64)]], Field(max_length=16)] = Field(
        default_factory=dict
    )
    """Resources of the network that each engine pod asks for, e.g. rdma/hca: 1."""


class DeviceClaim(Object):
    """Devices that the cluster allocates to each engine pod (dynamic resource allocation)."""

    name: Annotated[str, *matching(_CLAIM, "must be at most 63 lower-case letters, digits and '-'", 63)]
    """What the pod calls it."""
    template: ObjectName
    """ResourceClaimTemplate, of the engine's namespace."""


class InferenceProfileSpec(Object):
    """Defaults of engines that use this profile."""

    gpu_type: Annotated[str, Field(max_length=63)] = ""
    """InferenceServices with this spec.resources.gpuType use the profile without naming it."""
    gpu_memory: Quantity | None = None
    """Memory of one GPU, e.g. 80Gi; models that do not fit are refused before they start."""
    gpu_resource: Annotated[str, *matching(_RESOURCE, "must be a resource such as nvidia.com/gpu", 317)] = (
        "nvidia.com/gpu"
    )
    """What pods ask for to get a GPU."""
    gpus_per_node: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None
    """An engine with more ranks is spread over several nodes; default 16."""
    spare_gpus: bool = False
    """True: one engine more than replicas finds a GPU, so rollouts start the new one before they end the old one."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of engine pods."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels of the nodes that engines run on."""
    tolerations: Annotated[
        tuple[Toleration, ...],
        Field(strict=False, max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ] = ()
    """Taints that engines tolerate."""
    engine: Engine = Engine()
    """Settings of engines; args of the profile come before those of the InferenceService."""
    resources: Resources = Resources()
    """What each engine gets."""
    parallelism: Parallelism = Parallelism()
    """Ranks of each engine whose spec says nothing of ranks, GPUs and nodes."""
    network: Network = Network()
    """How ranks on several nodes reach each other."""
    device_claims: Annotated[
        tuple[DeviceClaim, ...],
        Field(
            strict=False,
            max_length=8,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
        all_different("name"),
    ] = ()
    """Devices that the cluster allocates to each engine pod, beside gpuResource."""
    exclusive_topology: (
        Annotated[str, *matching(_TOPOLOGY, "must be a node's label such as topology.kubernetes.io/block", 317)] | None
    ) = None
    """Label of nodes: all nodes of an engine have one value of it, and no other engine of several nodes has it."""


class InferenceProfile(Object):
    """Defaults for one class of GPU."""

    api_version: Literal["pagefleet.dev/v1alpha1"]
    """pagefleet.dev/v1alpha1"""
    kind: Literal["InferenceProfile"]
    """InferenceProfile"""
    metadata: ObjectMeta
    """Its name; it belongs to no namespace."""
    spec: InferenceProfileSpec = InferenceProfileSpec()
    """Defaults of engines that use this profile."""

    @property
    def name(self) -> str:
        return self.metadata.name

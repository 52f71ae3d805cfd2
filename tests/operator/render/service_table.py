"""InferenceServices of every kind that children are rendered for, by the names of their golden files. No test here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pagefleet_operator.plan.observed import Child, ChildKey
from pagefleet_operator.plan.resolve import Resolved, resolve
from pagefleet_operator.plan.roles import PAIR_ROLES, role_view
from pagefleet_operator.plan.verdict import Refusal
from pagefleet_operator.render.children import ChildContext, wanted_children
from pagefleet_operator.render.engine_pairs import Part
from pagefleet_operator.render.leader_worker_set import engine_templates
from pagefleet_operator.render.settings import ClusterSettings
from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.model_facts import ModelFacts
from pagefleet_protocol.resource_documents import parse_inference_profile, parse_inference_service

from tests.fakes import plan_inputs

GOLDEN = Path(__file__).parent / "golden"
UID, FACTS, SETTINGS = plan_inputs.UID, plan_inputs.FACTS, plan_inputs.SETTINGS
H100: Mapping[str, Any] = {
    "gpuType": "h100",
    "gpuMemory": "80Gi",
    "runtimeClassName": "nvidia",
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "engine": {"args": ["--max-num-seqs", "64"], "env": [{"name": "NCCL_DEBUG", "value": "WARN"}]},
    "resources": {"gpus": 1, "cpu": "8", "memory": "64Gi"},
}


@dataclass(frozen=True)
class Case:
    """One InferenceService, called qwen, and the cluster that it is for."""

    spec: Mapping[str, Any]
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: ClusterSettings = SETTINGS
    facts: ModelFacts | None = FACTS
    kinds: frozenset[str] = frozenset({"Ingress"})
    children: Mapping[ChildKey, Child] = field(default_factory=dict)
    model_ready: bool = True
    engine_allowed: bool = True
    namespace: str = "apps"
    uid: str = UID

    @property
    def service(self) -> InferenceService:
        metadata = {"name": "qwen", "namespace": self.namespace, "uid": self.uid}
        document = {"apiVersion": "pagefleet.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata}
        return parse_inference_service(document | {"spec": copy.deepcopy(dict(self.spec))})

    @property
    def resolved(self) -> Resolved:
        profiles = {name: profile(name, spec) for name, spec in self.profiles.items()}
        found = resolve(self.service, profiles, self.facts, self.settings.engine_image)
        assert not isinstance(found, Refusal), str(found)
        return found

    @property
    def parts(self) -> tuple[Part, ...]:
        """Both parts of a disaggregated service."""
        if self.service.spec.disaggregation is None:
            return ()
        profiles = {name: profile(name, spec) for name, spec in self.profiles.items()}
        found: list[Part] = []
        for role in PAIR_ROLES:
            view = role_view(self.service, role)
            resolved = resolve(view, profiles, self.facts, self.settings.engine_image)
            assert not isinstance(resolved, Refusal), str(resolved)
            sources = (found[0].resolved if found else resolved).ranks.data
            templates = engine_templates(view, resolved, self.settings, role, sources)
            found.append(Part(role=role, view=view, resolved=resolved, templates=templates, engines=view.spec.replicas))
        return tuple(found)

    @property
    def context(self) -> ChildContext:
        return ChildContext(
            children=self.children,
            optional_kinds=self.kinds,
            model_ready=self.model_ready,
            engines=self.service.spec.replicas,
            parts=self.parts,
            engine_allowed=self.engine_allowed,
        )

    def wanted(self) -> tuple[dict[str, Any], ...]:
        return wanted_children(self.service, self.resolved, self.settings, self.context)

    def changed(self, **spec: Any) -> Case:
        """The same with other fields of the spec; None takes one away."""
        fields = {**self.spec, **spec}
        return replace(self, spec={name: value for name, value in fields.items() if value is not None})


def profile(name: str, spec: Mapping[str, Any]) -> InferenceProfile:
    document = {"apiVersion": "pagefleet.dev/v1alpha1", "kind": "InferenceProfile", "metadata": {"name": name}}
    return parse_inference_profile(document | {"spec": dict(spec)})


def by_key(children: tuple[dict[str, Any], ...]) -> dict[ChildKey, dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in children}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def golden(name: str) -> str:
    """What the golden file of a case holds: the names of all its children, and those that are not as in five-lines."""
    children = TABLE[name].wanted()
    plain = () if name == PLAIN else TABLE[PLAIN].wanted()
    title = "" if name == PLAIN else f"# What is not as in {PLAIN}.yaml. All there is:\n"
    names = "".join(f"# - {one['kind']} {one['metadata']['name']}\n" for one in children)
    return (
        title
        + names
        + yaml.dump_all([one for one in children if one not in plain], Dumper=_Dumper, sort_keys=False, width=120)
    )


PLAIN = "five-lines"
TINY = Case({"model": {"uri": "builtin://tiny"}}, facts=None)
HF = Case({"model": {"uri": "hf://Qwen/Qwen3-8B"}})
TABLE: Mapping[str, Case] = {
    PLAIN: TINY,
    "tiny-cpu": TINY.changed(resources={"cpu": "1500m", "memory": "2Gi"}, replicas=2),
    "gpu-hf-pvc": Case(
        {
            "model": {"uri": "hf://Qwen/Qwen3-8B", "revision": "main", "secretRef": {"name": "hub"}},
            "cache": {"type": "pvc", "size": "40Gi", "storageClass": "fast", "accessMode": "ReadWriteOnce"},
            "resources": {"gpuType": "h100", "shm": "8Gi"},
            "engine": {"maxModelLen": 16384, "quantization": "fp8"},
            "replicas": 3,
        },
        profiles={"h100": H100},
        settings=replace(SETTINGS, image_pull_secret=("registry",)),
    ),
    "hf-in-every-pod": HF.changed(
        model={"uri": "hf://Qwen/Qwen3-8B", "endpoint": "https://mirror.example.org", "secretRef": {"name": "hub"}}
    ),
    "s3-into-a-given-claim": Case(
        {
            "model": {"uri": "s3://models/qwen", "secretRef": {"name": "store"}},
            "cache": {"type": "pvc", "claim": "models"},
        }
    ),
    "gs-hostpath": Case(
        {
            "model": {"uri": "gs://models/qwen", "secretRef": {"name": "store"}},
            "cache": {"type": "hostPath", "path": "/var/lib/models"},
        },
        settings=replace(SETTINGS, allowed_host_path=("/var/lib/models",)),
    ),
    "pvc": Case({"model": {"uri": "pvc://models/team/qwen"}}),
    "oci": Case({"model": {"uri": "oci://registry.example.org/models/qwen:8b"}}),
    "file-own-image": Case(
        {"model": {"uri": "file:///opt/model"}, "engine": {"image": "registry.example.org/team/engine:2"}}, facts=None
    ),
    "ingress": TINY.changed(
        expose={"type": "Ingress", "host": "llm.example.org", "className": "nginx", "tls": {"secretName": "llm-tls"}}
    ),
    "gateway": replace(
        TINY.changed(
            expose={
                "type": "Gateway",
                "host": "llm.example.org",
                "gatewayRef": {"name": "public", "namespace": "gateways", "sectionName": "https"},
            },
            monitoring={"serviceMonitor": True, "labels": {"release": "prometheus"}},
        ),
        kinds=frozenset({"HTTPRoute", "ServiceMonitor"}),
    ),
    "inference-pool": replace(
        TINY.changed(
            router={"replicas": 2, "inferencePool": {"failureMode": "FailOpen", "gatewayCidrs": ["10.1.0.0/16"]}},
            expose={"type": "Gateway", "host": "llm.example.org", "gatewayRef": {"name": "public"}},
        ),
        kinds=frozenset({"HTTPRoute", "InferencePool"}),
    ),
    "aliases": TINY.changed(model={"uri": "builtin://tiny", "name": "org/tiny", "aliases": ["small", "default"]}),
    "auth": TINY.changed(
        router={
            "replicas": 2,
            "policy": "least-load",
            "auth": {"secretRef": {"name": "clients", "key": "keys.txt"}},
            "resources": {"cpu": "2", "memory": "1Gi"},
        },
        rollout={"drainSeconds": 120, "maxSurge": 2, "maxUnavailable": 1},
    ),
    "pod-template": TINY.changed(
        engine={
            "env": [
                {"name": "HOME", "value": "/tmp/home"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "app", "key": "token"}}},
            ]
        },
        podTemplate={
            "metadata": {"labels": {"team": "search"}, "annotations": {"example.org/owner": "search"}},
            "spec": {
                "priorityClassName": "high",
                "terminationGracePeriodSeconds": 600,
                "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
                "containers": [
                    {"name": "engine", "startupProbe": {"periodSeconds": 1}, "livenessProbe": None},
                    {"name": "logs", "image": "logs:1", "securityContext": {"readOnlyRootFilesystem": False}},
                ],
            },
        },
    ),
    "kv-offload": TINY.changed(
        resources={"memory": "16Gi"}, engine={"kvOffload": {"memory": "32Gi", "disk": {"size": "200Gi"}}}
    ),
    "kv-offload-prefill": TINY.changed(
        disaggregation={
            "prefill": {"kvOffload": {"memory": "32Gi", "disk": {"size": "200Gi", "storageClass": "nvme"}}},
        }
    ),
    "disaggregated": TINY.changed(disaggregation={}),
    "disaggregated-gpus": Case(
        {
            "model": {"uri": "hf://Qwen/Qwen3-8B"},
            "resources": {"gpuType": "h100"},
            "disaggregation": {
                "prefill": {
                    "replicas": 2,
                    "args": ["--max-num-batched-tokens", "16384"],
                    "podTemplate": {"spec": {"priorityClassName": "prompts"}},
                },
                "decode": {"resources": {"memory": "128Gi"}},
                "sendType": "Get",
                "threshold": 512,
                "fallback": "Fail",
            },
            "podTemplate": {"metadata": {"labels": {"team": "search"}}},
            "fleetKey": 3,
        },
        profiles={"h100": H100},
    ),
    "tensor-parallel": Case(
        {"model": {"uri": "hf://meta-llama/Llama-3.3-70B-Instruct"}, "resources": {"gpuType": "h100", "gpus": 4}},
        profiles={"h100": H100},
    ),
    "data-ranks": replace(
        TINY.changed(
            resources={"cpu": "4"},
            parallelism={"data": 2},
            monitoring={"serviceMonitor": True},
            router={"inferencePool": {}},
        ),
        kinds=frozenset({"InferencePool", "ServiceMonitor"}),
    ),
    "data-ranks-disaggregated": TINY.changed(
        disaggregation={"prefill": {"parallelism": {"data": 2}}, "decode": {"parallelism": {"data": 3}}}
    ),
    "expert-ranks": HF.changed(parallelism={"data": 2, "expert": True}, resources={"cpu": "4"}),
    "tensor-parallel-cpu": TINY.changed(resources={"cpu": "4"}, parallelism={"tensor": 2}),
    "several-nodes": Case(
        {
            "model": {"uri": "hf://meta-llama/Llama-3.1-405B-Instruct"},
            "resources": {"gpuType": "h100"},
            "parallelism": {"tensor": 8, "pipeline": 2},
            "replicas": 2,
            "podTemplate": {"spec": {"priorityClassName": "large"}},
        },
        profiles={
            "h100": {
                **H100,
                "gpusPerNode": 8,
                "spareGpus": True,
                "exclusiveTopology": "topology.kubernetes.io/block",
                "network": {
                    "interface": "eth1",
                    "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
                    "devices": {"rdma/hca": 8},
                },
                "deviceClaims": [{"name": "fabric", "template": "nvlink-domain"}],
            }
        },
        kinds=frozenset({"Ingress", "LeaderWorkerSet"}),
    ),
    "several-nodes-cpu": TINY.changed(nodes=2, replicas=1),
    "several-nodes-disaggregated": replace(
        TINY.changed(disaggregation={"prefill": {"nodes": 2, "parallelism": {"tensor": 2}}}),
        kinds=frozenset({"Ingress", "LeaderWorkerSet"}),
    ),
    "expert-ranks-disaggregated": TINY.changed(disaggregation={}, parallelism={"data": 2, "expert": True}),
    "scaled-to-zero": replace(
        TINY.changed(replicas=0), settings=replace(SETTINGS, network_policies=False), kinds=frozenset()
    ),
}

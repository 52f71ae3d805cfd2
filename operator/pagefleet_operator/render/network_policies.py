"""Who may talk to whom. Everything that is not said here is denied, both ways, for the pods of an InferenceService."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from urllib.parse import urlsplit

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import PairRole
from pagefleet_protocol.kube_names import LABEL_COMPONENT, PICKER_PORT, SERVING_PORT

from pagefleet_operator.plan.command_lines import shares_kv_events
from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.observed import Component
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.roles import PAIR_ROLES, is_disaggregated
from pagefleet_operator.render.engine_pairs import Part
from pagefleet_operator.render.labels import Object, child_object, selector
from pagefleet_operator.render.leader_worker_set import group_selector
from pagefleet_operator.render.model_job import needs_job
from pagefleet_operator.render.ports import ONE_RANK, DataRanks, event_ports, kv_ports, serving_ports
from pagefleet_operator.render.settings import ClusterSettings

METADATA_ADDRESSES = ("169.254.169.254/32", "fd00:ec2::254/128")
"""Where clouds hand out the node's own credentials."""
_NAMESPACE_NAME = "kubernetes.io/metadata.name"
_PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
"""On the pods that the Prometheus operator makes."""
_GATEWAY_LABELS = ("gateway.networking.k8s.io/gateway-name", "gateway.envoyproxy.io/owning-gateway-name")
"""On the pods of gateways: the Gateway API's (GEP-1762), and Envoy Gateway's."""


def network_policies(
    service: InferenceService,
    resolved: Resolved,
    settings: ClusterSettings,
    *,
    ranks: DataRanks = ONE_RANK,
    parts: Sequence[Part] = (),
    groups: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Object, ...]:
    """Return the policies of engines, routers and, where there are any, of the model job and the engines' parts.

    Args:
        ranks: that any of the pods has.
        groups: of pods that are one engine each, how many there may be: by the LeaderWorkerSet.
    """
    if not settings.network_policies:
        return ()
    engines = _policy(service, "engine", _engine_rules(service, resolved, settings, ranks))
    routers = _policy(service, "router", _router_rules(service, resolved, settings, ranks))
    job = _policy(service, "model", _job_rules(resolved, settings))
    own = [_group_policy(service, name, group) for name, count in groups.items() for group in range(count)]
    followers = [_policy(service, "follower", _follower_rules(resolved))] if own else []
    return (
        *(engines, routers, *([job] if needs_job(resolved) else []), *followers, *own),
        *(_part_policies(service, parts, ranks) if parts else ()),
    )


def _group_policy(service: InferenceService, set_name: str, group: int) -> Object:
    """Return what the pods of one engine may do beside: reach each other, at any port, as NCCL chooses its own."""
    match = {"matchLabels": group_selector(set_name, group)}
    each: list[Object] = [{"podSelector": match}]
    spec = {
        "podSelector": match,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": each}],
        "egress": [{"to": each}],
    }
    return child_object("networking.k8s.io/v1 NetworkPolicy", service, f"{set_name}-{group}", "engine", spec=spec)


def _part_policies(service: InferenceService, parts: Sequence[Part], ranks: DataRanks) -> tuple[Object, Object]:
    """Return what parts may do beside what all engines may: decode engines dial prefill engines, and nobody else does.

    NCCL dials from either side, to ports of its own choice, also between pods that follow.
    """
    both = service.spec.disaggregation
    plane = both.data_plane if both else "tcp"
    by_nccl = plane == "nccl" or (plane == "auto" and any(one.resolved.gpus for one in parts))
    follow = plane == "nccl" and any(one.resolved.nodes > 1 for one in parts)
    prefill, decode = ({"podSelector": {"matchLabels": _part(service, role, follow)}} for role in PAIR_ROLES)
    asked: Object = {} if by_nccl else {"ports": _tcp(*kv_ports(ranks.all).values())}
    answers = {"egress": [{"to": [decode]}]} if by_nccl else {}
    asks = {"ingress": [{"from": [prefill]}]} if by_nccl else {}
    return (
        _policy(service, "engine", {"ingress": [{"from": [decode], **asked}], **answers}, "prefill", prefill),
        _policy(service, "engine", {**asks, "egress": [{"to": [prefill], **asked}]}, "decode", decode),
    )


def _part(service: InferenceService, role: PairRole, follow: bool) -> dict[str, str]:
    """Return what selects a part's engines, and if they are to, the pods that follow them."""
    chosen = selector(service.name, "engine", role)
    return {name: value for name, value in chosen.items() if name != LABEL_COMPONENT or not follow}


def _engine_rules(service: InferenceService, resolved: Resolved, settings: ClusterSettings, ranks: DataRanks) -> Object:
    router: Object = {"podSelector": {"matchLabels": selector(service.name, "router")}}
    sources: list[Object] = [router]
    if service.spec.monitoring.service_monitor:
        sources.append({"namespaceSelector": {}, "podSelector": {"matchLabels": _PROMETHEUS}})
    sources += _gateways(service)
    if is_disaggregated(service):
        sources.append(_operator(settings))  # it asks engines whether they reach each other
    ingress: list[Object] = [{"from": sources, "ports": _tcp(*serving_ports(ranks.apart).values())}]
    if shares_kv_events(service, resolved):
        ingress.append({"from": [router], "ports": _tcp(*event_ports(ranks.all))})
    return {
        "ingress": ingress,
        "egress": [_names(), *([_everywhere()] if _downloads(resolved) else _collector(service))],
    }


def _follower_rules(resolved: Resolved) -> Object:
    """Return what a pod may that serves nobody, beside talking to those of its group."""
    return {"ingress": [], "egress": [_names(), *([_everywhere()] if _downloads(resolved) else [])]}


def _downloads(resolved: Resolved) -> bool:
    return resolved.uri.remote and resolved.cache in ("none", "hostPath")


def _router_rules(service: InferenceService, resolved: Resolved, settings: ClusterSettings, ranks: DataRanks) -> Object:
    events = event_ports(ranks.all) if shares_kv_events(service, resolved) else ()
    ports = _tcp(*serving_ports(ranks.apart).values(), *events)
    engines = {"to": [{"podSelector": {"matchLabels": selector(service.name, "engine")}}], "ports": ports}
    # The API server is at an address that no selector matches and nobody here knows.
    api_server = {"ports": _tcp(*settings.api_server_port)}
    # Clients are pods of any namespace, and proxies outside of all of them: keys are for telling them apart.
    egress = [_names(), engines, api_server, *_collector(service)]
    gateways = _gateways(service)
    asked: list[Object] = [{"from": gateways, "ports": _tcp(PICKER_PORT)}] if gateways else []
    return {"ingress": [{"ports": _tcp(SERVING_PORT)}, *asked], "egress": egress}


def _gateways(service: InferenceService) -> list[Object]:
    """Return who asks routers where requests go, and carries them to engines: pods by labels, others by addresses."""
    pool = service.spec.router.inference_pool
    if pool is None:
        return []
    labelled = [{"matchExpressions": [{"key": key, "operator": "Exists"}]} for key in _GATEWAY_LABELS]
    pods = [{"namespaceSelector": {}, "podSelector": one} for one in labelled]
    return [*pods, *({"ipBlock": {"cidr": cidr}} for cidr in pool.gateway_cidrs)]


def _job_rules(resolved: Resolved, settings: ClusterSettings) -> Object:
    egress = [_names(), *([_everywhere()] if resolved.uri.remote else [])]
    # The operator asks how far it is.
    return {"ingress": [{"from": [_operator(settings)], "ports": _tcp(SERVING_PORT)}], "egress": egress}


def _policy(
    service: InferenceService,
    component: Component,
    rules: Object,
    role: PairRole | None = None,
    chosen: Object | None = None,
) -> Object:
    names = names_of(service)
    whole = {"engine": names.engine, "follower": names.follower, "router": names.router, "model": names.model}
    name = names.part(role) if role else whole[component]
    spec = {
        **(chosen or {"podSelector": {"matchLabels": selector(service.name, component, role)}}),
        "policyTypes": [name.title() for name in rules],
        # The API server drops an empty list, and would take it for a change each time.
        **{name: rule for name, rule in rules.items() if rule},
    }
    return child_object("networking.k8s.io/v1 NetworkPolicy", service, name, component, spec=spec)


def _operator(settings: ClusterSettings) -> Object:
    return {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: settings.operator_namespace}}}


def _names() -> Object:
    """Return the rule for DNS, to anywhere: a node's own cache of it is no pod."""
    return {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


def _everywhere() -> Object:
    """Return the rule for what may be in the cluster or anywhere in the world, but for no cloud's metadata."""
    ipv4, ipv6 = METADATA_ADDRESSES
    return {
        "to": [
            {"ipBlock": {"cidr": "0.0.0.0/0", "except": [ipv4]}},
            {"ipBlock": {"cidr": "::/0", "except": [ipv6]}},
            # Some network plugins do not count pods among addresses.
            {"namespaceSelector": {}},
        ]
    }


def _collector(service: InferenceService) -> list[Object]:
    """Return the rule for the collector of traces, if there is one: it may be anywhere, at its port."""
    endpoint = service.spec.monitoring.traces_endpoint
    if endpoint is None:
        return []
    url = urlsplit(endpoint)
    return [{**_everywhere(), "ports": _tcp(url.port or (443 if url.scheme == "https" else 80))}]


def _tcp(*ports: int) -> list[Object]:
    return [{"port": port, "protocol": "TCP"} for port in ports]

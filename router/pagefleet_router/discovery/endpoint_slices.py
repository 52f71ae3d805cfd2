"""From the EndpointSlices of one Service to a list of engines. Pure: no clock, no network.

Source: Kubernetes API, discovery.k8s.io/v1. Where it is missing, `ready` and `serving` count as true, `terminating` as
false.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from itertools import product

import msgspec
from pagefleet_protocol.endpoints import Endpoint, OnTrial
from pagefleet_protocol.kube_names import LABEL_CANARY, PORT_NAME, rank_id, rank_port_name
from pagefleet_protocol.parallelism import MAX_RANKS

_RANKS = {rank_port_name(rank): rank for rank in range(MAX_RANKS)}
"""Data ranks by the names of their ports: each is an engine."""
_ID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9.]{0,252}")
_OF_SERVICE = "kubernetes.io/service-name"
_TRIAL = re.compile(r"([0-9a-z]{1,40})\.([0-9]{1,2})")
_LONGEST = 58
"""Characters that Kubernetes leaves of what a pod's name is to begin with, before it adds five of its own."""
_FAMILIES = ("IPv4", "IPv6")
"""Of a pod that has an address of both the first is used."""


class Conditions(msgspec.Struct, frozen=True):
    """What the node says of a pod."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class ObjectReference(msgspec.Struct, frozen=True):
    """What an address belongs to."""

    kind: str = ""
    name: str = ""


class SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    """One pod behind the Service."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions = Conditions()
    target_ref: ObjectReference | None = None


class SlicePort(msgspec.Struct, frozen=True):
    """One port of the Service."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class SliceMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """A slice's name and version."""

    name: str
    resource_version: str = ""
    labels: dict[str, str] | None = None
    """Those of the Service as well."""


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """The fields that are read of a slice."""

    metadata: SliceMetadata
    address_type: str
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None


def engines_of(slices: Iterable[EndpointSlice], model: str) -> tuple[Endpoint, ...]:
    """Return the engines that the slices of one Service name together, ordered by id.

    A pod is an engine, or one on each of several ports: its data ranks, the first of which goes by the pod's name.
    A pod that is ready gets requests; one that terminates and still serves finishes what it has; one that is not ready
    is yet to come. While a pod moves from slice to slice it may be in two: the better news counts.

    Args:
        slices: all of the Service.
        model: what they serve.
    """
    found: dict[str, tuple[tuple[bool, bool, int], Endpoint]] = {}
    for one in slices:
        ports = ports_of_ranks(one.ports or ())
        if one.address_type not in _FAMILIES:
            continue
        trial = _trial(one.metadata.labels or {})
        for entry, (rank_of_pod, port) in product(one.endpoints or (), ports.items()):
            endpoint = _engine(entry, rank_of_pod, port, model)
            if endpoint is None:
                continue
            if trial is not None and endpoint.id.startswith(trial[0]):
                endpoint = msgspec.structs.replace(endpoint, on_trial=trial[1])
            rank = (endpoint.coming, endpoint.draining, _FAMILIES.index(one.address_type))
            if endpoint.id not in found or rank < found[endpoint.id][0]:
                found[endpoint.id] = rank, endpoint
    return tuple(endpoint for _, (_, endpoint) in sorted(found.items()))


def faults_of(slices: Mapping[str, EndpointSlice]) -> tuple[str, ...]:
    """Return what of the slices cannot be used, and why, for the log."""
    faults = []
    for name, one in slices.items():
        if one.address_type not in _FAMILIES:
            faults.append(f"{name}: addresses of type {one.address_type[:20]!r} are not followed")
        elif one.endpoints and not ports_of_ranks(one.ports or ()):
            faults.append(f"{name}: it has no TCP port named {PORT_NAME!r}")
        elif any(_base_url(entry, 1) is None or not _has_id(entry) for entry in one.endpoints or ()):
            faults.append(f"{name}: an endpoint has no usable address or name")
    return tuple(faults)


def _engine(entry: SliceEndpoint, rank: int, port: int, model: str) -> Endpoint | None:
    terminating = entry.conditions.terminating is True
    coming = not terminating and entry.conditions.ready is False
    url = _base_url(entry, port)
    if (terminating and entry.conditions.serving is False) or url is None or not _has_id(entry):
        return None
    # An address that belongs to no pod is its own name.
    pod = None if entry.target_ref is None else entry.target_ref.name
    engine_id = url.removeprefix("http://") if pod is None else rank_id(pod, rank)
    return Endpoint(engine_id, url, model, draining=terminating, coming=coming)


def _trial(labels: Mapping[str, str]) -> tuple[tuple[str, ...], OnTrial] | None:
    """Return how names of pods begin whose revision is tried out, and its share; None: none is."""
    found = _TRIAL.fullmatch(labels.get(LABEL_CANARY, ""))
    service = labels.get(_OF_SERVICE)
    if found is None or not service:
        return None
    stem = service.removesuffix("-engine")
    names = (service, f"{stem}-prefill", f"{stem}-decode")
    return tuple(f"{name}-{found[1]}"[:_LONGEST] for name in names), OnTrial(found[1], int(found[2]))


def _has_id(entry: SliceEndpoint) -> bool:
    """Whether the pod's name, if there is a pod, can go into a header."""
    return entry.target_ref is None or _ID.fullmatch(entry.target_ref.name) is not None


def _base_url(entry: SliceEndpoint, port: int) -> str | None:
    # The addresses of one entry are interchangeable, and there is one since Kubernetes 1.32.
    try:
        address = ipaddress.ip_address(entry.addresses[0])
    except (IndexError, ValueError):
        return None
    if address.version == 6 and address.scope_id:
        return None
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


def ports_of_ranks(ports: Iterable[SlicePort]) -> Mapping[int, int]:
    """Return the port of each data rank: they are named `http`, `http-1` and so on; else the only one, as rank 0's."""
    usable = [one for one in ports if one.protocol in (None, "TCP") and one.port is not None and 0 < one.port < 65536]
    named = {rank: one.port for one in usable if one.port and (rank := _RANKS.get(one.name or "")) is not None}
    return named or ({0: usable[0].port} if len(usable) == 1 and usable[0].port else {})

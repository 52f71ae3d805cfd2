"""The ports of engines' pods. Each data rank serves, and passes K/V on, at ports of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pagefleet_protocol.kube_names import (
    KV_CONTROL_PORT,
    KV_EVENTS_PORT,
    RANK_PORTS_APART,
    SERVING_PORT,
    rank_port_name,
)
from pagefleet_protocol.parallelism import MAX_RANKS

from pagefleet_operator.render.labels import Object

STATE_NAME = "state"


def serving_ports(ranks: int) -> dict[str, int]:
    """Return the ports for requests by their names, by which routers know them."""
    return {rank_port_name(rank): SERVING_PORT + rank for rank in range(ranks)}


def state_port(ranks: int) -> dict[str, int]:
    """Return the port that tells the state of all ranks together; none where one tells it itself."""
    return {STATE_NAME: SERVING_PORT + ranks} if ranks > 1 else {}


def kv_ports(ranks: int) -> dict[str, int]:
    """Return the ports where prefill engines listen to decode engines."""
    found: dict[str, int] = {}
    for rank, control in enumerate(control_ports(ranks)):
        own = "" if rank == 0 else f"-{rank}"
        found |= {f"kv{own}": control, f"kv-data{own}": control + 1}
    return found


def control_ports(ranks: int) -> Iterable[int]:
    """Return the ports of those at which a transfer of K/V begins."""
    return range(KV_CONTROL_PORT, KV_CONTROL_PORT + ranks * RANK_PORTS_APART, RANK_PORTS_APART)


def event_ports(ranks: int) -> Iterable[int]:
    """Return the ports where ranks publish KV events and answer for what was missed."""
    firsts = range(KV_EVENTS_PORT, KV_EVENTS_PORT + ranks * RANK_PORTS_APART, RANK_PORTS_APART)
    return [port for first in firsts for port in (first, first + 1)]


def endpoints_of(engines: Mapping[str, Any]) -> int:
    """Return how many ports for requests each pod of a Deployment or LeaderWorkerSet has, at least 1."""
    spec: Mapping[str, Any] = engines.get("spec") or {}
    group = spec.get("leaderWorkerTemplate") or {}
    template = group.get("leaderTemplate") or spec.get("template") or {}
    containers = (template.get("spec") or {}).get("containers") or ()
    names = {port.get("name") for one in containers for port in one.get("ports") or ()}
    return max(1, len(names & serving_ports(MAX_RANKS).keys()))


def container_ports(ports: dict[str, int]) -> list[Object]:
    """Return them as a container has them."""
    return [{"name": name, "containerPort": number, "protocol": "TCP"} for name, number in ports.items()]

"""The ports of engines' pods. Each data rank passes K/V on at ports of its own, and mostly serves at one, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pagefleet_protocol.kube_names import (
    KV_CONTROL_PORT,
    KV_EVENTS_PORT,
    RANK_PORTS_APART,
    SERVING_PORT,
    rank_port_name,
)
from pagefleet_protocol.parallelism import MAX_COPIES

from pagefleet_operator.plan.command_lines import DATA_FLAG
from pagefleet_operator.render.labels import Object

STATE_NAME = "state"


@dataclass(frozen=True, slots=True)
class DataRanks:
    """Of a pod."""

    apart: int = 1
    """That serve on ports of their own; 1: all are behind one."""
    all: int = 1


ONE_RANK = DataRanks()


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
    names = {port.get("name") for one in _containers(engines) for port in one.get("ports") or ()}
    return max(1, len(names & serving_ports(MAX_COPIES).keys()))


def caches_of(engines: Mapping[str, Any]) -> int:
    """Return how many caches each pod of a Deployment or LeaderWorkerSet has: one for each data rank."""
    commands = [one.get("args") or () for one in _containers(engines)]
    counts = [count for args in commands for flag, count in pairwise(args) if flag == DATA_FLAG and count.isdecimal()]
    return max([1, *map(int, counts)])


def caches_let_in(policy: Mapping[str, Any]) -> int:
    """Return to how many caches' events a NetworkPolicy of engines lets routers."""
    rules = policy["spec"].get("ingress") or ()
    ports = {port.get("port") for rule in rules for port in rule.get("ports") or ()}
    return len(ports & set(event_ports(MAX_COPIES))) // 2


def _containers(engines: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Of a pod that serves."""
    spec: Mapping[str, Any] = engines.get("spec") or {}
    group = spec.get("leaderWorkerTemplate") or {}
    template = group.get("leaderTemplate") or spec.get("template") or {}
    return (template.get("spec") or {}).get("containers") or ()


def container_ports(ports: dict[str, int]) -> list[Object]:
    """Return them as a container has them."""
    return [{"name": name, "containerPort": number, "protocol": "TCP"} for name, number in ports.items()]

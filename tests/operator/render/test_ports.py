"""Ports of pods with several data ranks: none twice, and as many engines as routers find."""

from __future__ import annotations

import pytest
from pagefleet_engine.cli import read_configuration
from pagefleet_engine.rank_settings import rank_settings, supervisor_port
from pagefleet_operator.render.engine_deployment import engine_deployment
from pagefleet_operator.render.leader_worker_set import engine_set
from pagefleet_operator.render.ports import (
    control_ports,
    endpoints_of,
    event_ports,
    kv_ports,
    serving_ports,
    state_port,
)
from pagefleet_protocol.kube_names import KV_CONTROL_PORT, KV_EVENTS_PORT, SERVING_PORT
from pagefleet_protocol.parallelism import MAX_RANKS
from pagefleet_router.discovery.endpoint_slices import SlicePort, ports_of_ranks

from tests.operator.render.service_table import TABLE

RANKS = [2, 3, MAX_RANKS]


@pytest.mark.parametrize("ranks", RANKS)
def test_they_are_those_that_the_engine_listens_on_and_the_router_finds(ranks: int) -> None:
    flags = ("-dp", str(ranks), "--data-parallel-multi-port-external-lb", "--port", str(SERVING_PORT))
    kv = ("--kv-connector", "p2p", "--kv-port", str(KV_CONTROL_PORT), "--kv-events-port", str(KV_EVENTS_PORT))
    config, server = read_configuration(["/m", *flags, *kv, "--fleet-key-file", "/key"], {})
    found = rank_settings(config, server)
    assert list(serving_ports(ranks).values()) == [own.port for _, own in found]
    assert list(state_port(ranks).values()) == [supervisor_port(config, server)]
    assert list(control_ports(ranks)) == [own.kv_transfer.kv_port for own, _ in found]
    assert list(event_ports(ranks))[::2] == [own.kv_events_port for _, own in found]
    every = [
        *serving_ports(ranks).values(),
        *state_port(ranks).values(),
        *kv_ports(ranks).values(),
        *event_ports(ranks),
    ]
    assert len(set(every)) == len(every)
    named = {**serving_ports(ranks), **state_port(ranks), **kv_ports(ranks)}
    assert all(len(name) <= 15 for name in named), "Kubernetes takes no longer ones"
    listed = [SlicePort(name, number) for name, number in named.items()]
    assert list(ports_of_ranks(listed).values()) == list(serving_ports(ranks).values())


def test_an_engine_s_endpoints_are_counted() -> None:
    for name, expected in (("data-ranks", 2), ("tiny-cpu", 1)):
        case = TABLE[name]
        assert endpoints_of(engine_deployment(case.service, case.resolved, case.settings, 1)) == expected
    case = TABLE["several-nodes"]
    assert endpoints_of(engine_set(case.service, case.resolved, case.settings, 1)) == 1
    assert endpoints_of({}) == 1

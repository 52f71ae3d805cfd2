"""Turns a workload's instance into a command line for this machine: adds addresses, folders, GPU and threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.kube_names import RANK_PORTS_APART

from pagefleet_operator.errors import OperatorError
from pagefleet_operator.local.machine import EnginePorts, Gpus, Ports, thread_flags
from pagefleet_operator.local.process import Launch
from pagefleet_operator.local.settings import LocalSettings
from pagefleet_operator.local.state_dir import StateDir
from pagefleet_operator.plan.command_lines import DIRECTORY_FLAG, STATE_FLAG, node_args
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_operator.plan.workloads import Workload, router_name

_LOOPBACK = "127.0.0.1"
_WAIT_SETTINGS = frozenset({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"})


class Launcher:
    """Shares this machine out to instances."""

    def __init__(self, settings: LocalSettings, state: StateDir, gpus: Gpus, cores: int) -> None:
        self.num_engines = 1
        """Engines wanted on this machine, over all services: the cores are divided among them."""
        self.ports = Ports(settings.host, settings.port)
        self.gpus = gpus
        self._engine_ports = EnginePorts(_LOOPBACK)
        self._settings = settings
        self._state = state
        self._cores = cores

    def launch(self, service: str, workload: Workload, number: int) -> Launch:
        """Return how to start one instance now.

        Raises:
            OperatorError: what it needs is not free at the moment.
        """
        command = self._settings.commands.of(workload.verb)
        if workload.role == "router":
            host, port = self._settings.host, self.ports.claim(f"{workload.name}-{number}")
            file = str(self._state.endpoints_path(service))
            news = str(self._state.service_path(service))
            address = ("--endpoints-file", file, "--inference-service-file", news, "--host", host, "--port", str(port))
            return Launch((*command, *address, *self._key(service, workload), *workload.args), {}, base_url(host, port))
        name = f"{workload.name}-{number}"
        count = workload.gpus * workload.nodes
        devices = self.gpus.claim(name, count)
        if devices is None:
            raise OperatorError(f"waits for {'a free GPU' if count == 1 else f'{count} free GPUs'}")
        # Of several data ranks each has a port, and the next one tells the state of all.
        serving, kv, meeting, other_nodes = self._engine_ports.claim(
            name,
            workload.endpoints + (workload.endpoints > 1),
            workload.caches * RANK_PORTS_APART,
            workload.caches,
            workload.nodes - 1,
        )
        events, transfers = kv[0], kv[2::RANK_PORTS_APART]
        threads = thread_flags(workload.args, workload.cpu, self._cores, self.num_engines * workload.nodes)
        # Those that come from Secrets in a cluster are in our own environment here.
        written = {variable.name: variable.value for variable in workload.env if variable.value is not None}
        environment = {**written, **wait_policy({**os.environ, **written})}
        common = (*command, *workload.args, *threads, *self._key(service, workload))
        nodes = [
            Launch(
                (*common, *_node(workload, node, meeting[0]), "--host", _LOOPBACK, "--port", str(own)),
                # An engine that was promised no GPU must not find one.
                {**environment, "CUDA_VISIBLE_DEVICES": ",".join(_part(devices, node, workload.gpus))},
                base_url(_LOOPBACK, own),
            )
            for node, own in enumerate((serving[0], *other_nodes))
        ]
        addresses = (
            *((STATE_FLAG, str(serving[-1])) if workload.endpoints > 1 else ()),
            *(("--kv-events-port", str(events)) if workload.kv_events else ()),
            *self._kv_address(service, workload, transfers[0]),
            *((DIRECTORY_FLAG, str(self._state.kv_path(name))) if workload.kv_disk else ()),
        )
        return replace(
            nodes[0],
            argv=(*nodes[0].argv, *addresses),
            url=base_url(_LOOPBACK, serving[-1]),
            endpoints=tuple(base_url(_LOOPBACK, port) for port in serving[: workload.endpoints]),
            kv_addresses=tuple(f"{_LOOPBACK}:{port}" for port in transfers) if workload.role == "prefill" else (),
            followers=tuple(nodes[1:]),
        )

    def release(self, instance: str) -> None:
        """Take back what an engine was given."""
        self.gpus.release(instance)
        self._engine_ports.release(instance)

    def _kv_address(self, service: str, workload: Workload, port: int) -> tuple[str, ...]:
        """Return where an engine of a disaggregated service listens to others, and whom it may ask."""
        if workload.role not in PAIR_ROLES:
            return ()
        own = ("--kv-host", _LOOPBACK, "--kv-port", str(port))
        peers = ("--kv-peers", f"file:{self._state.kv_peers_path(service)}")
        return own if workload.role == "prefill" else (*own, *peers)

    def _key(self, service: str, workload: Workload) -> tuple[str, ...]:
        return (
            ("--fleet-key-file", str(self._state.fleet_key_path(service, workload.fleet_key))) if workload.keyed else ()
        )

    def claim_ports(self, service: InferenceService) -> str:
        """Give each router of a service its port, the same one as before. Returns the first router's URL.

        Raises:
            PortError: one of them cannot be had.
        """
        ports = [self.ports.claim(f"{router_name(service)}-{number}") for number in range(service.spec.router.replicas)]
        return base_url(self._settings.host, ports[0])

    def release_ports(self, service: InferenceService) -> None:
        for number in range(service.spec.router.replicas):
            self.ports.release(f"{router_name(service)}-{number}")


def _node(workload: Workload, node: int, port: int) -> tuple[str, ...]:
    """Return which of its engine's nodes a process is, where there are several."""
    return node_args(str(node), _LOOPBACK, port) if workload.nodes > 1 else ()


def _part(devices: tuple[str, ...], node: int, each: int) -> tuple[str, ...]:
    return devices[node * each : (node + 1) * each]


def wait_policy(environment: Mapping[str, str]) -> dict[str, str]:
    """Let an engine's threads sleep, not spin, while they wait for each other, unless the user has said how.

    This machine is shared: with spinning threads one other busy process makes a small model tens of times slower.
    """
    return {} if _WAIT_SETTINGS & environment.keys() else {"OMP_WAIT_POLICY": "PASSIVE"}


def base_url(host: str, port: int) -> str:
    """Return a URL that reaches a server bound to `host` from this machine."""
    host = {"0.0.0.0": _LOOPBACK, "": _LOOPBACK, "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

"""The process behind `pagefleet operate`: settings, signals, logs, exit status."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial

from pagefleet_operator.apply.connection import credentials_of, load_configuration, own_namespace
from pagefleet_operator.apply.kube_cluster import KubeCluster, connect
from pagefleet_operator.apply.token_bucket import TokenBucket
from pagefleet_operator.errors import SettingsError
from pagefleet_operator.handlers.lease import AlwaysLeads, Leadership
from pagefleet_operator.handlers.metrics import OperatorMetrics
from pagefleet_operator.handlers.operator import Operator, Outside
from pagefleet_operator.handlers.pod_http import HttpPods
from pagefleet_operator.handlers.service_planner import ServicePlanner
from pagefleet_operator.handlers.settings import OperateSettings, Timing
from pagefleet_operator.plan.objects.drift import differences
from pagefleet_operator.plan.settings import ClusterSettings

_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


def settings_from(arguments: argparse.Namespace, environment: Mapping[str, str]) -> OperateSettings:
    """Check what was given together.

    Raises:
        SettingsError: something is missing.
    """
    missing = [
        f"--{name.replace('_', '-')}" for name in ("engine_image", "router_image", "operator_image")
        if not getattr(arguments, name)
    ]  # fmt: skip
    if missing:
        raise SettingsError(f"give {', '.join(missing)}: the images that pods are to run")
    namespace = arguments.operator_namespace or own_namespace(environment)
    if not namespace and arguments.namespace:
        namespace = arguments.namespace[0]  # outside a cluster the Lease is where the services are
    if not namespace:
        raise SettingsError("give --operator-namespace: this is no pod, and the Lease has to be somewhere")
    return OperateSettings(
        cluster=ClusterSettings(
            engine_image=arguments.engine_image,
            router_image=arguments.router_image,
            operator_image=arguments.operator_image,
            operator_namespace=namespace,
            image_pull_secrets=tuple(arguments.image_pull_secret or ()),
            cluster_domain=arguments.cluster_domain,
            hf_endpoint=arguments.hf_endpoint,
            allowed_images=tuple(arguments.allowed_image or ()),
            allowed_host_paths=tuple(arguments.allowed_host_path or ()),
            allow_any_pod_template=arguments.allow_any_pod_template,
            network_policies=not arguments.no_network_policies,
            **({"api_server_ports": tuple(arguments.api_server_port)} if arguments.api_server_port else {}),
        ),
        namespaces=tuple(dict.fromkeys(arguments.namespace or ())),
        identity=f"{socket.gethostname()}_{secrets.token_hex(4)}",
        lease_name=arguments.lease_name,
        leader_election=not arguments.no_leader_election,
        host=arguments.host,
        port=arguments.port,
        workers=arguments.workers,
        kubeconfig=arguments.kubeconfig,
        timing=Timing(resync=arguments.resync_seconds),
    )


def operate(settings: OperateSettings) -> int:
    """Run an operator in this process until a signal stops it. Returns the exit status.

    Raises:
        OperatorError: it cannot start.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=_LOG_FORMAT)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    asyncio.run(_run(settings))
    return 0


async def _run(settings: OperateSettings) -> None:
    stopping = asyncio.Event()
    take_signals = partial(_take_signals, asyncio.get_running_loop(), stopping)
    take_signals()
    configuration = await load_configuration(settings.kubeconfig)
    metrics, client, pods = OperatorMetrics(), connect(configuration), HttpPods()
    try:
        # The lease's own requests pass no fence and wait for no token.
        unfenced = KubeCluster(client, AlwaysLeads(), TokenBucket(settings.writes_per_s, settings.write_burst), metrics)
        place = (settings.cluster.operator_namespace, settings.lease_name)
        election = (
            Leadership(unfenced, place, settings.identity, settings.timing.lease)
            if settings.leader_election
            else AlwaysLeads()
        )
        writes = TokenBucket(settings.writes_per_s, settings.write_burst)
        outside = Outside(
            cluster=KubeCluster(client, election, writes, metrics),
            election=election,
            planner=ServicePlanner(settings.cluster),
            differences=differences,
            pods=pods,
            credentials=partial(credentials_of, configuration),
            metrics=metrics,
        )
        await Operator(settings, outside).run(stopping, take_signals)
    finally:
        await pods.close()
        await client.close()


def _take_signals(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
    """Stop on a signal. kopf sets handlers of its own whenever it starts, so these are set after it again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)

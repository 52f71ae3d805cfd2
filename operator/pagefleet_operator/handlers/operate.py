"""The process behind `pagefleet operate`: its parts, signals, log."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial

from pagefleet_protocol.settings.log import set_up_logging

from pagefleet_operator.apply.connection import credentials_of, load_configuration
from pagefleet_operator.apply.kube_cluster import KubeCluster, connect
from pagefleet_operator.apply.token_bucket import TokenBucket
from pagefleet_operator.handlers.lease import AlwaysLeads, Leadership
from pagefleet_operator.handlers.metrics import OperatorMetrics
from pagefleet_operator.handlers.operator import Operator, Outside
from pagefleet_operator.handlers.pod_http import HttpPods
from pagefleet_operator.handlers.settings import OperateSettings


def operate(settings: OperateSettings) -> int:
    """Run an operator in this process until a signal stops it. Returns the exit status.

    Raises:
        OperatorError: it cannot start.
    """
    set_up_logging("operator")
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

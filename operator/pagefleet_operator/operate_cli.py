"""`pagefleet operate`: runs InferenceServices on Kubernetes."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pagefleet_protocol.early_stop import ended_by_sigterm
from pagefleet_protocol.settings.fields import Between, HostName, Port, Seconds, Shown
from pagefleet_protocol.settings.program import Program

from pagefleet_operator.errors import OperatorError, SettingsError
from pagefleet_operator.render.settings import ClusterSettings, Images, Policy

if TYPE_CHECKING:
    from pagefleet_operator.handlers.settings import OperateSettings

_DESCRIPTION = """\
Makes Kubernetes run the InferenceServices of one or more namespaces, or of the whole cluster: engines, routers, model
downloads, and all that they need. Runs in a pod with the rights that the chart gives it, or outside with --kubeconfig.
PAGEFLEET_OPERATOR_ENGINE_IMAGE is --engine-image; lists in variables are separated by commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Whose services."""

    namespace: Annotated[tuple[str, ...], Shown("NS")] = ()
    """Serve this namespace; default: the whole cluster."""
    kubeconfig: Path | None = None
    """How to reach the cluster from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """This process."""

    operator_namespace: str | None = None
    """Where it runs; default: from its pod."""
    lease_name: str = "pagefleet-operator"
    """Of the Lease of the leader."""
    leader_election: bool = True
    """Ask who leads; without it, it is the only one."""
    host: HostName = "0.0.0.0"  # noqa: S104 - probes come from the node
    """Address of probes and metrics."""
    port: Port = 8080
    """Of /livez, /readyz and /metrics; 0 takes any."""
    resync_seconds: Annotated[Seconds, Between(10, 86_400)] = 300.0
    """Longest time without a look."""
    workers: Annotated[int, Between(1, 256)] = 8
    """InferenceServices worked on at a time."""


OPERATE = Program(
    name="pagefleet operate",
    description=_DESCRIPTION,
    groups={
        "where": Where,
        "what pods run": Images,
        "what InferenceServices may ask for": Policy,
        "this process": Process,
    },
    environment="PAGEFLEET_OPERATOR_",
    error=SettingsError,
)


@ended_by_sigterm()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 after a clean stop, 1 after a failure, 2 when the settings cannot work."""
    try:
        given = OPERATE.read(sys.argv[1:] if argv is None else argv, os.environ)
        images = OPERATE.build(Images, given)
        # After parsing: --help is instant, and a mistake on the command line costs nothing.
        from pagefleet_operator.handlers import operator  # noqa: PLC0415

        return operator.operate(settings_from(given, images, os.environ))
    except OperatorError as error:
        status = OPERATE.tell(error)
        return status if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 130  # before there was anything to stop


def settings_from(given: Mapping[str, Any], images: Images, environment: Mapping[str, str]) -> OperateSettings:
    """Make what the operator works with of what was given.

    Raises:
        SettingsError: nobody says where the Lease is to be.
    """
    from pagefleet_operator.apply.connection import own_namespace  # noqa: PLC0415
    from pagefleet_operator.handlers.settings import OperateSettings, Timing  # noqa: PLC0415

    where, policy, process = OPERATE.build(Where, given), OPERATE.build(Policy, given), OPERATE.build(Process, given)
    # Outside a cluster the Lease is where the services are.
    namespace = process.operator_namespace or own_namespace(environment) or next(iter(where.namespace), "")
    if not namespace:
        raise SettingsError("give --operator-namespace: this is no pod, and the Lease has to be somewhere")
    return OperateSettings(
        cluster=ClusterSettings(operator_namespace=namespace, **vars(images), **vars(policy)),
        namespaces=tuple(dict.fromkeys(where.namespace)),
        identity=f"{socket.gethostname()}_{secrets.token_hex(4)}",
        lease_name=process.lease_name,
        leader_election=process.leader_election,
        host=process.host,
        port=process.port,
        workers=process.workers,
        kubeconfig=where.kubeconfig,
        timing=Timing(resync=process.resync_seconds),
    )


if __name__ == "__main__":
    sys.exit(main())

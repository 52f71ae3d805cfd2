"""`pagefleet console [NAME]`: opens the browser console of an InferenceService in a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import webbrowser
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagefleet_protocol.kube_names import SERVING_PORT
from pagefleet_protocol.settings.fields import Port
from pagefleet_protocol.settings.program import Program

from pagefleet_operator.errors import ClusterError, OperatorError, PortError, Refused, SettingsError, Unavailable
from pagefleet_operator.render.labels import selector

if TYPE_CHECKING:
    from pagefleet_operator.apply.port_forward import ForwardApi

_HOST = "127.0.0.1"
_DESCRIPTION = """\
Opens a way from this machine to a router of an InferenceService, as kubectl port-forward does, and the console in a
browser. OpenAI's clients find their API at the same address, below /v1. It needs the right to list pods and to create
pods/portforward in the namespace, and lasts until Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """What `pagefleet console` can be told."""

    name: str | None = None
    """InferenceService; default: the only one of the namespace."""
    namespace: str | None = None
    """Where it is, also -n; default: that of the context."""
    kubeconfig: Path | None = None
    """How to reach the cluster; default: as kubectl does."""
    context: str | None = None
    """Of the kubeconfig; default: its current one."""
    port: Port = 8000
    """Of this machine; 0 takes any."""
    browser: bool = True
    """Open a browser."""


CONSOLE = Program(
    name="pagefleet console",
    description=_DESCRIPTION,
    groups={"console": ConsoleConfig},
    environment="PAGEFLEET_CONSOLE_",
    error=SettingsError,
    positional=("name",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 after Ctrl-C, 1 where the cluster does not help, 2 for a mistake in the settings."""
    arguments = ["--namespace" if word == "-n" else word for word in (sys.argv[1:] if argv is None else argv)]
    try:
        config = CONSOLE.build(ConsoleConfig, CONSOLE.read(arguments, os.environ))
        asyncio.run(_run(config))
    except KeyboardInterrupt:
        return 0
    except OperatorError as error:
        status = CONSOLE.tell(error)
        return status if isinstance(error, SettingsError) else 1
    return 0


async def _run(config: ConsoleConfig) -> None:
    # After parsing: --help is instant, and a mistake on the command line costs nothing.
    from pagefleet_operator.apply.connection import credentials_of, load_own_configuration  # noqa: PLC0415
    from pagefleet_operator.apply.port_forward import forward_api  # noqa: PLC0415

    configuration, namespace = await load_own_configuration(config.kubeconfig, config.context)
    namespace = config.namespace or namespace
    async with forward_api(credentials_of(configuration)) as api:
        name = await chosen_service(api, namespace, config.name)
        async with forwarded(api, namespace, name, config.port) as url:
            print(f"{name}: the console is at {url}/, the API at {url}/v1; Ctrl-C ends it", flush=True)
            if config.browser:
                await asyncio.to_thread(webbrowser.open, f"{url}/")
            await asyncio.Event().wait()


async def chosen_service(api: ForwardApi, namespace: str, name: str | None) -> str:
    """Return the InferenceService that is meant.

    Raises:
        ClusterError: it is not there, or which one is not clear.
    """
    names = await api.services(namespace)
    if name is None and len(names) == 1:
        return names[0]
    if name in names:
        return str(name)
    known = f"there are {', '.join(sorted(names))}" if names else "there is none: give another --namespace"
    raise Refused(
        f"{'give the name of one' if name is None else f'no InferenceService {name}'} in {namespace}: {known}"
    )


@contextlib.asynccontextmanager
async def forwarded(api: ForwardApi, namespace: str, name: str, port: int) -> AsyncIterator[str]:
    """Listen on this machine, and carry each connection to a ready router of the service; yields the URL.

    Raises:
        ClusterError: no router is ready.
        PortError: the port cannot be had.
    """
    routers = selector(name, "router")
    carrying: set[asyncio.Task[None]] = set()
    has_ended = False

    async def pod() -> str:
        pods = await api.ready_pods(namespace, routers)
        if not pods:
            raise Unavailable(f"no router of {name} is ready: kubectl -n {namespace} describe pfis {name} says why")
        return pods[0]

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if has_ended:  # it was accepted before, and begins now
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        carrying.add(task)
        task.add_done_callback(carrying.discard)
        try:
            await api.carry(namespace, await pod(), SERVING_PORT, reader, writer)
        except ClusterError as error:
            print(f"pagefleet console: a connection ended: {error}", file=sys.stderr, flush=True)
        except OSError:
            pass  # the browser left
        except asyncio.CancelledError:
            # The end of all: not told further, since Python 3.11 complains of connections that were cancelled.
            writer.transport.abort()  # what a browser does not read would hold it open
        finally:
            writer.close()

    await pod()
    try:
        server = await asyncio.start_server(carry, _HOST, port)
    except OSError as error:
        raise PortError(f"port {port} cannot be listened on ({error.strerror}): give another --port") from error
    async with server:
        try:
            yield f"http://{_HOST}:{server.sockets[0].getsockname()[1]}"
        finally:
            has_ended = True
            server.close()
            for task in carrying:  # from Python 3.12 on, a server waits for its connections, and a tab keeps one
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main())

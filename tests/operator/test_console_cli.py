"""`pagefleet console`: from a kubeconfig to the router of a service, through a make-believe API server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from pagefleet_operator.apply.connection import credentials_of, load_own_configuration
from pagefleet_operator.apply.port_forward import ForwardApi, forward_api
from pagefleet_operator.console_cli import chosen_service, forwarded, main
from pagefleet_operator.errors import ClusterError, PortError, Refused, SettingsError, Unavailable

from tests.fakes.screen import TerminalProgram


@dataclass
class Cluster:
    """An API server with InferenceServices, router pods, and a way to port 8000 of each."""

    services: list[str] = field(default_factory=lambda: ["chat"])
    pods: list[dict[str, Any]] = field(default_factory=list)
    refusal: int = 0
    """Status of every answer, where it is not 0."""
    fault: bytes = b""
    """What the kubelet says in place of data."""
    thinks_s: float = 0.0
    """How long a pod takes to answer."""
    streams: bool = False
    """Answers never end."""
    foreign: int = 0
    """Status of what a proxy in between answers, in JSON that is no object, where it is not 0."""
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """Paths with queries, and who asked."""
    served: list[bytes] = field(default_factory=list)
    """What came to the pods."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """A connection has come to a pod."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.path_qs} {request.headers.get('authorization', '')}")
        if self.foreign:
            return web.json_response(["no upstream"], status=self.foreign)
        if self.refusal:
            return web.json_response({"message": "you may not", "reason": "Forbidden"}, status=self.refusal)
        if request.path.endswith("/portforward"):
            return await self._forward(request)
        names = [{"metadata": {"name": name}} for name in self.services]
        return web.json_response({"items": self.pods if request.path.endswith("/pods") else names})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        self.reached.set()
        for channel in (0, 1):
            await socket.send_bytes(bytes((channel, 0x40, 0x1F)))  # 8000
        if self.fault:
            await socket.send_bytes(b"\x01" + self.fault)
        async for message in socket:
            assert message.data[0] == 0
            self.served.append(message.data[1:])
            await asyncio.sleep(self.thinks_s)
            if self.streams:
                await self._stream(socket)
            for part in (b"HTTP/1.1 200 OK\r\ncontent-le", b"ngth: 5\r\nconnection: close\r\n\r\n", b"hello"):
                await socket.send_bytes(b"\x00" + part)
            await socket.close()
        return socket

    async def _stream(self, socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(b"\x00HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not socket.closed:
                await socket.send_bytes(b"\x00: waiting\n\n")
                await asyncio.sleep(0.01)


def pod(name: str, ready: bool = True, **metadata: Any) -> dict[str, Any]:
    status = {"conditions": [{"type": "Ready", "status": str(ready)}]}
    return {"metadata": {"name": name, **metadata}, "status": status}


@contextlib.asynccontextmanager
async def running(cluster: Cluster, folder: Path) -> AsyncIterator[ForwardApi]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", cluster.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    cluster.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    configuration, namespace = await load_own_configuration(kubeconfig(folder, cluster.url), None)
    assert namespace == "prod"
    try:
        async with forward_api(credentials_of(configuration)) as api:
            yield api
    finally:
        await runner.cleanup()


def kubeconfig(folder: Path, server: str) -> Path:
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "prod"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_request_goes_to_a_ready_router_and_its_answer_comes_back(tmp_path: Path) -> None:
    cluster = Cluster(pods=[pod("r-1", ready=False), pod("r-2", deletionTimestamp="now"), pod("r-3")])

    async def scenario() -> None:
        async with running(cluster, tmp_path) as api, aiohttp.ClientSession() as browser:
            assert await chosen_service(api, "prod", None) == "chat"
            async with forwarded(api, "prod", "chat", 0) as url, asyncio.timeout(120):
                for _ in range(2):
                    async with browser.get(f"{url}/console/state") as answer:
                        assert (answer.status, await answer.text()) == (200, "hello")

    asyncio.run(scenario())
    assert [line.startswith(b"GET /console/state HTTP/1.1\r\n") for line in cluster.served] == [True, True]
    assert all(line.endswith(" Bearer secret") for line in cluster.asked)
    assert "/api/v1/namespaces/prod/pods/r-3/portforward?ports=8000 Bearer secret" in cluster.asked
    (selected,) = {line for line in cluster.asked if "/pods?" in line}
    assert "pagefleet.dev/service" in selected
    assert "router" in selected


def test_a_client_that_has_said_all_still_gets_its_answer(tmp_path: Path) -> None:
    cluster = Cluster(pods=[pod("r")], thinks_s=0.3)

    async def scenario() -> bytes:
        async with running(cluster, tmp_path) as api, forwarded(api, "prod", "chat", 0) as url, asyncio.timeout(120):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            writer.write_eof()
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(scenario()).endswith(b"hello")


def test_it_ends_while_a_browser_holds_a_connection(tmp_path: Path) -> None:
    cluster = Cluster(pods=[pod("r")])
    complaints: list[str] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(str(said["message"])))
        async with running(cluster, tmp_path) as api, asyncio.timeout(120):
            async with forwarded(api, "prod", "chat", 0) as url:
                reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                await cluster.reached.wait()
            # Python 3.11 leaves the connection open, later ones wait for it: neither may be.
            assert await asyncio.wait_for(reader.read(), 120) == b""
            writer.close()

    asyncio.run(scenario())
    assert complaints == []


@pytest.mark.fleet
@pytest.mark.parametrize("streams", [False, True])
def test_ctrl_c_in_a_terminal_ends_it_also_in_the_middle_of_a_stream(tmp_path: Path, streams: bool) -> None:
    cluster = Cluster(pods=[pod("r")], streams=streams)

    command = ["--kubeconfig", str(tmp_path / "kubeconfig"), "--port", "0", "--no-browser"]

    async def scenario() -> str:
        async with running(cluster, tmp_path):
            with TerminalProgram([sys.executable, "-m", "pagefleet_operator.console_cli", *command], 120) as program:
                text = await asyncio.to_thread(program.wait_for, "Ctrl-C ends it")
                port = int(text.partition("the console is at http://127.0.0.1:")[2].partition("/")[0])
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                while streams and await reader.readline() != b": waiting\n":
                    pass
                program.type("\x03")
                assert await asyncio.to_thread(program.wait) == 0
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()  # it ends, too
                writer.close()
                return program.text

    told = asyncio.run(scenario())
    assert "Traceback" not in told
    assert told.count("\n") <= 1, "the address, and the ^C that the terminal echoes, before that line's end maybe"


# asyncio itself leaves what it accepts in the turn in which a server closes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("turns", range(8))
def test_a_connection_that_comes_as_it_ends_is_no_error(tmp_path: Path, turns: int) -> None:
    """`turns` of the loop after it came: before it is accepted, before it is carried, and while it is."""
    complaints: list[str] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(str(said["message"])))
        with socket.socket() as browser:
            async with running(Cluster(pods=[pod("r")]), tmp_path) as api, forwarded(api, "prod", "chat", 0) as url:
                browser.connect(("127.0.0.1", int(url.rpartition(":")[2])))
                for _ in range(turns):
                    await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0)

    asyncio.run(scenario())
    assert complaints == []


def test_what_stands_in_the_way_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        cluster = Cluster(services=["b", "a"])
        async with running(cluster, tmp_path) as api:
            with pytest.raises(Refused, match="give the name of one in prod: there are a, b"):
                await chosen_service(api, "prod", None)
            with pytest.raises(Refused, match="no InferenceService c in prod: there are a, b"):
                await chosen_service(api, "prod", "c")
            assert await chosen_service(api, "prod", "a") == "a"
            with pytest.raises(Unavailable, match="no router of a is ready: kubectl -n prod describe"):
                async with forwarded(api, "prod", "a", 0):
                    pass
            cluster.services = []
            with pytest.raises(Refused, match="there is none: give another --namespace"):
                await chosen_service(api, "prod", None)
            cluster.refusal = 403
            with pytest.raises(Refused, match="the API server refuses: you may not"):
                await chosen_service(api, "prod", None)
            for status, word in ((502, "the API server refuses: 502"), (200, "is the context's server right")):
                cluster.foreign = status
                with pytest.raises(ClusterError, match=word):
                    await chosen_service(api, "prod", None)
            cluster.foreign = 0
            cluster.refusal, cluster.pods, cluster.fault = 0, [pod("r")], b"nothing listens on 8000"
            taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
            async with taken:
                with pytest.raises(PortError, match="give another --port"):
                    async with forwarded(api, "prod", "a", taken.sockets[0].getsockname()[1]):
                        pass
            async with forwarded(api, "prod", "a", 0) as url, aiohttp.ClientSession() as browser:
                with pytest.raises(aiohttp.ClientError):
                    await browser.get(url)

    asyncio.run(scenario())
    assert "a connection ended: nothing listens on 8000" in capsys.readouterr().err


def test_without_a_cluster_it_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["--no-browser", "--kubeconfig", str(tmp_path / "none")]) == 2
    assert "give --kubeconfig FILE, or set KUBECONFIG" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="no cluster is known here"):
        asyncio.run(load_own_configuration(kubeconfig(tmp_path, "http://127.0.0.1:1"), "another"))

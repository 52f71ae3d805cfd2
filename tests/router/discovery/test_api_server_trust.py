"""Whom the router believes to be the API server: only who the service account's authority vouches for."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
import uvloop
from pagefleet_router.discovery.kubernetes import KubernetesSource, ServiceRef, WatchTiming
from pagefleet_router.discovery.slice_api import ApiAccess
from pagefleet_router.engines.endpoints import EndpointTable

from tests.fakes.slice_server import SliceServer, make_slice, pod, until

FAST = WatchTiming(watch=60, silence=30, least=0.01, longest=0.05)
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command for certificates")


def make_certificate(folder: Path, name: str, address: str = "127.0.0.1") -> tuple[Path, Path]:
    """Return a certificate that is its own authority, and its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -batch"
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}"]
    files = ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return certificate, key


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def test_only_the_authority_of_the_service_account_is_believed(tmp_path: Path) -> None:
    ours, theirs = make_certificate(tmp_path, "ours"), make_certificate(tmp_path, "theirs")
    authority, token = tmp_path / "ca.crt", tmp_path / "token"
    shutil.copy(ours[0], authority)
    token.write_text("secret")

    async def scenario() -> None:
        server, table = SliceServer(), EndpointTable()
        server.put(make_slice("s", pod("a")))
        server.token = "secret"
        await server.start(server_context(*theirs))
        access = ApiAccess(server.url.replace("http://", "https://"), token, authority)
        source = KubernetesSource(access, ServiceRef("ns", "qwen-engine", "m"), FAST)
        task = asyncio.ensure_future(source.run(table))
        try:
            await until(lambda: "its certificate is not trusted" in (table.unlisted or ""))
            assert not server.seen, "a token is never shown to a stranger"
            await server.stop()
            await server.start(server_context(*ours))
            await until(lambda: [one.id for one in table.snapshot.engines] == ["a"])
            # The cluster changes its authority: the kubelet writes the new one, and the router reads it.
            await server.stop()
            shutil.copy(theirs[0], authority)
            server.put(make_slice("s", pod("b")))
            await server.start(server_context(*theirs))
            await until(lambda: [one.id for one in table.snapshot.engines] == ["b"])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.stop()

    uvloop.run(scenario())


def test_a_certificate_for_another_address_is_not_believed(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "elsewhere", "10.0.0.1")

    async def scenario() -> None:
        server, table = SliceServer(), EndpointTable()
        await server.start(server_context(certificate, key))
        access = ApiAccess(server.url.replace("http://", "https://"), None, certificate)
        task = asyncio.ensure_future(KubernetesSource(access, ServiceRef("ns", "qwen-engine", "m"), FAST).run(table))
        try:
            await until(lambda: "its certificate is not trusted" in (table.unlisted or ""))
            assert not server.seen
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.stop()

    uvloop.run(scenario())

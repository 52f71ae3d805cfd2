"""Keys, the route table, and heads that no honest client sends."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.server import access
from pagefleet_engine.server.access import ROUTES, Access, ApiKeys, route_of
from pagefleet_engine.server.app import create_app
from pagefleet_engine.server.middleware import MAX_HEADERS
from pagefleet_protocol.handoff import CACHE_SALT, tenant_salt
from pagefleet_protocol.headers import PRIORITY

from tests.engine.server.conftest import MODEL, LiveServer, make_parts
from tests.fakes.scripted_engine import ScriptedEngine

KEYS = "# of team A\nalpha-key\n\n  beta-key  \n"
USER = {"role": "user", "content": "x"}
PATHS = {path.replace("{model:path}", MODEL): rule for path, rule in ROUTES.items() if path != "/console/{file}"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(KEYS)
    return file


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    server = LiveServer(ServerConfig(api_key_file=str(file)))
    yield server
    server.stop()


def raw_request(server: LiveServer, data: bytes) -> bytes:
    """Send bytes as they are; return the answer, empty when the server cut the connection."""
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    received = b""
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        try:
            sock.sendall(data)
            while not received.endswith(b"}") and (part := sock.recv(65536)):
                received += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # it closed with bytes of ours unread
    return received


def test_the_table_names_every_route_of_the_app() -> None:
    with ThreadPoolExecutor(1) as pool:
        app = create_app(make_parts(ScriptedEngine(), pool), ServerConfig())
    assert {getattr(route, "path", None) for route in app.routes} == set(ROUTES)


def test_a_route_outside_the_table_does_not_exist() -> None:
    assert route_of("/redoc") is None
    assert route_of("/v1/models") == "/v1/models"
    assert route_of("/v1/models/org/name") == "/v1/models/{model:path}"
    assert route_of("/v1/modelsx") is None


def test_a_forgotten_table_entry_closes_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "ROUTES", {"/livez": Access.PUBLIC})
    with ThreadPoolExecutor(1) as pool:
        app = create_app(make_parts(ScriptedEngine(), pool), ServerConfig())
        transport = httpx.ASGITransport(app)

        async def ask() -> list[int]:
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                return [(await http.get(path)).status_code for path in ("/livez", "/version", "/metrics")]

        assert asyncio.run(ask()) == [200, 404, 404]


@pytest.mark.parametrize(("path", "rule"), PATHS.items())
def test_every_route_but_the_public_ones_asks_for_a_key(guarded: LiveServer, path: str, rule: Access) -> None:
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        headers = {"content-type": "application/json", "accept": "text/html"}
        response = guarded.http.request(method, path, headers=headers)
        if rule is Access.KEY:
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        else:
            assert response.status_code == (200 if method == "GET" else 405)


def test_unknown_paths_ask_for_a_key_too(guarded: LiveServer) -> None:
    assert guarded.http.get("/nothing").status_code == 401
    assert guarded.http.get("/nothing", headers={"authorization": "Bearer alpha-key"}).status_code == 404


@pytest.mark.parametrize("key", ["alpha-key", "beta-key"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_right_keys(guarded: LiveServer, key: str, scheme: str) -> None:
    assert guarded.http.get("/v1/models", headers={"authorization": f"{scheme} {key}"}).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        b"Bearer gamma-key",
        b"Bearer alpha-ke",
        b"Bearer alpha-key2",
        b"Bearer",
        b"alpha-key",
        b"Basic YWxwaGEta2V5",
        b"Bearer \xc3\xa4lpha-key",
        b"Bearer # of team A",
        b"Bearer alpha-key\tbeta-key",
    ],
)
def test_wrong_keys(guarded: LiveServer, header: bytes) -> None:
    response = guarded.http.get("/v1/models", headers=[(b"authorization", header)])
    assert response.status_code == 401


def test_two_authorization_headers_are_none(guarded: LiveServer) -> None:
    both = [("authorization", "Bearer alpha-key"), ("authorization", "Bearer alpha-key")]
    assert guarded.http.get("/v1/models", headers=both).status_code == 401


def test_every_known_key_is_compared(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def count(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    keys = ApiKeys(key_file)
    monkeypatch.setattr(hmac, "compare_digest", count)
    assert keys.asker_of(b"alpha-key") is not None
    assert len(compared) == 2


def test_keys_that_were_given_as_they_are() -> None:
    keys = ApiKeys(["alpha-key", "beta-key"])
    first, second = (keys.asker_of(key) for key in (b"alpha-key", b"beta-key"))
    assert first is not None
    assert second is not None
    assert first.salt != second.salt
    assert keys.asker_of(b"gamma-key") is None
    for wrong in ([], [""], ["a key"], ["line\nfeed"]):
        with pytest.raises(ConfigError, match="api_key has no key, or one with spaces"):
            ApiKeys(wrong)


def test_keys_follow_the_file(key_file: Path) -> None:
    now = 0.0
    keys = ApiKeys(key_file, clock=lambda: now)
    replacement = key_file.with_name("new")
    replacement.write_text("gamma-key\nbeta-key\n")
    os.replace(replacement, key_file)
    assert keys.asker_of(b"alpha-key") is not None, "not looked at again within a second"
    now = 2.0
    assert keys.asker_of(b"gamma-key") is not None
    assert keys.asker_of(b"beta-key") is not None
    assert keys.asker_of(b"alpha-key") is None


TENANTS = "ann tenant=ann priority=5\nanna tenant=ann priority=5\nbob tenant=bob priority=-1\n"


@pytest.fixture(scope="module")
def shared_by_tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(TENANTS)
    server = LiveServer(ServerConfig(api_key_file=str(file)))
    yield server
    server.stop()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tenants_share_no_prefix_and_no_client_chooses_his_tenant(shared_by_tenants: LiveServer, path: str) -> None:
    server, prompt = shared_by_tenants, {"prompt": "x"} if path == "/v1/completions" else {"messages": [USER]}

    def salt_of(key: str, salt: str | None = None, **more: str) -> str | None:
        headers = {"authorization": f"Bearer {key}", **more}
        body = {"model": MODEL, "max_tokens": 1, "cache_salt": salt, **prompt}
        assert server.http.post(path, json=body, headers=headers).status_code == 200
        return server.engine.seen[-1][4]

    assert salt_of("ann") == salt_of("anna") == tenant_salt("ann")
    assert salt_of("bob") == salt_of("bob", **{CACHE_SALT: tenant_salt("ann")}) == tenant_salt("bob")
    assert salt_of("bob", "mine") == tenant_salt("bob") + "/mine"


def test_one_tenant_alone_needs_no_salt(key_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "alone"
    file.write_text("a tenant=x\nb tenant=x\n")
    alone = ApiKeys(file).asker_of(b"a")
    assert alone is not None
    assert alone.salt is None
    several = ApiKeys(key_file).asker_of(b"alpha-key")
    assert several is not None
    assert several.salt is not None


@pytest.mark.parametrize(
    ("key", "asked", "given"), [("ann", -9, -5), ("ann", -5, -5), ("ann", 3, 3), ("bob", -9, 1), ("bob", 0, 1)]
)
def test_a_body_s_priority_does_not_pass_the_tenant_s(
    shared_by_tenants: LiveServer, key: str, asked: int, given: int
) -> None:
    headers = {"authorization": f"Bearer {key}", PRIORITY: "100"}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "priority": asked}
    assert shared_by_tenants.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert shared_by_tenants.engine.seen[-1][3] == given


@pytest.mark.parametrize(("most", "given"), [(None, -9), ("3", -3), ("-2", 2), ("100", -9)])
def test_a_router_says_how_urgent_a_request_may_be(open_server: LiveServer, most: str | None, given: int) -> None:
    headers = {} if most is None else {PRIORITY: most}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "priority": -9}
    assert open_server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert open_server.engine.seen[-1][3] == given


def test_a_priority_that_no_router_writes_is_refused(open_server: LiveServer) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    for wrong in ("high", "1.5", "10000", ""):
        refused = open_server.http.post("/v1/completions", json=body, headers={PRIORITY: wrong})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_handoff")


@pytest.fixture(scope="module")
def open_server() -> Iterator[LiveServer]:
    server = LiveServer(ServerConfig())
    yield server
    server.stop()


def test_a_key_file_without_keys_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        ApiKeys(tmp_path / "empty")
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(tmp_path / "binary")


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/nothing", "/v1", "/docs/", "/redoc", "//v1/models", "/v1/models/", "/livez/", "/v1//models"),
        *("/v1/%2e%2e/livez", "/v1/chat/completions/", "/V1/models", "/v1/models%00"),
    ],
)
def test_unknown_paths(server: LiveServer, path: str) -> None:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    answer = raw_request(server, f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b'"error"' in answer
    assert b"0x" not in answer


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("POST", "/livez"), ("DELETE", "/v1/models/x"), ("PUT", "/health")]
)
def test_wrong_methods(server: LiveServer, method: str, path: str) -> None:
    response = server.http.request(method, path, headers={"content-type": "application/json"})
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert response.headers["allow"]


@pytest.mark.parametrize(
    "hosts",
    [["a/v1?x"], ["a/livez"], ["evil.example/health#"], [""], ["a", "b"], ["a", "a"], ["a b"], ["a@b"], ["x" * 300]],
    ids=repr,
)
def test_forged_hosts_never_pass(guarded: LiveServer, hosts: list[str]) -> None:
    lines = "".join(f"host: {host}\r\n" for host in hosts)
    answer = raw_request(guarded, f"GET /v1/models HTTP/1.1\r\n{lines}\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1:80", "[::1]:8000", "my_service.ns.svc"])
def test_honest_hosts(server: LiveServer, host: str) -> None:
    assert server.http.get("/livez", headers={"host": host}).status_code == 200


def test_header_limits(server: LiveServer) -> None:
    many = {f"x-{i}": "1" for i in range(MAX_HEADERS)}
    assert server.http.get("/livez", headers=many).status_code == 431
    endless = b"GET /livez HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000
    answer = raw_request(server, endless)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01\x00\n", b"HELLO\r\n\r\n", b"GET / SPDY/3\r\n\r\n"])
def test_what_is_not_http(server: LiveServer, garbage: bytes) -> None:
    answer = raw_request(server, garbage)
    assert answer.startswith(b"HTTP/1.1 400 ") or answer == b""
    assert server.complete().status_code == 200


@pytest.mark.parametrize("given", ["abc-1.2_X", "a" * 64])
def test_harmless_request_ids_come_back(server: LiveServer, given: str) -> None:
    assert server.http.get("/livez", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["a" * 65, "a b", "a;b", "", "ä", "1.2.3.4:80/x"])
def test_other_request_ids_are_replaced(server: LiveServer, given: str) -> None:
    headers = [(b"x-request-id", given.encode())]
    got = server.http.get("/livez", headers=headers).headers["x-request-id"]
    assert got != given
    assert got.startswith("req-")


def test_control_characters_in_headers_are_not_http(server: LiveServer) -> None:
    head = b"GET /livez HTTP/1.1\r\nhost: x\r\nx-request-id: a\x1b[31m\r\n\r\n"
    answer = raw_request(server, head)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"\x1b" not in answer


def test_request_ids_of_clients_never_reach_the_engine(server: LiveServer) -> None:
    for _ in range(2):
        body = {"model": "scripted", "prompt": "x"}
        server.http.post("/v1/completions", json=body, headers={"x-request-id": "same"})
    first, second = (seen[0] for seen in server.engine.seen[-2:])
    assert first != second
    assert "same" not in first + second

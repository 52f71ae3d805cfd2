"""The watch of EndpointSlices against an API server that fails in every way it can."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
from pagefleet_router.discovery.kubernetes import (
    KubernetesSource,
    ServiceRef,
    WatchTiming,
    in_cluster_access,
    make_kubernetes_source,
    pause_s,
)
from pagefleet_router.discovery.slice_api import ApiAccess
from pagefleet_router.engines.endpoints import EndpointTable
from pagefleet_router.errors import ConfigError

from tests.fakes.slice_server import Refusal, SliceServer, leaving, make_slice, pod, slice_server, until

FAST = WatchTiming(watch=60, silence=30, least=0.01, longest=0.05)
TARGET = ServiceRef("ns", "qwen-engine", "m")


@dataclass
class Followed:
    """A source that follows a server into a table."""

    server: SliceServer
    table: EndpointTable = field(default_factory=EndpointTable)

    def ids(self) -> list[str]:
        return [one.id for one in self.table.snapshot.engines]

    async def until_ids(self, *ids: str) -> None:
        await until(lambda: self.ids() == list(ids))

    async def until_watched(self) -> None:
        await until(lambda: self.server.num_open == 1)


@contextlib.asynccontextmanager
async def following(
    server: SliceServer, timing: WatchTiming = FAST, token_file: Path | None = None
) -> AsyncIterator[Followed]:
    made = Followed(server)
    source = KubernetesSource(ApiAccess(server.url, token_file, None), TARGET, timing)
    task = asyncio.ensure_future(source.run(made.table))
    try:
        yield made
        assert not task.done(), "the source never ends by itself"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def run(scenario: Callable[[SliceServer], Awaitable[None]]) -> None:
    async def with_server() -> None:
        async with slice_server() as server:
            await scenario(server)

    uvloop.run(with_server())


def test_pods_come_drain_and_go() -> None:
    async def scenario(server: SliceServer) -> None:
        server.put(make_slice("s1", pod("a", "10.0.0.1")))
        async with following(server) as f:
            await f.until_ids("a")
            await f.until_watched()
            server.put(make_slice("s2", pod("b", "10.0.0.2")))
            await f.until_ids("a", "b")
            server.put(make_slice("s1", leaving("a", "10.0.0.1")))
            await until(lambda: [one.state for one in f.table.snapshot.engines] == ["draining", "unready"])
            server.delete("s1")
            await f.until_ids("b")
            server.put(make_slice("s2"))
            await f.until_ids()
            assert f.table.unlisted is None
        assert (server.num_lists, server.num_watches) == (1, 1)
        watch = server.seen[-1]
        assert (watch["resourceVersion"], watch["allowWatchBookmarks"]) == ("101", "true")
        assert 48 <= int(watch["timeoutSeconds"]) <= 60

    run(scenario)


def test_unchanged_endpoints_are_not_reported_again() -> None:
    async def scenario(server: SliceServer) -> None:
        server.put(make_slice("s1", pod("a")))
        async with following(server) as f:
            await f.until_ids("a")
            await f.until_watched()
            before = f.table.snapshot
            server.put({**make_slice("s1", pod("a")), "labels": "changed"})
            server.bookmark()
            server.put(make_slice("s2", pod("b", ready=False, serving=False, terminating=True)))
            server.drop_watches()
            await until(lambda: server.num_watches == 2)
            assert f.table.snapshot is before
            assert int(server.seen[-1]["resourceVersion"]) == server.version, "it goes on behind what it has seen"

    run(scenario)


@pytest.mark.parametrize("how", ["answer", "event"])
def test_an_expired_version_leads_to_a_new_list(how: str) -> None:
    async def scenario(server: SliceServer) -> None:
        server.put(make_slice("s1", pod("a")))
        server.put(make_slice("s2", pod("b")))
        async with following(server) as f:
            await f.until_ids("a", "b")
            await f.until_watched()
            del server.slices["s2"]  # a delete that nobody was told of
            server.change_unseen(make_slice("s1", pod("c")))
            if how == "answer":
                server.drop_watches()
            else:
                server.send_error(410)
            await f.until_ids("c")
            assert server.num_lists == 2

    run(scenario)


def test_a_dropped_watch_is_taken_up_where_it_ended() -> None:
    async def scenario(server: SliceServer) -> None:
        server.put(make_slice("s1", pod("a")))
        async with following(server) as f:
            await f.until_ids("a")
            for n in range(3):
                await f.until_watched()
                server.drop_watches()
                server.put(make_slice("s1", pod(f"new-{n}")))
                await f.until_ids(f"new-{n}")
            assert server.num_lists == 1

    run(scenario)


def test_a_silent_watch_is_given_up() -> None:
    async def scenario(server: SliceServer) -> None:
        server.put(make_slice("s1", pod("a")))
        async with following(server, WatchTiming(watch=60, silence=0.1, least=0.01, longest=0.05)) as f:
            await f.until_ids("a")
            await f.until_watched()
            server.silent = True
            server.put(make_slice("s1", pod("b")))
            await asyncio.sleep(0.05)
            assert f.ids() == ["a"]
            server.silent = False
            await f.until_ids("b")
            assert server.num_lists == 1, "what was missed comes with the next watch"

    run(scenario)


def test_bookmarks_keep_a_watch_that_has_no_news() -> None:
    async def scenario(server: SliceServer) -> None:
        async with following(server, WatchTiming(watch=60, silence=0.2, least=0.01, longest=0.05)) as f:
            await f.until_watched()
            told_at, long_gaps = time.monotonic(), 0
            for _ in range(10):
                await asyncio.sleep(0.05)
                server.bookmark()
                before, told_at = told_at, time.monotonic()
                long_gaps += told_at - before > 0.1  # a slow machine; the bookmark may have come too late
            assert server.num_watches <= 1 + long_gaps

    run(scenario)


def test_a_rotated_token_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    token_file = tmp_path / "token"
    token_file.write_text("secret-old\n")

    async def scenario(server: SliceServer) -> None:
        server.token = "secret-old"
        server.put(make_slice("s1", pod("a")))
        async with following(server, token_file=token_file) as f:
            await f.until_ids("a")
            await f.until_watched()
            server.token = "secret-new"
            server.drop_watches()
            await until(lambda: "401" in caplog.text)
            assert f.ids() == ["a"]
            token_file.write_text("secret-new\n")
            server.put(make_slice("s1", pod("b")))
            await f.until_ids("b")
            await until(lambda: "answers again" in caplog.text)

    run(scenario)
    assert "secret" not in caplog.text


@pytest.mark.parametrize("damage", ["gone", "empty", "binary"])
def test_a_token_that_cannot_be_read_is_waited_for(tmp_path: Path, damage: str) -> None:
    token_file = tmp_path / "token"
    if damage != "gone":
        token_file.write_bytes({"empty": b"", "binary": b"\xff\x00"}[damage])

    async def scenario(server: SliceServer) -> None:
        server.token = "good"
        server.put(make_slice("s1", pod("a")))
        async with following(server, token_file=token_file) as f:
            await until(lambda: "token or certificate cannot be read" in (f.table.unlisted or ""))
            assert not server.seen, "nothing is asked without a token"
            token_file.write_text("good")
            await f.until_ids("a")

    run(scenario)


def test_an_api_server_that_is_gone_changes_nothing_and_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(server: SliceServer) -> None:
        server.put(make_slice("s1", pod("a")))
        async with following(server) as f:
            await f.until_ids("a")
            await f.until_watched()
            before = f.table.snapshot
            await server.stop()
            await until(lambda: "Connection refused" in caplog.text)
            await asyncio.sleep(0.3)
            assert f.table.snapshot is before
            server.put(make_slice("s1", pod("b")))
            await server.start()
            await f.until_ids("b")
            await until(lambda: "answers again" in caplog.text)

    run(scenario)
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refused) == 1
    assert "the last list of engines stays in force" in refused[0]
    assert "127.0.0.1" not in caplog.text, "a probe's answer holds the same words, and strangers may read it"


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_refusals_are_explained_until_there_is_a_list(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: SliceServer) -> None:
        server.refusal = Refusal(status)
        server.put(make_slice("s1", pod("a")))
        async with following(server) as f:
            assert f.table.unlisted
            await until(lambda: len(server.seen) >= 3)
            assert str(status) in (f.table.unlisted or "")
            server.refusal = None
            await f.until_ids("a")
            assert f.table.unlisted is None

    run(scenario)
    assert caplog.text.count(f"answers {status}") == 1
    assert "no engine is known yet" in caplog.text


def test_retry_after_is_honoured() -> None:
    async def scenario(server: SliceServer) -> None:
        server.refusal = Refusal(429, {"retry-after": "1"})
        began = time.monotonic()
        async with following(server):
            await until(lambda: len(server.seen) == 1)
            server.refusal = None
            await until(lambda: server.num_open == 1)
            assert time.monotonic() - began >= 1.0, "asked again before it was time"

    run(scenario)


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"kind": "Status"}', b"\xff\xfe"])
def test_what_is_no_list_leaves_the_last_one(body: bytes) -> None:
    async def scenario(server: SliceServer) -> None:
        server.put(make_slice("s1", pod("a")))
        async with following(server) as f:
            await f.until_ids("a")
            await f.until_watched()
            server.list_body = body
            server.send_error(500)
            await until(lambda: server.num_lists >= 3)
            assert f.ids() == ["a"]
            server.list_body = None
            server.slices["s1"] = make_slice("s1", pod("b"))
            await f.until_ids("b")

    run(scenario)


@pytest.mark.parametrize("line", [b"<html>", b'{"type": "MODIFIED"}', b"[1]", b'{"type": "ADDED", "object": {}'])
def test_an_event_that_is_none_leads_to_a_new_list(line: bytes) -> None:
    async def scenario(server: SliceServer) -> None:
        server.put(make_slice("s1", pod("a")))
        async with following(server) as f:
            await f.until_ids("a")
            await f.until_watched()
            server.slices["s1"] = make_slice("s1", pod("b"))
            server.send(line)
            await f.until_ids("b")

    run(scenario)


@pytest.mark.parametrize("trouble", ["ends", "expires", "drops", "refuses"])
def test_no_trouble_makes_a_hot_loop(trouble: str) -> None:
    async def scenario(server: SliceServer) -> None:
        server.watch_ends_at_once = trouble == "ends"
        server.oldest = 10**9 if trouble == "expires" else 0
        server.refusal = Refusal(500) if trouble == "refuses" else None
        began = time.monotonic()
        async with following(server, WatchTiming(watch=60, silence=30, least=0.1, longest=0.4)):
            for _ in range(40):
                await asyncio.sleep(0.01)
                if trouble == "drops":
                    server.bookmark()
                    server.drop_watches()
        num_attempts = (time.monotonic() - began) / 0.1 + 1
        assert 2 <= len(server.seen) <= 2 * num_attempts, "each attempt is a list and a watch at most"

    run(scenario)


def test_pauses_grow_at_random_within_bounds() -> None:
    timing = WatchTiming()
    assert [pause_s(n, 0.0, 9.0, 1.0, timing) for n in range(8)] == [0.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert [pause_s(n, 0.0, 9.0, 0.0, timing) for n in (1, 2, 3, 1000)] == [1.0, 2.0, 4.0, 15.0]
    assert pause_s(0, 0.0, 0.25, 0.0, timing) == 0.75, "two attempts never begin within a second"
    assert pause_s(1, 40.0, 0.1, 0.5, timing) == 40.0


def account(folder: Path) -> Path:
    for name, text in (("token", "t"), ("ca.crt", "c"), ("namespace", "ns\n")):
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443"), ("k", "https://k:443")],
)
def test_a_pod_knows_its_api_server(tmp_path: Path, host: str, url: str) -> None:
    folder = account(tmp_path)
    access = in_cluster_access({"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}, folder)
    assert access == ApiAccess(url, folder / "token", folder / "ca.crt")


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("KUBERNETES_SERVICE_HOST", "works in a pod"),
        ("KUBERNETES_SERVICE_PORT", "works in a pod"),
        ("token", "automountServiceAccountToken"),
        ("ca.crt", "automountServiceAccountToken"),
        ("namespace", "give --kubernetes-namespace"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, missing: str, says: str) -> None:
    folder = account(tmp_path)
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    if missing in environment:
        del environment[missing]
    else:
        (folder / missing).unlink()
    with pytest.raises(ConfigError, match=says):
        make_kubernetes_source("s", None, "m", environment, folder)

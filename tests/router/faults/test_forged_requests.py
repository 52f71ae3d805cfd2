"""Keys that come, go and vanish (F41), and heads and bodies that claim what no client may: a router's process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from pagefleet_protocol.handoff import CACHE_SALT, tenant_salt
from pagefleet_protocol.headers import PRIORITY

from tests.fakes.faulty_engine import Answer, chat, post, whole
from tests.fakes.route_process import RouteProcess, programmed_fleet, replace_file, until

pytestmark = pytest.mark.fleet
OWN_NAMES = ("cache-salt", "prompt-tokens", "stream", "incarnation", "model", "engine", "role", "transfer", "explain")


async def ask(router: RouteProcess, key: str, headers: str = "") -> Answer:
    return await router.ask(post(chat(), headers=f"authorization: Bearer {key}\r\n{headers}"))


def test_keys_are_rotated_withdrawn_and_lost_without_a_restart(tmp_path: Path) -> None:
    """F41: a file that says nothing changes nothing, an empty one withdraws all, and tenants keep what is theirs."""
    file = tmp_path / "keys"
    file.write_text("old tenant=red rpm=100000\nother tenant=blue rpm=1\n")

    async def scenario() -> None:
        async with programmed_fleet(tmp_path, [whole()], "--api-key-file", str(file)) as fleet:
            router = fleet.router

            async def statuses(*keys: str) -> list[int]:
                return [(await ask(router, key)).status for key in keys]

            async def becomes(wanted: list[int], *keys: str) -> None:
                async def holds() -> bool:
                    return await statuses(*keys) == wanted

                await until(holds)

            def salts() -> set[str | None]:
                return {seen.header(CACHE_SALT) for seen in fleet.engines[0].seen}

            assert await statuses("old", "new", "other", "other") == [200, 401, 200, 429]
            replace_file(file, b"old tenant=red rpm=100000\nnew tenant=red rpm=100000\nother tenant=blue rpm=1\n")
            await becomes([200, 200], "new", "old")
            replace_file(file, b"new tenant=red rpm=100000\nother tenant=blue rpm=100000\n")
            await becomes([401, 200], "old", "new")
            await becomes([200], "other")
            assert salts() == {tenant_salt("red"), tenant_salt("blue")}, "a new key has its tenant's cache"
            for damaged in (
                b"new tenant=red rpm=many\n",
                b"old\nnew tenant=red \xff\n",
                b"new tenant=red\nnew tenant=x\n",
            ):
                router.log.clear()
                replace_file(file, damaged)

                async def said() -> bool:
                    await ask(router, "new")
                    return any("the last keys stay in force" in line for line in router.log)

                await until(said)
                assert await statuses("new", "other", "old") == [200, 200, 401]
            file.unlink()
            router.log.clear()
            await until(said)
            assert await statuses("new", "other", "old") == [200, 200, 401]
            replace_file(file, b"# none\n")
            await becomes([401, 401], "new", "other")
            assert (await router.get("/livez")).status == 200
            replace_file(file, b"last tenant=green\n")
            await becomes([200, 401], "last", "new")
            assert tenant_salt("green") in salts()
            assert not any(key in "".join(router.log) for key in ("Bearer", "tenant=red"))

    asyncio.run(scenario())


def test_what_a_client_claims_of_the_fleet_reaches_no_engine(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant=red\n")
    spellings = [
        spelling
        for name in OWN_NAMES
        for spelling in (
            f"x-pagefleet-{name}",
            f"X-PAGEFLEET-{name.upper()}",
            f"x_pagefleet_{name}",
            f"x-pagefleet_{name}",
        )
    ]
    value = tenant_salt("blue")
    forged = "".join(f"{name}: {value}\r\n" for name in (*spellings, *spellings))

    async def scenario() -> None:
        async with programmed_fleet(
            tmp_path, [whole(), whole()], "--api-key-file", str(keys), "--policy", "round-robin"
        ) as fleet:  # fmt: skip
            for engine in ("e0", "e0", "e0", "e0"):
                answer = await ask(
                    fleet.router, "one", forged[: len(forged) // 2] + f"x-pagefleet-engine: {engine}\r\n"
                )
                assert answer.status == 200
                assert {name for name in answer.headers if "pagefleet" in name} == {"x-pagefleet-engine"}
            assert all(share == 2 for share in fleet.shares), "nobody chooses an engine"
            for seen in (one for engine in fleet.engines for one in engine.seen):
                ours = [(name, text) for name, text in seen.headers if "pagefleet" in name]
                assert ours == [(PRIORITY, "0"), (CACHE_SALT, tenant_salt("red"))]
                assert all("_" not in name and name != "authorization" for name, _ in seen.headers)
                assert seen.body == json.dumps(chat()).encode()

    asyncio.run(scenario())


def test_a_client_says_nothing_of_where_kv_is(tmp_path: Path) -> None:
    """Engines of others would believe it (CVE-2026-116176 and its like)."""
    params = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 22}
    bodies = [
        json.dumps(chat(kv_transfer_params=params)),
        json.dumps(chat(kv_transfer_params="x", stream=True)),
        json.dumps(chat())[:-1] + ', "kv_transfer_params": null, "kv_transfer_params": {}}',
        json.dumps(chat(kv_transfer_params=params)).replace("kv_", "\\u006bv_"),
    ]

    async def scenario() -> None:
        async with programmed_fleet(tmp_path, [whole()]) as fleet:
            for body in bodies:
                answer = await fleet.router.ask(post(body.encode()))
                assert (answer.status, answer.error["param"]) == (400, "kv_transfer_params"), body
                assert answer.error["code"] == "unsupported_parameter"
            assert fleet.shares == [0]
            assert (await fleet.router.ask(post(chat(kv_transfer_params=None)))).status == 200

    asyncio.run(scenario())

"""A fleet of fake engines and routers as real processes: faults, edits, drains."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pagefleet_operator.errors import ManifestError, PortError
from pagefleet_operator.local.machine import check_port
from pagefleet_operator.local.settings import Timing
from pagefleet_operator.local.state_dir import start_time
from pagefleet_protocol.endpoints import decode_endpoints
from pagefleet_protocol.service_news import read_news

from tests.fakes.free_ports import free_ports

pytestmark = pytest.mark.fleet


class Load:
    """Requests without a pause, from several clients; counts what came back."""

    def __init__(self, fleet: Any, clients: int = 4) -> None:
        self.fleet = fleet
        self.markers: Counter[str] = Counter()
        self.failures: list[str] = []
        self._clients = clients
        self._stop = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        while not self._stop:
            try:
                status, body = await self.fleet.ask()
            except OSError as error:
                self.failures.append(repr(error))
                continue
            if status == 200:
                self.markers[body["marker"]] += 1
            else:
                self.failures.append(f"{status} {body}")
            await asyncio.sleep(0.005)


def test_serves_and_says_where(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(replicas=2)) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            status, body = await fleet.ask()
            assert status == 200
            assert body["model"] == "qwen"
            assert body["devices"] == ""
            assert fleet.reporter.heard(f"curl {fleet.url()}/v1/chat/completions")
            assert fleet.reporter.heard(f"pagefleet chat {fleet.url()}")
            assert "qwen-engine-0 | loading weights" in fleet.reporter.logged
            ready = fleet.condition("Ready")
            assert ready.message == f"requests are answered at {fleet.url()}"
            assert fleet.view().status.ready == "2/2"
            log = fleet.state_dir / "logs" / "qwen-engine-1.log"
            assert log.read_text() == "loading weights\n"
            news = read_news((fleet.state_dir / "qwen.service.json").read_bytes())
            assert news.name == "qwen"
            assert ("Ready", "True") in [(one.type, one.status) for one in news.statements]
            listed = decode_endpoints((fleet.state_dir / "qwen.endpoints.json").read_bytes()).endpoints
            assert len({one.revision for one in listed} - {""}) == 1, "both have the same settings"
            assert not any(one.coming for one in listed)
            assert fleet.reporter.heard(f"{fleet.url()}/ in a browser")

    asyncio.run(scenario())


def test_the_status_has_the_settings_in_force_and_what_engines_do_now(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(engine={"maxModelLen": 512})) as fleet:
            await fleet.until(lambda: fleet.settled(1) and fleet.view().status.live is not None)
            status = fleet.view().status
            assert (status.resolved.cache, status.resolved.max_model_len) == ("builtin", 512)
            assert "rollout.maxSurge: 1, the default" in status.resolved.why
            assert (status.live.requests_waiting, status.live.kv_usage) == (0, 0.0)

    asyncio.run(scenario())


def test_a_folder_that_is_not_there_is_no_model(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(model={"uri": "file:///models/none"})) as fleet:
            await fleet.until(lambda: fleet.view() is not None and fleet.view().status is not None)
            told = fleet.condition("ModelCached")
            assert (told.status, told.reason) == ("False", "ModelNotFound")
            assert "/models/none: there is no such folder" in told.message

    asyncio.run(scenario())


def test_killed_engine_comes_back_while_the_other_serves(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(replicas=2)) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            victim = (await fleet.ask())[1]["pid"]
            os.kill(victim, signal.SIGKILL)
            await fleet.until(lambda: fleet.reporter.heard("killed by SIGKILL"))
            await fleet.until(lambda: "qwen: partly ready, 1 of 2 engines ready" in fleet.reporter.said)
            await fleet.until(lambda: fleet.settled(2))
            answers = [await fleet.ask() for _ in range(6)]
            assert {status for status, _ in answers} == {200}
            assert victim not in {body["pid"] for _, body in answers}
            assert sum(one.restarts for _, one in fleet.view().instances) == 1
            assert fleet.reporter.heard("starts again in 0.")

    asyncio.run(scenario())


def test_engine_that_cannot_start_is_tried_with_growing_pauses_and_says_why(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(engine={"args": ["--refuse-to-start"]})) as fleet:
            await fleet.until(lambda: sum("starts again in" in text for text in fleet.reporter.said) >= 3)
            ready = fleet.condition("Ready")
            assert ready.status == "False"
            assert ready.reason == "CrashLoop"
            assert "error: model folder missing: builtin://tiny (exit status 1)" in ready.message
            pauses = [text for text in fleet.reporter.said if "starts again in" in text][:3]
            seconds = [float(text.split("starts again in ")[1].split()[0]) for text in pauses]
            assert seconds[0] < seconds[2]
            assert (await fleet.ask())[0] == 503

    asyncio.run(scenario())


def test_engine_that_hangs_is_ended_and_started_again(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document()) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            await fleet.ask(path="/sick")
            await fleet.until(lambda: fleet.reporter.heard("not-ready, /readyz answers 503"))
            await fleet.until(lambda: fleet.reporter.heard("does not live any more: /livez answers 503"))
            await fleet.until(lambda: fleet.settled(1))

    asyncio.run(scenario())


def test_engine_that_is_never_ready_is_ended_after_its_time(start_fleet: Any, document: Any, quick: Timing) -> None:
    async def scenario() -> None:
        timing = dataclasses.replace(quick, startup=3.0)  # a busy machine takes seconds to start it
        async with start_fleet(document(engine={"args": ["--never-ready"]}), timing=timing) as fleet:
            await fleet.until(lambda: fleet.reporter.heard("failed, not ready after 3 s: /readyz answers 503"))

    asyncio.run(scenario())


def test_router_waits_for_engines_as_long_as_it_has_to(start_fleet: Any, document: Any, quick: Timing) -> None:
    async def scenario() -> None:
        timing = dataclasses.replace(quick, startup=0.3)
        async with start_fleet(document(replicas=0), timing=timing) as fleet:
            await fleet.until(lambda: fleet.states() == {"router-0": "starting"})
            await asyncio.sleep(0.8)
            assert fleet.states() == {"router-0": "starting"}
            assert not fleet.reporter.heard("failed")

    asyncio.run(scenario())


def test_rolling_update_loses_no_request(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        slow = ["--answer-s", "0.1"]
        async with start_fleet(document(replicas=2, engine={"args": slow})) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            async with Load(fleet) as load:
                await fleet.until(lambda: load.markers["one"] >= 8)
                fleet.edit(document(replicas=2, engine={"args": [*slow, "--marker", "two"]}))
                await fleet.until(lambda: load.markers["two"] > 0)
                await fleet.until(lambda: fleet.settled(2))
            async with Load(fleet) as later:  # an answer of before may still be on its way to the first clients
                await fleet.until(lambda: later.markers["two"] >= 20)
            assert load.failures == later.failures == []
            assert later.markers.keys() == {"two"}
            assert fleet.reporter.heard("qwen: settled, everything runs as the spec says")
            assert fleet.view().status.observed_generation == 2

    asyncio.run(scenario())


def test_failing_update_stops_and_can_be_undone(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(replicas=2)) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            async with Load(fleet) as load:
                fleet.edit(document(replicas=2, engine={"args": ["--refuse-to-start"]}))
                await fleet.until(
                    lambda: fleet.reporter.heard(
                        "the rollout stopped: the new revision fails. 2 of 2 engines keep serving"
                    )
                )
                assert fleet.states()["engine-0"] == fleet.states()["engine-1"] == "ready"
                assert fleet.condition("Ready").status == "True"
                fleet.edit(document(replicas=2))
                await fleet.until(lambda: fleet.settled(2))
            assert load.failures == []
            assert set(fleet.states()) == {"engine-0", "engine-1", "router-0"}

    asyncio.run(scenario())


def test_scales_by_editing_the_file(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document()) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            first = (await fleet.ask())[1]["pid"]
            async with Load(fleet) as load:
                fleet.edit(document(replicas=3))
                await fleet.until(lambda: fleet.settled(3))
                fleet.edit(document(replicas=1))
                await fleet.until(lambda: fleet.settled(1))
            assert load.failures == []
            assert (await fleet.ask())[1]["pid"] == first
            fleet.edit(document(replicas=0))
            await fleet.until(lambda: set(fleet.states()) == {"router-0"})
            assert (await fleet.ask())[0] == 503
            assert fleet.condition("Ready").reason == "ScaledToZero"

    asyncio.run(scenario())


def test_of_many_edits_the_last_one_counts(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document()) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            for number in range(100):
                fleet.edit(document(replicas=number % 4, engine={"args": ["--marker", f"edit {number}"]}))
                await asyncio.sleep(0.01)
            fleet.edit(document(replicas=2, engine={"args": ["--marker", "last"]}))
            await fleet.until(lambda: fleet.settled(2) and fleet.view().status.observed_generation > 1)
            assert {(await fleet.ask())[1]["marker"] for _ in range(4)} == {"last"}
            assert set(fleet.states().values()) == {"ready"}

    asyncio.run(scenario())


def test_kv_on_disk_outlives_a_process_and_goes_with_its_engine(start_fleet: Any, document: Any) -> None:
    def keeping(memory: int) -> dict[str, Any]:
        return {"kvOffload": {"memory": memory, "disk": {"size": "1Gi"}}}

    async def scenario() -> None:
        async with start_fleet(document(replicas=2, engine=keeping(2**20))) as fleet:
            folder = fleet.state_dir / "kv"

            def starts() -> dict[str, list[int]]:
                return {
                    one.parent.name: [int(line) for line in one.read_text().split()] for one in folder.glob("*/starts")
                }

            await fleet.until(lambda: fleet.settled(2))
            assert starts() == {"qwen-engine-0": [2**20], "qwen-engine-1": [2**20]}
            os.kill((await fleet.ask())[1]["pid"], signal.SIGKILL)
            await fleet.until(lambda: fleet.settled(2) and sorted(map(len, starts().values())) == [1, 2])
            fleet.edit(document(replicas=2, engine=keeping(2**21)))
            await fleet.until(lambda: fleet.settled(2) and list(starts().values()) == [[2**21], [2**21]])
            fleet.edit(document(replicas=1, engine=keeping(2**21)))
            await fleet.until(lambda: fleet.settled(1) and len(starts()) == 1)
        assert not folder.exists()

    asyncio.run(scenario())


def test_invalid_edit_is_told_once_and_changes_nothing(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document()) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            before = fleet.pids()
            fleet.edit(document(replicas="two", routr={}))
            await fleet.until(lambda: fleet.reporter.heard("the edit is not used"))
            await asyncio.sleep(0.3)
            told = [text for text in fleet.reporter.said if "the edit is not used" in text]
            assert len(told) == 1
            assert "spec.replicas: must be a whole number" in told[0]
            assert "Did you mean router?" in told[0]
            fleet.manifest.unlink()
            await fleet.until(lambda: fleet.reporter.heard("there is no such file"))
            assert (await fleet.ask())[0] == 200
            assert fleet.pids() == before

    asyncio.run(scenario())


def test_services_come_and_go_with_the_file(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        port = free_ports(2)
        async with start_fleet(document("a"), document("b"), port=port) as fleet:
            await fleet.until(lambda: fleet.settled(1, "a") and fleet.settled(1, "b"))
            assert fleet.url("a") == f"http://127.0.0.1:{port}"
            assert int(fleet.url("b").rsplit(":", 1)[1]) > port
            assert (await fleet.ask("a"))[1]["model"] == "a"
            assert (await fleet.ask("b"))[1]["model"] == "b"
            fleet.edit(document("c"))
            await fleet.until(lambda: fleet.settled(1, "c"))
            assert fleet.url("c") == f"http://127.0.0.1:{port}"
            assert {view.name for view in fleet.reporter.views} == {"c"}

    asyncio.run(scenario())


def test_two_routers_have_an_address_each_and_a_new_policy_keeps_it(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(router={"replicas": 2})) as fleet:
            await fleet.until(lambda: fleet.settled(1) and fleet.states().get("router-1") == "ready")
            url = fleet.url()
            assert (await fleet.ask(path="/policy"))[1] == {"text": "auto"}
            fleet.edit(document(router={"replicas": 2, "policy": "least-load"}))
            await fleet.until(lambda: fleet.reporter.heard("qwen-router-0: draining"))
            await fleet.until(lambda: fleet.settled(1))
            assert fleet.url() == url
            assert (await fleet.ask(path="/policy"))[1] == {"text": "least-load"}

    asyncio.run(scenario())


def test_engine_that_does_not_end_is_killed_with_what_it_started(
    start_fleet: Any, document: Any, quick: Timing
) -> None:
    async def scenario() -> None:
        timing = dataclasses.replace(quick, kill_grace=0.2)
        stubborn = document(engine={"args": ["--ignore-sigterm", "--with-child"]}, rollout={"drainSeconds": 0})
        async with start_fleet(stubborn, timing=timing) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            words = next(line for line in fleet.reporter.logged if "child" in line).split()
            fleet.edit(document(replicas=0, rollout={"drainSeconds": 0}))
            await fleet.until(lambda: fleet.reporter.heard("did not end by itself, killed"))
            await fleet.until(lambda: start_time(int(words[-1])) is None)
            await fleet.until(lambda: "engine-0" not in fleet.states())

    asyncio.run(scenario())


def held_back(until: Path) -> dict[str, Any]:
    """Return an engine that answers once a file exists, and logs that it was asked."""
    return {"args": ["--answer-when", str(until)]}


async def asked(fleet: Any) -> asyncio.Task[tuple[int, Any]]:
    request = asyncio.create_task(fleet.ask())
    await fleet.until(lambda: any(line.endswith("| asked") for line in fleet.reporter.logged))
    return request


def test_running_request_ends_before_its_engine_does(start_fleet: Any, document: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = held_back(tmp_path / "answer")
        async with start_fleet(document(engine=engine)) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            endpoints = fleet.state_dir / "qwen.endpoints.json"
            request = await asked(fleet)
            fleet.edit(document(replicas=0, engine=engine))
            await fleet.until(
                lambda: [one.draining for one in decode_endpoints(endpoints.read_bytes()).endpoints] == [True]
            )
            (tmp_path / "answer").touch()
            assert (await request)[0] == 200
            await fleet.until(lambda: decode_endpoints(endpoints.read_bytes()).endpoints == ())

    asyncio.run(scenario())


def test_stop_lets_requests_finish_and_leaves_no_process(start_fleet: Any, document: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_fleet(document(replicas=2, engine=held_back(tmp_path / "answer"))) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            processes = fleet.pids()
            request = await asked(fleet)
            fleet.fleet.stop()
            await fleet.until(lambda: fleet.states().get("router-0") == "draining")
            (tmp_path / "answer").touch()
            assert (await request)[0] == 200
            assert await fleet.finished == 0
            assert len(processes) == 3
            for pid in processes:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)

    asyncio.run(scenario())


def test_second_stop_ends_everything_now(start_fleet: Any, document: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_fleet(document(engine=held_back(tmp_path / "never"))) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            request = await asked(fleet)
            fleet.fleet.stop()
            await fleet.until(lambda: fleet.states().get("router-0") == "draining")
            fleet.fleet.stop()
            async with asyncio.timeout(120):
                assert await fleet.finished == 130
            with contextlib.suppress(ConnectionError):
                assert (await request)[0] != 200

    asyncio.run(scenario())


def test_engines_share_the_cores_and_the_gpus(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        wanted = document(replicas=2, resources={"gpus": 1, "cpu": "3"})
        async with start_fleet(wanted, gpus=("4", "GPU-uuid")) as fleet:
            await fleet.until(lambda: fleet.settled(2))
            answers = [(await fleet.ask())[1] for _ in range(4)]
            assert {answer["devices"] for answer in answers} == {"4", "GPU-uuid"}
            assert {answer["threads"] for answer in answers} == {3}
            fleet.edit(document(replicas=3, resources={"gpus": 1}))
            await fleet.until(lambda: fleet.reporter.heard("3 GPUs are asked for (qwen 3) and this machine has 2"))
            # No GPU is spare: an old engine goes before its successor comes.
            fleet.edit(document(replicas=2, resources={"gpus": 1}, engine={"args": ["--marker", "two"]}))
            await fleet.until(lambda: fleet.view().status.observed_generation == 2)
            await fleet.until(lambda: fleet.settled(2))
            answers = [(await fleet.ask())[1] for _ in range(4)]
            assert {answer["marker"] for answer in answers} == {"two"}

    asyncio.run(scenario())


def test_gpu_that_is_not_there_is_told_before_anything_starts(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        async with start_fleet(document(resources={"gpus": 1})) as fleet:
            with pytest.raises(ManifestError, match=r"1 GPUs are asked for .* has no GPU; set it to 0"):
                await fleet.finished
            assert list((fleet.state_dir / "logs").iterdir()) == []

    asyncio.run(scenario())


def test_port_in_use_is_told_before_anything_starts(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with start_fleet(document(), port=port) as fleet:
            with pytest.raises(PortError, match=f"port {port} on 127.0.0.1 is in use: stop what listens there"):
                await fleet.finished
        server.close()
        await server.wait_closed()
        check_port("127.0.0.1", port)

    asyncio.run(scenario())


def test_fields_that_mean_nothing_here_are_named(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        other = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}
        async with start_fleet(document(resources={"memory": "2Gi"}), other) as fleet:
            await fleet.until(lambda: fleet.reporter.heard("qwen: without effect on this machine: spec.resources.mem"))
            assert fleet.reporter.heard("v1 Secret: skipped")

    asyncio.run(scenario())

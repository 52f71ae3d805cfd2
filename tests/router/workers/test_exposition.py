"""Figures of several workers as those of one."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from pathlib import Path

import pytest
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_router.engines.endpoints import EngineView, PolledLoad, Snapshot
from pagefleet_router.telemetry.metrics import RouterMetrics
from pagefleet_router.workers.exposition import Exposition, merge
from pagefleet_router.workers.siblings import FIGURES, Siblings
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.pair_fleet import pair_facts


def metrics(num_requests: int, num_running: float, generated: float) -> RouterMetrics:
    load = PolledLoad(num_running, 1.0, 0.5)
    engine = EngineView(Endpoint("e0", "http://127.0.0.1:1", "m"), ready=True, load=load)
    made = RouterMetrics(lambda: Snapshot((engine,)), lambda: num_requests, lambda: generated)
    for _ in range(num_requests):
        made.finished("/v1/models", 200, 0.02)
    made.failures["refused"] += num_requests
    return made


def values(text: bytes) -> dict[str, float]:
    """Samples by name and labels, as Prometheus' own parser reads them."""
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counts_add_up_and_what_all_see_counts_once() -> None:
    merged = values(merge(metrics(2, 4.0, 100.0).text(), [metrics(3, 5.0, 700.0).text()]))
    assert merged["pagefleet_router_requests_total,route=/v1/models,status=200"] == 5
    assert merged["pagefleet_router_upstream_failures_total,reason=refused"] == 5
    assert merged["pagefleet_router_requests_in_flight"] == 5
    assert merged["pagefleet_router_request_seconds_bucket,le=0.025,route=/v1/models"] == 5
    assert merged["pagefleet_router_request_seconds_bucket,le=0.01,route=/v1/models"] == 0
    assert merged["pagefleet_router_request_seconds_sum,route=/v1/models"] == pytest.approx(0.1)
    assert merged["pagefleet_router_endpoints,state=ready"] == 1
    assert merged["pagefleet_router_engine_requests_running,engine=e0"] == 4
    assert merged["pagefleet_router_fleet_requests_running"] == 4
    assert merged["pagefleet_router_fleet_engines"] == 1
    assert merged["pagefleet_router_fleet_generated_tokens_total"] == 700
    assert [value for name, value in merged.items() if name.startswith("pagefleet_router_build_info")] == [1]


def test_engines_of_a_role_count_once_and_their_prompts_add_up() -> None:
    def page(tokens: int) -> bytes:
        engine = EngineView(
            Endpoint("p0", "http://127.0.0.1:1", "m"), ready=True, facts=pair_facts("0" * 32, "prefill")
        )
        engine.tally.begin(tokens, 0.0)
        return RouterMetrics(lambda: Snapshot((engine,)), lambda: 0, lambda: 0.0).text()

    merged = values(merge(page(300), [page(500)]))
    assert merged["pagefleet_router_role_engines,model=m,role=prefill"] == 1
    assert merged["pagefleet_router_role_requests,model=m,role=prefill"] == 1
    assert merged["pagefleet_router_role_prefill_tokens_in_flight,model=m,role=prefill"] == 800


def test_what_is_learned_is_the_mean_of_those_who_know() -> None:
    head = b"# TYPE pagefleet_router_decode_tokens_per_second gauge\n"
    own = head + b'pagefleet_router_decode_tokens_per_second{model="a b"} 10\n'
    other = head + b'pagefleet_router_decode_tokens_per_second{model="a b"} 30\n'
    assert b'{model="a b"} 20.0\n' in merge(own, [other, head])


def test_one_alone_is_unchanged() -> None:
    text = metrics(2, 4.0, 100.0).text()
    assert values(merge(text, [])) == values(text)


def test_families_that_only_others_have_are_there() -> None:
    made = metrics(1, 0.0, 0.0)
    made.retries["status"] += 1
    merged = values(merge(metrics(1, 0.0, 0.0).text(), [made.text()]))
    assert merged["pagefleet_router_retries_total,reason=status"] == 1
    extra = b"# HELP x_total X.\n# TYPE x_total counter\nx_total 3.0\n"
    assert merge(b"", [extra]) == extra


@pytest.mark.parametrize("garbage", [b"\xff", b"a 1\n", b"# TYPE a gauge\na x\n", b"# TYPE a gauge\nalone\n"])
def test_what_cannot_be_read_is_left_out(garbage: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several makers
        Exposition(garbage)
    own = b"# TYPE b gauge\nb 1.0\n"
    assert merge(own, [garbage, own]) == b"# TYPE b gauge\nb 2.0\n"


def sibling(folder: Path, index: int, text: bytes, timeout: float = 30.0) -> Siblings:
    paths = [folder / f"{other}.sock" for other in range(3) if other != index]
    return Siblings(folder / f"{index}.sock", paths, {FIGURES: lambda: text}, timeout)


def test_whoever_is_asked_answers_for_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        workers = [sibling(tmp_path, index, b"# TYPE b gauge\nb %d\n" % 10**index) for index in range(3)]
        for worker in workers:
            await worker.start()
        assert {await worker.figures() for worker in workers} == {b"# TYPE b gauge\nb 111.0\n"}
        assert stat.S_IMODE((tmp_path / "0.sock").stat().st_mode) == 0o600
        await workers[2].stop()
        assert await workers[0].figures() == b"# TYPE b gauge\nb 11.0\n"
        assert workers[0].num_silent == 1
        again = sibling(tmp_path, 2, b"# TYPE b gauge\nb 5\n")
        await again.start()
        assert await workers[0].figures() == b"# TYPE b gauge\nb 16.0\n"
        for worker in (*workers[:2], again):
            await worker.stop()

    asyncio.run(scenario())
    assert not list(tmp_path.iterdir())


def test_a_worker_that_hangs_or_talks_without_end_is_left_out_and_counted(tmp_path: Path) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"# " + b"x" * 2**20)
                await writer.drain()
        writer.close()

    async def scenario() -> None:
        hanging = await asyncio.start_unix_server(hang, tmp_path / "1.sock")
        worker = sibling(tmp_path, 0, b"# TYPE b gauge\nb 1.0\n", timeout=0.1)
        assert await worker.figures() == b"# TYPE b gauge\nb 1.0\n"
        assert worker.num_silent == 2, "one that hangs, one that is not there"
        hanging.close()
        (tmp_path / "1.sock").unlink(missing_ok=True)
        babbling = await asyncio.start_unix_server(babble, tmp_path / "1.sock")
        patient = sibling(tmp_path, 0, b"# TYPE b gauge\nb 1.0\n")
        assert await patient.figures() == b"# TYPE b gauge\nb 1.0\n"
        assert patient.num_silent == 2
        babbling.close()
        await asyncio.sleep(0)

    asyncio.run(scenario())

"""Settings, sources of endpoints, gauges, keys, logs, errors: what is read from outside."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path

import pytest
from pagefleet_protocol.endpoints import Endpoint, encode_endpoints
from pagefleet_router.app import Router
from pagefleet_router.cli import main, read_configuration
from pagefleet_router.config import RouterConfig, check_engine_url
from pagefleet_router.discovery.source import FileSource, StaticSource
from pagefleet_router.engines.endpoints import EndpointTable
from pagefleet_router.errors import ConfigError, Failure, refusal_of
from pagefleet_router.exchange.answer_writer import EventHold
from pagefleet_router.signals.figures import EngineFigures, GeneratedTokens, parse_figures
from pagefleet_router.telemetry.access_log import AccessLog
from pagefleet_router.telemetry.access_record import AccessRecord
from pagefleet_router.telemetry.histogram import SecondsHistogram
from pagefleet_router.telemetry.metrics import RouterMetrics
from pagefleet_router.wire.access import ROUTES, ApiKeys, Kind, route_of


def test_flags_environment_and_defaults() -> None:
    config = read_configuration(
        ["--engine", "http://a:1", "--engine", "http://b:2", "--model-name", "m", "--port", "0", "--access-log"],
        {"PAGEFLEET_ROUTER_POLICY": "least-load", "PAGEFLEET_ROUTER_PORT": "9", "PAGEFLEET_ROUTER_GAP_TIMEOUT": "7.5"},
    )
    assert config == RouterConfig(
        engine=("http://a:1", "http://b:2"),
        model_name="m",
        port=0,
        access_log=True,
        policy="least-load",
        gap_timeout=7.5,
    )
    aliased = read_configuration(
        ["--kubernetes-service", "qwen-engine", "--model-name", "m", "--model-alias", "a", "--model-alias", "b/c:d"], {}
    )
    assert aliased == RouterConfig(kubernetes_service="qwen-engine", model_name="m", model_alias=("a", "b/c:d"))
    kubernetes = {"PAGEFLEET_ROUTER_PORT": "tcp://10.0.0.1:80", "PAGEFLEET_ROUTER_ENDPOINTS_FILE": "f"}
    assert read_configuration([], kubernetes) == RouterConfig(endpoints_file=Path("f"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "give one of --endpoints-file FILE, --engine URL"),
        (["--endpoints-file", "f", "--engine", "http://a:1"], "give one of"),
        (["--engine", "http://a:1"], "--engine needs --model-name"),
        (["--endpoints-file", "f", "--kubernetes-service", "s", "--model-name", "m"], "give one of"),
        (["--kubernetes-service", "s"], "--kubernetes-service needs --model-name"),
        (["--kubernetes-service", "s/../x", "--model-name", "m"], "give a Kubernetes name"),
        (["--kubernetes-service", "s", "--kubernetes-namespace", "N", "--model-name", "m"], "give a Kubernetes name"),
        (["--endpoints-file", "f", "--kubernetes-namespace", "n"], "--kubernetes-service NAME is: give that too"),
        (["--endpoints-file", "f", "--model-alias", "a"], "--model-alias needs --model-name"),
        (["--endpoints-file", "f", "--model-name", "m", "--model-alias", ""], "--model-alias is '': give text"),
        (["--engine", "a:1", "--model-name", "m"], "write http://HOST:PORT"),
        (["--endpoints-file", "f", "--port", "x"], "--port is 'x': give a whole number"),
        (["--endpoints-file", "f", "--port", "70000"], "give 0 to 65535"),
        (["--endpoints-file", "f", "--policy", "best"], "one of auto, prefix, least-load"),
        (["--endpoints-file", "f", "--pd-fallback", "retry"], "--pd-fallback is 'retry': give one of recompute, fail"),
        (["--endpoints-file", "f", "--pd-threshold", "-1"], "--pd-threshold is -1: give at least 0"),
        (["--endpoints-file", "f", "--gap-timeout", "0"], "give more than 0 seconds"),
        (["--endpoints-file", "f", "--drain-timeout", "nan"], "give seconds, or such as 500ms or 5m, at least 0"),
        (["--endpoints-file", "f", "--max-concurrent", "0"], "give at least 1"),
        (["--endpoints-file", "f", "--no-such-flag"], "unknown argument '--no-such-flag' (see pagefleet route --help)"),
        (["--endpoints-file", "f", "--kv-events=perhaps"], "--kv-events is 'perhaps': give true or false"),
    ],
)
def test_mistakes_are_named(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("pagefleet route: error: ")
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "url", ["http://h:1/", "https://h:1", "http://h", "http://u@h:1", "http://h:99999", "h:1", "http://h:1?x"]
)
def test_odd_engine_urls(url: str) -> None:
    with pytest.raises(ConfigError):
        check_engine_url(url)
    assert check_engine_url("http://[::1]:80") == ("::1", 80)


def test_the_file_is_read_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "e.json"
    source = FileSource(path)
    assert [source.read_if_changed() for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1, "a missing file is mentioned once"
    one = (Endpoint("a", "http://a:1", "m"),)
    path.write_bytes(encode_endpoints(one))
    assert source.read_if_changed() == one
    assert source.read_if_changed() is None
    for bad in (
        b"{",
        b'{"endpoints": [{"id": "a"}]}',
        encode_endpoints((Endpoint("a", "ftp://a:1", "m"),)),
        encode_endpoints((Endpoint("a\r\nx: y", "http://a:1", "m"),)),
        encode_endpoints(one + one),
    ):
        caplog.clear()
        path.write_bytes(bad)
        assert [source.read_if_changed(), source.read_if_changed()] == [None, None]
        assert len(caplog.records) == 1
    path.write_bytes(encode_endpoints(()))
    assert source.read_if_changed() == ()


def test_a_static_list_is_reported_once() -> None:
    table = EndpointTable()
    assert table.unlisted
    asyncio.run(StaticSource(["http://a:1", "http://a:1", "http://b:2"], "m").run(table))
    assert [one.id for one in table.snapshot.engines] == ["a:1", "b:2"]
    assert table.unlisted is None


TEXT = b"""# TYPE pagefleet_engine_requests_running gauge
pagefleet_engine_requests_running{model_name="a b"} 3
pagefleet_engine_requests_running{model_name="c"} 2.0 1700000000
pagefleet_engine_requests_waiting 1e1
pagefleet_engine_requests_waiting_total 99
pagefleet_engine_kv_usage_ratio{model_name="a"} 0.25
pagefleet_engine_kv_usage_ratio{model_name="b"} 0.75
"""


def test_the_gauges_are_found() -> None:
    assert parse_figures(TEXT) == EngineFigures(5.0, 10.0, 0.75, None)


@pytest.mark.parametrize(
    "bad", [b"", TEXT.replace(b"1e1", b"x"), TEXT.replace(b"1e1", b"NaN"), TEXT.replace(b"1e1", b"-1"), b"\xff\x00"]
)
def test_text_without_good_gauges_is_nothing(bad: bytes) -> None:
    assert parse_figures(bad) is None


def test_keys_are_read_again(tmp_path: Path) -> None:
    file, now = tmp_path / "keys", 0.0
    file.write_text("# old\none\n\ntwo # not a comment\n")
    keys = ApiKeys(file, lambda: now)
    assert keys.tenant([b"Bearer one"], [])
    assert keys.tenant([b"bearer  two # not a comment"], [])
    assert keys.tenant([b"Bearer one"], []) != keys.tenant([b"Bearer two # not a comment"], [])
    assert keys.tenant([], [b"one"]) == keys.tenant([b"Bearer one"], [b"one"]) == keys.tenant([b"Bearer one"], [])
    for bearer, bare in (([], [b"nobody"]), ([b"Bearer one"], [b"other"]), ([], [b"one", b"one"]), ([], [])):
        assert keys.tenant(bearer, bare) is None
    assert [keys.tenant([bad], []) for bad in (b"", b"one", b"Basic one", b"Bearer on", b"Bearer # old")] == [None] * 5
    file.write_text("three\n")
    now = 2.0
    assert keys.tenant([b"Bearer one"], []) is None
    assert keys.tenant([b"Bearer three"], [])


@pytest.mark.parametrize("content", [None, "", "# only a comment\n"])
def test_keys_must_be_there_at_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        ApiKeys(file)


def test_every_failure_has_an_answer() -> None:
    for failure in Failure:
        refusal = refusal_of(failure)
        assert refusal.status in (502, 503, 504)
        assert (refusal.status == 503) == ("retry-after" in refusal.headers)
        assert json.loads(refusal.body())["error"]["code"] == refusal.code


def test_routes_are_exact() -> None:
    assert route_of("/v1/models/a/b") is not None
    for path in ("", "/v1", "/v1/models/", "/livez/", "/LIVEZ", "/v1/chat/completions?x", "/v1/embeddings"):
        assert route_of(path) is None
    assert {route.name for route in ROUTES.values() if route.public} == {
        "/livez",
        "/readyz",
        "/health",
        "/metrics",
        "/",
        "/docs",
        "/openapi.json",
    }
    assert all(route.kind is not Kind.PROXY or not route.public for route in ROUTES.values())


@pytest.mark.parametrize("mark", [b"\n\n", b"\r\n\r\n"])
def test_events_pass_whole_and_unchanged(mark: bytes) -> None:
    text = b"".join(b"data: %d" % n + mark for n in range(30)) + b"data: cut"
    for size in (1, 3, 7, 11, 1000):
        hold = EventHold()
        passed = [hold.push(text[i : i + size]) for i in range(0, len(text), size)]
        assert all(part == b"" or part.endswith(mark) for part in passed)
        assert b"".join(passed) == text[: -len(b"data: cut")]
        assert hold.rest() == b"data: cut"


def test_an_endless_event_is_not_held_for_ever() -> None:
    hold = EventHold()
    passed = sum(len(hold.push(b"x" * 10_000)) for _ in range(100))
    assert passed >= 700_000


def test_the_access_log_writes_whole_lines_in_pieces_that_pipes_keep_together() -> None:
    pieces: list[str] = []

    class Sink(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    log = AccessLog(Sink())
    for number in range(200):
        log.write(AccessRecord(f"r{number}", "/v1/models", 200, 0.1, bytes_out=number))
    log.flush()
    log.flush()
    assert all(len(piece.encode()) <= 4096 and piece.endswith("\n") for piece in pieces)
    lines = [json.loads(line) for piece in pieces for line in piece.splitlines()]
    assert [line["bytes_out"] for line in lines] == list(range(200))
    assert 4 < len(pieces) < 20


def test_the_access_log_writes_lines_and_survives_its_sink() -> None:
    out = io.StringIO()
    log = AccessLog(out)
    record = AccessRecord("id\n1", "/x", 200, 1.5, "e", bytes_out=10)
    log.write(record)
    log.flush()
    assert out.getvalue().count("\n") == 1
    assert json.loads(out.getvalue())["request_id"] == "id\n1"

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    log = AccessLog(Gone())
    log.write(record)
    log.write(record)
    log.flush()


def test_histogram_buckets_are_cumulative() -> None:
    histogram = SecondsHistogram()
    for seconds in (0.0005, 0.001, 0.3, 1000.0):
        histogram.observe(seconds)
    buckets = dict(histogram.buckets())
    assert (buckets["0.001"], buckets["0.5"], buckets["+Inf"]) == (2, 3, 4)


def test_metric_names_follow_the_house() -> None:
    from pagefleet_router.engines.endpoints import Snapshot

    metrics = RouterMetrics(Snapshot, lambda: 3, lambda: 0.0)
    metrics.finished("/x", 200, 0.1)
    text = metrics.text().decode()
    names = {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all(name.startswith("pagefleet_router_") for name in names)
    assert "pagefleet_router_requests_in_flight 3.0" in text


def test_outside_a_pod_kubernetes_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["--kubernetes-service", "s", "--model-name", "m"]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("pagefleet route: error: --kubernetes-service works in a pod")


@pytest.mark.parametrize(
    ("counts", "total"),
    [
        ([("a", 5)], 0),
        ([("a", 5), ("a", 9), ("a", 9)], 4),
        ([("a", 5), ("a", 3)], 3),
        ([("a", 5), ("b", 7), ("a", 6), ("b", 9)], 3),
        ([("a", 5), ("a", 6), ("-a", 0), ("a", 100), ("a", 101)], 2),
    ],
)
def test_generated_tokens_only_grow(counts: list[tuple[str, int]], total: int) -> None:
    generated, seen = GeneratedTokens(), [0.0]
    for engine, count in counts:
        if engine.startswith("-"):
            generated.forget([engine[1:]])
        else:
            generated.observe(engine, count)
        seen.append(generated.total)
    assert seen == sorted(seen)
    assert generated.total == total


def test_tokens_are_counted_where_an_engine_counts_them() -> None:
    text = (
        TEXT
        + b'pagefleet_engine_generation_tokens_total{model_name="a"} 1e3\npagefleet_engine_generation_tokens_total 5\n'
    )
    assert parse_figures(text) == EngineFigures(5.0, 10.0, 0.75, 1005.0)
    assert parse_figures(text.replace(b"1e3", b"-1e3")) is None


@pytest.mark.parametrize(("secret", "problem"), [(None, "cannot be read"), (b"short", "holds 5 bytes")])
def test_a_fleet_key_that_cannot_be_used_is_said_at_the_start(
    tmp_path: Path, secret: bytes | None, problem: str
) -> None:
    path = tmp_path / "key"
    if secret is not None:
        path.write_bytes(secret)
    config = RouterConfig(engine=("http://a:1",), model_name="m", fleet_key_file=path)
    with pytest.raises(ConfigError, match=f"^fleet_key_file {re.escape(str(path))} {problem}"):
        Router(config)

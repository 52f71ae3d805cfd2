"""What a person sees: plain lines without control sequences, or a table; and a terminal that is stopped."""

from __future__ import annotations

import io
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pagefleet_operator.local.bars import short_time
from pagefleet_operator.local.figures import EngineFigures, read_figures
from pagefleet_operator.local.reporter import LiveReporter, OutputThread, PlainReporter
from pagefleet_operator.local.table import DownloadView, ProcessView, ServiceView, status_table
from pagefleet_operator.plan.observed import LiveSample, Observed, ScalingSeen
from pagefleet_operator.plan.role_health import see_instances
from pagefleet_operator.plan.rollout import Instance, State
from pagefleet_operator.plan.status import Situation, service_status
from pagefleet_operator.plan.verdict import Verdict
from pagefleet_protocol.engine_history import EngineHistory
from pagefleet_protocol.inference_status import RoleScalingStatus, ScalingStatus
from pagefleet_protocol.load_progress import LoadProgress
from pagefleet_protocol.model_facts import Progress
from rich.console import Console

from tests.fakes.local_plans import local_plan

NOW = 1000.0
GIB = 2**30


def view(service: Any, *engines: Instance, scaling: ScalingSeen | None = None) -> ServiceView:
    plan, now = local_plan(service), datetime(2026, 1, 1, tzinfo=UTC)
    status = service_status(
        Situation(
            service=service,
            previous=None,
            observed=Observed(now=now, scaling=scaling, live=LiveSample(now, 2, 1, 0.5, 30.0)),
            url="http://127.0.0.1:8000",
            model=Verdict(True, "NotNeeded", "the model is on this machine"),
            engines=see_instances(plan.engine, engines),
            routers=see_instances(plan.router, (Instance(0, plan.router.revision, State.READY),)),
        )
    )
    return ServiceView(service.name, status, tuple((f"qwen-engine-{one.number}", one) for one in engines))


def drawn(services: list[ServiceView], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(status_table(services, NOW))
    return console.export_text()


def test_plain_lines_carry_the_name_and_nothing_else(build: Any) -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.say("one\ntwo")
    reporter.log("qwen-engine-0", "loading")
    reporter.show([view(build(), Instance(0, "x", State.READY))])
    reporter.close()
    assert stream.getvalue() == "one\ntwo\nqwen-engine-0 | loading\n"


def test_the_table_says_state_restarts_and_the_last_words(build: Any) -> None:
    failed = Instance(1, "x", State.FAILED, restarts=3, detail="model folder missing: /m [bold]")
    text = drawn([view(build(replicas=2), Instance(0, "x", State.READY), failed)])
    assert "qwen-engine-0 ready" in text
    assert "qwen-engine-1 failed" in text
    assert "qwen-engine-1: model folder missing: /m [bold] (started again 3 times)" in text
    assert "qwen 1/2: requests are answered at http://127.0.0.1:8000; 1 of 2 engines ready" in text
    assert "qwen: 1 of 2 engines ready; EngineReady says why" in text
    assert "qwen: 2 requests run, 1 wait, 30 tokens/s, KV cache 50% full" in text


@pytest.mark.parametrize(("mode", "verb"), [("Internal", "wants"), ("Advisory", "would want")])
def test_the_table_says_what_the_autoscaler_wants(build: Any, mode: str, verb: str) -> None:
    service = build(autoscaling={"max": 3, "mode": mode})
    text = drawn([view(service, Instance(0, "x", State.READY), scaling=ScalingSeen(3, "Demand", "9 requests wait"))])
    assert f"qwen: {verb} 3 engines (Demand): 9 requests wait" in text


def test_the_table_says_what_each_parts_autoscaler_wants(build: Any) -> None:
    shown = view(build(), Instance(0, "x", State.READY))
    assert shown.status is not None
    scaling = ScalingStatus(
        mode="Internal", current=1, desired=2, reason="Demand", signal="9 wait", at="2026-01-01T00:00:00Z"
    )
    parts = (RoleScalingStatus(name="prefill", scaling=scaling), RoleScalingStatus(name="decode", scaling=scaling))
    text = drawn([replace(shown, status=shown.status.model_copy(update={"role_scaling": parts}))])
    assert "qwen: wants 2 prefill engines (Demand): 9 wait" in text
    assert "qwen: wants 2 decode engines (Demand): 9 wait" in text


@pytest.mark.parametrize("width", [80, 200])
def test_figures_and_bars_stand_right_in_any_terminal(build: Any, width: int) -> None:
    ready, loading = Instance(0, "x", State.READY), Instance(1, "x", State.STARTING, detail="a line of its log")
    processes = {
        "qwen-engine-0": ProcessView(1234567, NOW - 185, None, EngineFigures(12, 3, 0.453, 1234.5, 0.9)),
        "qwen-engine-1": ProcessView(42, NOW - 7, LoadProgress("weights", GIB, 4 * GIB, 5.0)),
    }
    download = DownloadView(Progress("downloading", GIB, 2 * GIB, 1, 3), 120 * 2**20, NOW - 60)
    shown = replace(view(build(replicas=2), ready, loading), processes=processes, download=download)
    text = drawn([shown], width)
    assert max(map(len, text.splitlines())) <= width
    lines = [line.rstrip() for line in text.splitlines()]
    assert "INSTANCE      STATE        PID    UP RUN WAIT TOK/S  KV HITS" in lines
    assert "qwen-engine-0 ready    1234567 3m05s  12    3  1234 45%  90%" in lines
    assert "qwen-engine-1 starting      42    7s" in lines
    assert any(
        line.endswith("qwen-engine-1: reads weights: 25%, 1.0 of 4.0 GiB, 7s") and line[0] == "━" for line in lines
    )
    assert any(line.endswith("qwen: downloads 50%, 1.0 of 2.0 GiB, 120.0 MiB/s, 1m00s") for line in lines)


def test_a_long_name_and_a_long_reason_stay_in_their_lines(build: Any) -> None:
    name = "a-service-with-quite-a-long-name-engine-0"
    one = Instance(0, "x", State.FAILED, detail="reason " * 40)
    view_ = ServiceView(name, None, ((name, one),), {name: ProcessView(1234567, NOW - 86400 * 12)})
    text = drawn([view_], 80)
    assert len(text.splitlines()) == 4  # a blank one, headings, the row, the reason
    assert max(map(len, text.splitlines())) <= 80
    assert "12d00h" in text


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.5, "0s"), (59, "59s"), (61, "1m01s"), (7260, "2h01m"), (90000, "1d01h"), (-1, "0s")]
)
def test_times_in_a_column(seconds: float, words: str) -> None:
    assert short_time(seconds) == words


def test_what_an_engine_tells_of_itself() -> None:
    history, page = (
        EngineHistory(),
        """pagefleet_engine_requests_running{{model_name="m"}} 2.0
pagefleet_engine_requests_waiting{{model_name="m"}} 1.0
pagefleet_engine_kv_usage_ratio{{model_name="m"}} 0.25
pagefleet_engine_generation_tokens_total{{model_name="m"}} {tokens}
""",
    )
    first = read_figures(page.format(tokens=100).encode(), history, 0.0)
    assert first == EngineFigures(2, 1, 0.25, None, None)
    assert read_figures(page.format(tokens=400).encode(), history, 10.0).tokens_s == 30.0
    assert read_figures(b"nothing", EngineHistory(), 0.0) == EngineFigures()


class Counting(io.StringIO):
    """A terminal that counts what is written."""

    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        return super().write(text)


def test_a_table_that_changes_all_the_time_is_drawn_twice_a_second(build: Any) -> None:
    stream, now = Counting(), [NOW]
    reporter = LiveReporter(Console(file=stream, force_terminal=True, width=80), lambda: now[0])
    began = time.monotonic()
    while time.monotonic() - began < 1.3 or "INSTANCE" not in stream.getvalue():
        now[0] += 1
        process = {"qwen-engine-0": ProcessView(1, NOW)}
        reporter.show([replace(view(build(), Instance(0, "x", State.READY)), processes=process)])
        time.sleep(0.01)
    num_drawn, took_s = stream.getvalue().count("INSTANCE"), time.monotonic() - began
    reporter.close()
    assert 1 <= num_drawn <= 2 * took_s + 2


def test_a_table_that_stays_the_same_is_not_drawn_again(build: Any) -> None:
    stream = Counting()
    reporter = LiveReporter(Console(file=stream, force_terminal=True, width=80), lambda: NOW)
    reporter.show([view(build(), Instance(0, "x", State.READY))])
    while "INSTANCE" not in stream.getvalue():
        time.sleep(0.01)
    time.sleep(1.3)
    num_drawn = stream.getvalue().count("INSTANCE")
    reporter.close()
    assert num_drawn == 1


def test_lines_scroll_above_the_table_unbroken_and_unstyled(build: Any) -> None:
    stream = io.StringIO()
    reporter = LiveReporter(Console(file=stream, force_terminal=True, width=40, color_system=None))
    reporter.show([view(build(), Instance(0, "x", State.READY))])
    command = "curl http://127.0.0.1:8000/v1/chat/completions -d '[bold]not markup[/bold]'"
    reporter.say(command)
    reporter.log("qwen-engine-0", "loading")
    reporter.close()
    assert command in stream.getvalue()
    assert "qwen-engine-0 | loading" in stream.getvalue()
    assert "INSTANCE" in stream.getvalue()


def test_output_that_nobody_reads_blocks_nobody() -> None:
    output, gate = OutputThread(), threading.Event()

    def stuck() -> None:
        gate.wait(300)

    output.put(stuck)
    for _ in range(20_000):
        output.put(lambda: None)
    assert output.num_dropped > 0
    assert not gate.is_set(), "nobody waited for the reader"
    gate.set()
    output.close()


def test_a_reader_that_left_is_not_written_to_again() -> None:
    written: list[int] = []

    def broken() -> None:
        written.append(1)
        raise BrokenPipeError

    output = OutputThread()
    output.put(broken)
    output.put(lambda: written.append(2))
    output.close()
    assert written == [1]

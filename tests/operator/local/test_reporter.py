"""What a person sees: plain lines without control sequences, or a table; and a terminal that is stopped."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pagefleet_operator.local.reporter import LiveReporter, OutputThread, PlainReporter, ServiceView, status_table
from pagefleet_operator.plan.observed import LiveSample, Observed, ScalingSeen
from pagefleet_operator.plan.role_health import see_instances
from pagefleet_operator.plan.rollout import Instance, State
from pagefleet_operator.plan.status import Situation, service_status
from pagefleet_operator.plan.verdict import Verdict
from pagefleet_protocol.inference_status import RoleScalingStatus, ScalingStatus
from rich.console import Console

from tests.fakes.local_plans import local_plan


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
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(status_table([view(build(replicas=2), Instance(0, "x", State.READY), failed)]))
    text = console.export_text()
    assert "qwen-engine-0  ready" in text
    assert "qwen-engine-1  failed" in text
    assert "3         model folder missing: /m [bold]" in text
    assert "qwen 1/2: requests are answered at http://127.0.0.1:8000; 1 of 2 engines ready" in text
    assert "qwen: 1 of 2 engines ready; EngineReady says why" in text
    assert "qwen: 2 requests run, 1 wait, 30 tokens/s, KV cache 50% full" in text


@pytest.mark.parametrize(("mode", "verb"), [("Internal", "wants"), ("Advisory", "would want")])
def test_the_table_says_what_the_autoscaler_wants(build: Any, mode: str, verb: str) -> None:
    service = build(autoscaling={"max": 3, "mode": mode})
    console = Console(file=io.StringIO(), width=100, record=True)
    scaling = ScalingSeen(3, "Demand", "9 requests wait")
    console.print(status_table([view(service, Instance(0, "x", State.READY), scaling=scaling)]))
    assert f"qwen: {verb} 3 engines (Demand): 9 requests wait" in console.export_text()


def test_the_table_says_what_each_parts_autoscaler_wants(build: Any) -> None:
    shown = view(build(), Instance(0, "x", State.READY))
    assert shown.status is not None
    scaling = ScalingStatus(
        mode="Internal", current=1, desired=2, reason="Demand", signal="9 wait", at="2026-01-01T00:00:00Z"
    )
    parts = (RoleScalingStatus(name="prefill", scaling=scaling), RoleScalingStatus(name="decode", scaling=scaling))
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(status_table([replace(shown, status=shown.status.model_copy(update={"role_scaling": parts}))]))
    text = console.export_text()
    assert "qwen: wants 2 prefill engines (Demand): 9 wait" in text
    assert "qwen: wants 2 decode engines (Demand): 9 wait" in text


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

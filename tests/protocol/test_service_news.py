"""What a router reads of its InferenceService, which the operator's own types have written."""

from __future__ import annotations

import pytest
from pagefleet_protocol.inference_status import Condition, InferenceServiceStatus, RoleScalingStatus, ScalingStatus
from pagefleet_protocol.service_news import MAX_DECISIONS, NO_NEWS, ServiceNewsError, read_news, with_history


def written(status: InferenceServiceStatus | None) -> bytes:
    told = "" if status is None else f',"status":{status.model_dump_json(by_alias=True)}'
    return f'{{"kind":"InferenceService","metadata":{{"name":"chat","namespace":"prod"}},"spec":{{}}{told}}}'.encode()


def scaled(desired: int, reason: str, signal: str = "") -> ScalingStatus:
    at = f"2026-01-01T00:00:{desired:02}Z"
    return ScalingStatus(mode="Internal", current=1, desired=desired, reason=reason, signal=signal, at=at)


def status(**fields: object) -> InferenceServiceStatus:
    return InferenceServiceStatus(observed_generation=1, model_name="m", **fields)  # type: ignore[arg-type]


def test_conditions_and_decisions_are_read() -> None:
    condition = Condition(
        type="EngineReady", status="False", reason="CrashLoop", message="it ends: see its log",
        last_transition_time="2026-01-01T00:00:00Z", observed_generation=1,
    )  # fmt: skip
    parts = (
        RoleScalingStatus(name="prefill", scaling=scaled(0, "Demand")),
        RoleScalingStatus(name="decode", scaling=scaled(1, "Demand")),
    )
    news = read_news(written(status(conditions=(condition,), scaling=scaled(3, "Panic", "8 wait"), role_scaling=parts)))
    assert (news.name, news.namespace) == ("chat", "prod")
    assert [(one.type, one.status, one.reason, one.message) for one in news.statements] == [
        ("EngineReady", "False", "CrashLoop", "it ends: see its log")
    ]
    assert [(one.role, one.decisions[0].wanted) for one in news.scaling] == [
        ("engine", 3),
        ("prefill", 0),
        ("decode", 1),
    ]
    assert news.scaling[0].decisions[0].signal == "8 wait"


def test_a_new_service_says_its_name_alone() -> None:
    news = read_news(written(None))
    assert (news.name, news.statements, news.scaling) == ("chat", (), ())


def test_decisions_are_remembered_and_the_same_one_is_renewed() -> None:
    news = NO_NEWS
    for desired, reason, signal in (
        (1, "Steady", "a"),
        (1, "Steady", "b"),
        (3, "Demand", "c"),
        (3, "CoolingDown", "d"),
    ):
        news = with_history(news, read_news(written(status(scaling=scaled(desired, reason, signal)))))
    (state,) = news.scaling
    assert [(one.wanted, one.reason, one.signal) for one in state.decisions] == [
        (3, "CoolingDown", "d"), (3, "Demand", "c"), (1, "Steady", "b"),
    ]  # fmt: skip
    for number in range(50):
        news = with_history(news, read_news(written(status(scaling=scaled(number, "Demand")))))
    assert len(news.scaling[0].decisions) == MAX_DECISIONS


@pytest.mark.parametrize("garbage", [b"", b"[]", b"\xff", b'{"metadata":{}}', b'{"metadata":{"name":"a"},"status":1}'])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(ServiceNewsError):
        read_news(garbage)

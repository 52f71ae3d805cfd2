"""What several workers know, as one."""

from __future__ import annotations

from pagefleet_protocol.console_state import AdmissionState, FaultState, PairState, RequestState
from pagefleet_router.console.engines import flow_rates
from pagefleet_router.console.parts import Part, decode_parts, encode_part, merge_parts


def fault(at: str, what: str = "a", count: int = 1) -> FaultState:
    return FaultState(at=at, what=what, remedy="r", engine="e", count=count)


def request(at: str) -> RequestState:
    return RequestState(
        id=at, at=at, tenant="", route="/v1/completions", model="m", status=200, error=None, seconds=1.0,
        queue_seconds=0.0, ttft_seconds=None, prompt_tokens=1, cached_tokens=0, generated_tokens=None, engine="e",
        prefill_engine=None, attempts=1, tried=(), trace_id=None,
    )  # fmt: skip


def part(tenant: str, running: int, at: str) -> Part:
    return Part(
        admission=(AdmissionState(tenant=tenant, running=running, waiting=1, refused=2),),
        pairs=(PairState(source="p", target="d", transfers=running, transfers_s=0.5, bytes_s=10.0),),
        faults=(fault(at, count=running),),
        requests=(request(at),),
    )


def test_counts_are_added_up_and_lists_are_put_in_order() -> None:
    parts = [
        part("b", 1, "2026-01-01T00:00:01Z"),
        part("a", 2, "2026-01-01T00:00:03Z"),
        part("b", 4, "2026-01-01T00:00:02Z"),
    ]
    whole = merge_parts(list(decode_parts(map(encode_part, parts))))
    assert [(line.tenant, line.running, line.waiting, line.refused) for line in whole.admission] == [
        ("a", 2, 1, 2),
        ("b", 5, 2, 4),
    ]
    assert whole.pairs == (PairState(source="p", target="d", transfers=7, transfers_s=1.5, bytes_s=30.0),)
    assert whole.faults == (fault("2026-01-01T00:00:03Z", count=7),)
    assert [one.id[-3:-1] for one in whole.requests] == ["03", "02", "01"]


def test_a_part_that_cannot_be_read_is_left_out() -> None:
    good = part("a", 1, "2026-01-01T00:00:01Z")
    assert list(decode_parts([b"", b"\xff", encode_part(good), b"{}"])) == [good]


def test_flows_are_measured_between_two_looks() -> None:
    pair, other = ("p", "d"), ("p", "e")
    rates = flow_rates({pair: (30, 3000.0), other: (5, 50.0)}, {pair: (10, 1000.0), other: (9, 90.0)}, 10.0)
    assert rates[pair] == (2.0, 200.0)
    assert rates[other] == (0.5, 5.0), "an engine that came back began at nothing"
    assert flow_rates({pair: (1, 1.0)}, {}, 0.0)[pair][0] > 0

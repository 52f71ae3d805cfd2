"""Limits per minute and the learned rate, on numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.tenants import Tenant
from pagefleet_router.admission.model_gate import WINDOW_S, ServiceRate
from pagefleet_router.admission.rate_limits import RateLimits, TokenBucket
from pagefleet_router.errors import Refusal


@given(
    per_minute=st.integers(1, 10_000),
    spent=st.lists(st.integers(0, 5000), max_size=20),
    amount=st.integers(1, 20_000),
)
def test_a_bucket_says_exactly_when_an_amount_fits(per_minute: int, spent: list[int], amount: int) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    for one in spent:
        bucket.spend(one, 0.0)
    wait = bucket.wait(amount, 0.0)
    if wait > 0.0:
        assert bucket.wait(amount, wait * 0.99) > 0.0
    assert bucket.wait(amount, wait + 1e-6 * (1 + wait)) < 1e-6 * (1 + wait)


def test_a_bucket_never_holds_more_than_a_minute() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.spend(-100, 0.0)
    assert bucket.remaining(1000.0) == 60
    bucket.spend(90, 1000.0)
    assert bucket.remaining(1000.0) == 0
    assert not bucket.is_full(1089.0)
    assert bucket.is_full(1090.0)


def test_the_buckets_of_tenants_that_stay_away_are_dropped() -> None:
    limits = RateLimits(1.0)
    for n in range(100):
        limits.take(Tenant(f"t{n}", rpm=100, tpm=100), 1, 0.0)
    limits.forget_idle(61.0)
    assert not limits._requests
    assert not limits._tokens


def test_a_limit_smaller_than_the_number_of_processes_lets_one_in() -> None:
    limits = RateLimits(0.25)
    tenant = Tenant("t", rpm=1)
    limits.take(tenant, 1, 0.0)
    with pytest.raises(Refusal) as refused:
        limits.take(tenant, 1, 0.0)
    assert refused.value.headers["retry-after"] == "60"


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    rate = ServiceRate()
    assert rate.per_second(5.0) == 0.0
    for second in range(10):
        rate.add(100, 100.0 + second)
    assert rate.per_second(110.0) == pytest.approx(100.0)
    assert rate.per_second(100.0 + WINDOW_S) == pytest.approx(900 / WINDOW_S)
    assert rate.per_second(1000.0) == 0.0
    rate.add(300, 1000.5)
    assert rate.per_second(1001.0) == pytest.approx(10.0)

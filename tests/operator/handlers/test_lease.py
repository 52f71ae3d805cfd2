"""Who leads: never two, and somebody soon after the one before is gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_operator.apply.kinds import LEASE
from pagefleet_operator.errors import Conflict, NotLeading, Unavailable
from pagefleet_operator.handlers.lease import AlwaysLeads, Leadership, LeaseTimes

from tests.example_counts import examples
from tests.fakes.kube_store_cluster import KINDS, StoreCluster

TIMES = LeaseTimes()
PLACE = ("default", "pagefleet-operator")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Lab:
    """One cluster with a Lease, one clock, and candidates."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.cluster = StoreCluster()
        self.cluster.add_namespace("default")

    def candidate(self, name: str) -> Leadership:
        return Leadership(self.cluster, PLACE, name, TIMES, self.clock)

    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.cluster.store.get(KINDS["Lease"], *PLACE)["spec"]
        return spec


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_the_first_makes_the_lease_and_leads(lab: Lab) -> None:
    one = lab.candidate("one")
    with pytest.raises(NotLeading):
        one.check()
    assert run(one.attempt())
    assert one.leads
    assert one.check() == TIMES.lease_s
    assert lab.spec()["holderIdentity"] == "one"
    assert lab.spec()["leaseDurationSeconds"] == 12
    assert lab.spec()["leaseTransitions"] == 0


def test_the_second_waits_until_the_lease_has_not_changed_for_its_length(lab: Lab) -> None:
    one, two = lab.candidate("one"), lab.candidate("two")
    run(one.attempt())
    lab.clock.now += 5
    assert not run(two.attempt())  # seen for the first time now
    lab.clock.now += TIMES.lease_s - 0.1
    assert not run(two.attempt())
    lab.clock.now += 0.2
    assert not one.leads
    assert run(two.attempt())
    assert lab.spec()["leaseTransitions"] == 1


def test_a_renewed_lease_is_not_taken(lab: Lab) -> None:
    one, two = lab.candidate("one"), lab.candidate("two")
    run(one.attempt())
    for _ in range(20):
        lab.clock.now += 4
        assert run(one.attempt())
        assert not run(two.attempt())
    assert lab.spec()["leaseTransitions"] == 0


def test_leading_ends_before_another_may_begin(lab: Lab) -> None:
    one = lab.candidate("one")
    run(one.attempt())
    lab.clock.now += TIMES.renew_deadline_s - 0.1
    assert one.check() == pytest.approx(TIMES.lease_s - TIMES.renew_deadline_s + 0.1)
    lab.clock.now += 0.1
    with pytest.raises(NotLeading):
        one.check()


def test_time_counts_from_the_start_of_the_request_that_renewed(lab: Lab) -> None:
    one = lab.candidate("one")

    def slow(verb: str, kind: str, name: str) -> None:
        lab.clock.now += 7

    lab.cluster.gate = slow
    run(one.attempt())
    assert one.leads
    lab.clock.now += 1
    assert not one.leads


def test_a_released_lease_is_taken_at_once(lab: Lab) -> None:
    one, two = lab.candidate("one"), lab.candidate("two")
    run(one.attempt())
    assert not run(two.attempt())
    run(one.release())
    assert not one.leads
    assert run(two.attempt())
    run(one.release())  # not its own any more
    assert lab.spec()["holderIdentity"] == "two"


def test_a_lease_taken_by_force_ends_leading(lab: Lab) -> None:
    one = lab.candidate("one")
    run(one.attempt())
    lease = lab.cluster.store.get(KINDS["Lease"], *PLACE)
    lease["spec"]["holderIdentity"] = "somebody"
    run(lab.cluster.replace(LEASE, "default", lease))
    assert not run(one.attempt())
    assert not one.leads


@pytest.mark.parametrize("error", [Conflict("faster"), Unavailable("away")])
def test_a_failed_renewal_neither_ends_nor_prolongs_leading(lab: Lab, error: Exception) -> None:
    one = lab.candidate("one")
    run(one.attempt())

    def fail(verb: str, kind: str, name: str) -> None:
        raise error

    lab.cluster.gate = fail
    lab.clock.now += 3
    assert not run(one.attempt())
    assert one.check() == pytest.approx(TIMES.lease_s - 3)


def test_a_request_that_hangs_is_given_up() -> None:
    class Hanging(StoreCluster):
        async def get(self, *_: Any) -> None:
            await asyncio.sleep(60)

    quick = LeaseTimes(lease_s=0.5, renew_deadline_s=0.3, retry_s=0.05, request_s=0.05)
    assert not run(Leadership(Hanging(), PLACE, "one", quick).attempt())


def test_a_release_without_an_api_server_is_no_error(lab: Lab) -> None:
    one = lab.candidate("one")
    run(one.attempt())
    lab.cluster.down = True
    run(one.release())
    assert not one.leads


def test_acquire_and_hold_end_when_the_lease_is_lost(lab: Lab) -> None:
    quick = LeaseTimes(lease_s=2.0, renew_deadline_s=1.0, retry_s=0.05, request_s=0.5)
    one = Leadership(lab.cluster, PLACE, "one", quick)

    async def scenario() -> None:
        await asyncio.wait_for(one.acquire(), 120)
        assert one.leads
        lab.cluster.down = True
        await asyncio.wait_for(one.hold(), 120)
        assert not one.leads

    run(scenario())


def test_one_that_is_alone_leads_always() -> None:
    alone = AlwaysLeads()
    assert alone.leads
    assert alone.check() == float("inf")
    run(alone.acquire())
    run(alone.release())
    assert alone.leads


def test_times_that_are_not_safe_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        LeaseTimes(lease_s=5.0, renew_deadline_s=6.0)


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_never_two_lead_whatever_fails(seed: int) -> None:
    run(_history(Lab(), random.Random(seed)))


async def _history(lab: Lab, chance: random.Random) -> None:
    candidates = [lab.candidate(name) for name in ("one", "two", "three")]
    frozen_until = [0.0, 0.0, 0.0]
    lab.cluster.gate = _failing(chance)
    for _ in range(120):
        lab.clock.now += chance.uniform(0.05, 3.0)
        number = chance.randrange(3)
        if frozen_until[number] > lab.clock.now:
            continue
        if chance.random() < 0.05:
            frozen_until[number] = lab.clock.now + chance.uniform(5.0, 40.0)
            continue
        lab.cluster.down = chance.random() < 0.2
        if chance.random() < 0.05:
            await candidates[number].release()
        else:
            await candidates[number].attempt()
        assert sum(candidate.leads for candidate in candidates) <= 1


def _failing(chance: random.Random) -> Callable[[str, str, str], None]:
    def gate(verb: str, kind: str, name: str) -> None:
        if chance.random() < 0.2:
            raise Unavailable("lost on the way")

    return gate

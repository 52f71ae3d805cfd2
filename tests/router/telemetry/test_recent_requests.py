"""Which requests the console hears of: all that went wrong, and of many good ones some."""

from __future__ import annotations

from pagefleet_router.telemetry.recent_requests import MAX_GOOD_PER_S, RecentRequests


def test_of_many_good_ones_some_are_noted_and_all_that_went_wrong() -> None:
    recent = RecentRequests()
    wanted = [recent.wants(200, 7.0 + number / 1000) for number in range(200)]
    assert sum(wanted) == MAX_GOOD_PER_S
    assert all(wanted[:MAX_GOOD_PER_S]), "a router that is not busy notes every one"
    assert all(recent.wants(status, 7.9) for status in (400, 429, 503) * 100)
    assert recent.wants(200, 8.0), "each second anew"

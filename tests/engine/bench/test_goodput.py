"""Latencies of a request, promises about them, and how many kept them."""

from __future__ import annotations

import pytest
from pagefleet_engine.bench.goodput import Timing, goodput, meets, parse_slo
from pagefleet_engine.bench.percentiles import percentile, summary
from pagefleet_engine.errors import ConfigError

QUICK = Timing(0.0, 10, [0.1, 0.12, 0.16])
SLOW = Timing(1.0, 10, [0.9, 1.0])
SINGLE = Timing(2.0, 10, [0.2])


def test_latencies_of_a_request() -> None:
    assert QUICK.ttft == 0.1
    assert QUICK.tpot == pytest.approx(0.03)
    assert QUICK.itl == pytest.approx([0.02, 0.04])
    assert QUICK.e2e == 0.16
    assert (SINGLE.tpot, SINGLE.itl) == (0.0, [])


def test_the_servers_count_is_better_than_that_of_the_events() -> None:
    """A server may send several tokens at once."""
    merged = Timing(0.0, 10, [0.1, 0.3], num_counted=5)
    assert merged.num_output_tokens == 5
    assert merged.tpot == pytest.approx(0.05)
    assert merged.itl == pytest.approx([0.2])
    assert QUICK.num_output_tokens == 3


def test_goodput_counts_those_that_kept_every_promise() -> None:
    slo = parse_slo(["ttft:500", "tpot:35"])
    assert [meets(timing, slo) for timing in (QUICK, SLOW, SINGLE)] == [True, False, True]
    assert goodput([QUICK, SLOW, SINGLE], slo, 4.0) == 0.5
    assert meets(SLOW, {"e2e": 1.0})
    assert not meets(SLOW, {"e2e": 0.999})


@pytest.mark.parametrize("part", ["ttft", "ttft:", "ttft:x", "itl:5", ":5", "ttft:0", "ttft:-1"])
def test_a_promise_that_cannot_be_says_how_to_write_one(part: str) -> None:
    with pytest.raises(ConfigError, match="as ttft:500"):
        parse_slo([part])


def test_percentiles_are_linear_between_neighbours() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert percentile([7.0], 99) == 7.0
    assert summary([]) == {}
    assert summary(values)["mean"] == 2.5

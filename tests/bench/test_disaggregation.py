"""The benchmarks of disaggregation, as far as no engine is needed."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from pagefleet_engine.bench.goodput import Timing

from bench.disaggregation import Passed, described
from bench.disaggregation_fleet import Ports
from bench.disaggregation_sweep import COLOCATED, PAIR, Alone, Prompts, figures_of
from bench.disaggregation_tables import fill, sweep_table, transfer_table, verdict


def cell(whole_goodput: float, pair_goodput: float, whole_itl: float, pair_itl: float) -> dict[str, Any]:
    """Return one case of the sweep; first tokens are equal."""

    def fleet(goodput: float, itl: float) -> dict[str, Any]:
        same = dict.fromkeys(("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms"), 1234.0)
        return {**same, "itl_p99_ms": itl, "goodput_requests_per_s": goodput, "choices": {"remote": 3.0, "local": 1.0}}

    pair, whole = fleet(pair_goodput, pair_itl), fleet(whole_goodput, whole_itl)
    return {"requests": 4, "equal_answers": 4, "offered_requests_per_s": 2.5, COLOCATED: whole, PAIR: pair}


BY_LENGTH = {"128": {"by_load": {"0.3": cell(2, 1, 8, 8.5)}}, "4096": {"by_load": {"0.9": cell(1, 2, 90, 9)}}}


def test_the_share_that_is_exposed_is_of_the_first_token() -> None:
    figures = Passed(ttft_s=10.0, prefill_s=9.0, exposed_s=0.25, hidden_s=6.0, received_mb=64.0).figures()
    assert (figures["exposed_share"], figures["after_prefill_share"]) == (0.025, 0.1)


def test_each_round_is_kept_beside_the_median() -> None:
    turns = [{"ttft_s": value, "equal_answers": 1.0} for value in (3.0, 1.0, 2.0)]
    assert described(turns) == {"median_ttft_s": 2.0, "ttft_s": [3.0, 1.0, 2.0], "equal_answers": 3.0}


def test_only_requests_that_kept_the_promise_are_good() -> None:
    steady, late, slow = (
        Timing(0.0, 8, times) for times in ([0.1, 0.2, 0.3], [0.9, 1.0, 1.1], [0.1, 1.1, 2.1])
    )  # fmt: skip
    limits = Alone(ttft_s=0.1, tpot_s=0.1, requests_per_s=4.0).limits
    figures = figures_of([steady, late, slow], 2.0, limits)
    assert (figures["requests_per_s"], figures["goodput_requests_per_s"]) == (1.5, 0.5)
    assert figures["longest_gap_p90_ms"] == pytest.approx(820)
    assert figures["ttft_p50_ms"] == pytest.approx(100)


def test_no_two_prompts_begin_alike() -> None:
    prompts = Prompts(output_len=4)
    made = [*prompts.make(32, [0.0] * 10), *prompts.make(32, [0.0] * 10)]
    assert len({tuple(asked.prompt[:16]) for asked in made}) == 20


def test_a_port_is_given_once_and_is_free() -> None:
    ports = Ports()
    given = [ports.take(2) for _ in range(8)]
    numbers = [first + offset for first in given for offset in range(2)]
    assert len(set(numbers)) == 16
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", ports.take()))


def test_the_sweeps_table_marks_where_the_pair_is_worse() -> None:
    lines = sweep_table(BY_LENGTH).splitlines()
    assert lines[2] == (
        "| 128 | 0.3: 2.5 | 1,234 / 1,234 | 1,234 / 1,234 | 1,234 / 1,234 | 8 / 8.5 | 2 / **1** | 3 of 4 | 4 of 4 |"
    )
    assert lines[3].split(" | ")[5:7] == ["90 / 9", "1 / 2"]


def test_the_verdict_names_the_cases_in_which_the_pair_loses() -> None:
    assert verdict(BY_LENGTH).splitlines() == [
        "In goodput the pair loses in 1 of 2 cases (tokens at load: 128 at 0.3).",
        "In TTFT p90 the pair loses in 0 of 2 cases.",
        "In ITL p99 the pair loses in 0 of 2 cases.",
    ]


def test_the_transfers_table_has_a_row_for_each_way_of_sending() -> None:
    medians = {"median_ttft_s": 5.0, "median_whole_ttft_s": 4.9, "median_exposed_s": 0.02}
    one = {**medians, "median_exposed_share": 0.004, "median_received_mb": 67.0, "equal_answers": 2.0, "ttft_s": [5, 5]}
    lines = transfer_table({"put_async": one, "put": one, "get": one}).splitlines()
    assert len(lines) == 5
    assert lines[2].endswith("| 5.00 | 4.90 | 20 ms, 0.4 % | 67 | 2 of 2 |")


def test_a_table_takes_the_place_of_the_one_before() -> None:
    text = "a\n<!-- t -->\nold\n<!-- end of t -->\nb"
    assert fill(text, "t", "new") == "a\n<!-- t -->\nnew\n<!-- end of t -->\nb"
    with pytest.raises(ValueError, match="not 0"):
        fill(text, "u", "new")

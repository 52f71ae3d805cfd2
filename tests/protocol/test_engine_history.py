"""Rates and percentiles out of an engine's metrics, as Prometheus would compute them."""

from __future__ import annotations

import pytest
from pagefleet_protocol.engine_history import EngineHistory, Recent, parse_counters, percentiles


def exposition(
    prompt: float = 0, generated: float = 0, hits: float = 0, first: tuple[int, int, int] = (0, 0, 0), nan: int = 0
) -> bytes:  # fmt: skip
    fast, slow, whole = first
    name = "pagefleet_engine_time_to_first_token_seconds"
    return (
        f'# TYPE {name} histogram\n{name}_bucket{{le="0.1",model_name="m"}} {fast}\n'
        f'{name}_bucket{{le="1.0",model_name="m"}} {slow}\n{name}_bucket{{le="+Inf",model_name="m"}} {whole}\n'
        f'{name}_count{{model_name="m"}} {whole}\n'
        f'pagefleet_engine_prompt_tokens_total{{model_name="m"}} {prompt}\n'
        f'pagefleet_engine_prompt_tokens_created{{model_name="m"}} 1.7e9\n'
        f'pagefleet_engine_generation_tokens_total{{model_name="m"}} {generated}\n'
        f'pagefleet_engine_prefix_cache_queries_tokens_total{{model_name="m"}} {prompt}\n'
        f'pagefleet_engine_prefix_cache_hits_tokens_total{{model_name="m"}} {hits}\n'
        f'pagefleet_engine_nan_requests_total{{model_name="m"}} {nan}\n'
    ).encode()


def history(*told: tuple[float, bytes]) -> EngineHistory:
    made = EngineHistory()
    for at, text in told:
        made.note(text, at)
    return made


def test_counters_are_read_as_they_stand() -> None:
    found = parse_counters(exposition(10, 2e3, 4, (1, 3, 4), nan=2), at=5.0)
    assert (found.at, found.prompt_tokens, found.generated_tokens) == (5.0, 10.0, 2000.0)
    assert found.nan_requests == 2.0
    assert list(found.first_token) == [(0.1, 1), (1.0, 3), (float("inf"), 4)]
    assert not parse_counters(b"", 1.0).first_token
    assert parse_counters(b"pagefleet_engine_prompt_tokens_total{} 1e999\n", 1.0).prompt_tokens == 0, "no number"


def test_nothing_is_told_before_there_are_two_looks() -> None:
    assert EngineHistory().recent() == Recent()
    assert history((0.0, exposition(100))).recent() == Recent()
    assert history((0.0, exposition(100)), (4.9, exposition(200))).recent() == Recent()


def test_rates_are_of_the_last_seconds_and_ratios_of_the_last_minute() -> None:
    looks = [(float(at), exposition(prompt=100 * at, generated=10 * at, hits=25 * at)) for at in range(0, 50)]
    recent = history(*looks, (51.0, exposition(prompt=6900, generated=490, hits=1225))).recent()
    assert recent.prompt_tokens_s == pytest.approx((6900 - 4500) / 6, abs=1e-3), "of the look 6 s before"
    assert recent.generated_tokens_s == pytest.approx((490 - 450) / 6, abs=1e-3)
    assert recent.prefix_hit_ratio == pytest.approx(1225 / 6900, abs=1e-4), "of all looks"


def test_what_is_older_than_a_minute_counts_no_more() -> None:
    recent = history((0.0, exposition(0)), *((at, exposition(1000)) for at in (100.0, 105.0, 111.0))).recent()
    assert (recent.prompt_tokens_s, recent.prefix_hit_ratio, recent.ttft) == (0.0, None, None)


def test_an_engine_that_began_anew_has_no_rates_for_a_moment() -> None:
    made = history((0.0, exposition(100, 100)), (5.0, exposition(200, 200)), (10.0, exposition(3, 3)))
    assert made.recent() == Recent()
    made.note(exposition(13, 53), 15.0)
    assert (made.recent().prompt_tokens_s, made.recent().generated_tokens_s) == (2.0, 10.0)


def test_percentiles_are_of_what_came_in_between() -> None:
    before = parse_counters(exposition(first=(50, 50, 50)), 0.0).first_token
    now = parse_counters(exposition(first=(50, 150, 150)), 1.0).first_token
    found = percentiles(before, now)
    assert found is not None
    assert (found.p50, found.p95) == (0.55, 0.955), "the hundred new ones lie between 0.1 and 1.0"
    assert percentiles(now, now) is None
    beyond = percentiles((), parse_counters(exposition(first=(0, 0, 10)), 1.0).first_token)
    assert beyond is not None
    assert beyond.p50 == 1.0, "what is over the last bound is taken as that"

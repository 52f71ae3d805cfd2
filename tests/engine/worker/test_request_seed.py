"""Seeds of requests: their own, or one from the engine's."""

from __future__ import annotations

from pagefleet_engine.worker.sampling_table import request_seed


def test_a_request_without_a_seed_gets_one_from_the_engines() -> None:
    assert request_seed(5, engine_seed=0, counter=3) == request_seed(5, engine_seed=1, counter=4) == 5
    assert request_seed(-1, 0, 0) == 2**64 - 1
    derived = [request_seed(None, engine, counter) for engine in range(10) for counter in range(10)]
    assert len(set(derived)) == 100
    assert request_seed(None, 3, 4) == request_seed(None, 3, 4)
    assert request_seed(None, -1, 0) != request_seed(None, 1, 0)

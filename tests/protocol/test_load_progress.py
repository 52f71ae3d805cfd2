"""What is said of an engine that loads: in words, and in the answer of /readyz."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from pagefleet_protocol.load_progress import LoadPhase, LoadProgress, amount, decode_loading, encode_loading

GIB = 2**30


def test_the_answer_is_an_error_that_says_how_far_it_is() -> None:
    progress = LoadProgress("weights", GIB, 4 * GIB, 2.5)
    body = encode_loading(progress)
    assert decode_loading(body) == progress
    read = json.loads(body)
    assert read["error"]["code"] == "engine_loading"
    assert read["error"]["message"] == "The engine is not ready yet (reads weights: 25%, 1.0 of 4.0 GiB)."
    assert read["loading"]["phase"] == "weights"


@pytest.mark.parametrize("body", [b"", b"{}", b'{"error": {"message": "m", "type": "t"}}', b"\xff", b'{"loading": 1}'])
def test_other_answers_say_nothing(body: bytes) -> None:
    assert decode_loading(body) is None


def test_every_phase_has_words() -> None:
    for phase in get_args(LoadPhase):
        assert LoadProgress(phase).describe()
    assert LoadProgress("graphs", 12, 35).describe() == "captures graphs: 12 of 35"


def test_shares_stay_within_the_whole() -> None:
    assert LoadProgress("weights", 9, 3).share == 1.0  # read while it was being written
    assert LoadProgress("weights", 9, 0).share is None


@pytest.mark.parametrize(
    ("done", "total", "words"),
    [
        (0, 0, "0 of 0 bytes"),
        (1, 1023, "1 of 1023 bytes"),
        (512, 1024, "0.5 of 1.0 KiB"),
        (GIB, 3 * GIB, "1.0 of 3.0 GiB"),
        (2**50, 2**51, "1024.0 of 2048.0 TiB"),
    ],
)
def test_amounts_share_a_unit(done: int, total: int, words: str) -> None:
    assert amount(done, total) == words

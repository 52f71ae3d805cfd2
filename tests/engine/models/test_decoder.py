"""Which layers stand for all of them where only the kernels that they launch count."""

from __future__ import annotations

import pytest
from pagefleet_engine.models.decoder import where_kinds_meet


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("A", [0]),
        ("AAAAAA", [0, 1]),
        ("ABBBBB", [0, 1, 2]),
        ("ABABAB", [0, 1, 2]),
        ("AAABAAAB", [0, 1, 2, 3, 4]),
        ("AABBAB", [0, 1, 2, 3, 4]),
    ],
    ids=["one layer", "alike", "dense first", "by turns", "every fourth", "no order"],
)
def test_each_kind_is_kept_behind_each_kind_that_it_follows(kinds: str, kept: list[int]) -> None:
    assert where_kinds_meet(kinds) == kept

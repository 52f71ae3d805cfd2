"""When memory is handed back, and when not."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
from pagefleet_router.wire.memory import SpareMemory, trim


@pytest.mark.parametrize(
    ("counts", "times"),
    [
        ([0, 10, 900, 0, 0], 0),
        ([0, 5000, 4000, 4000, 3000, 3000], 0),
        ([0, 5000, 3000, 1000, 0], 0),
        ([0, 5000, 3000, 1000, 0, 0, 0], 1),
        ([0, 2000, 900, 950, 2000, 100, 100], 2),
    ],
)
def test_it_is_handed_back_when_most_of_many_have_gone(counts: list[int], times: int) -> None:
    calls: list[int] = []
    spare = SpareMemory(lambda: calls.append(1))
    for count in counts:
        spare.check(count)
    assert len(calls) == times


def test_handing_back_leaves_what_is_in_use() -> None:
    kept = [bytes([number]) * 4096 for number in range(64)]
    trim()
    assert all(data == bytes([number]) * 4096 for number, data in enumerate(kept))


FAULTS_OF_USING_AGAIN = """
import resource
from pagefleet_router.wire.memory import keep_bodies

keep_bodies()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bodies = [b"x" * 1_000_000 for _ in range(8)]
    del bodies
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs a C library that can be told")
def test_long_bodies_use_memory_again() -> None:
    found = subprocess.run([sys.executable, "-c", FAULTS_OF_USING_AGAIN], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 200, "8 MB of new pages are 2,000 faults"

"""The samples of single metrics in a Prometheus exposition, without reading all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

_REST = re.compile(rb"(?:\{[^\n]*\})? +(\S+)(?: +-?\d+)?[ \r]*(?:\n|$)")
"""Of a sample's line, behind its name."""


def metric_mark(name: str) -> bytes:
    """Return what `sample_values` looks for."""
    return b"\n" + name.encode()


def sample_values(text: bytes, mark: bytes) -> Iterator[bytes]:
    """Yield the values of one metric as they are written, one per series.

    Looking for the name alone is three times as fast as matching each line.

    Args:
        text: the exposition, with a line end before its first line.
        mark: of the metric, by `metric_mark`.
    """
    at = text.find(mark)
    while at >= 0:
        at += len(mark)
        sample = _REST.match(text, at)
        if sample is not None:
            yield sample[1]
        at = text.find(mark, at)

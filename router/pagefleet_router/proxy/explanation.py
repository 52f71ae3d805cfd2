"""The answer to `x-pagefleet-explain: 1`: how each engine looked to the request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pagefleet_protocol import headers

from pagefleet_router.proxy.client_request import ClientRequest
from pagefleet_router.scheduling.policy import Score

MAX_ENGINES = 64
MAX_BYTES = 6000
"""Widely used clients and proxies refuse an answer with a longer line of a header (8 kB)."""
_EXPLAIN = headers.EXPLAIN.encode()


def wants_explanation(request: ClientRequest) -> bool:
    """Whether a client asks for the scores."""
    return request.fields.get(_EXPLAIN) == b"1"


def explanation(scores: Sequence[Score]) -> bytes:
    """Return the header's line: JSON in ASCII, of the best engines, as many as a header can hold."""
    best = sorted(scores, key=lambda score: score.seconds)[:MAX_ENGINES]
    rows = [
        {
            "engine": score.engine_id,
            "seconds": round(score.seconds, 6),
            "cached_tokens": score.cached_tokens,
            "queued_tokens": score.queued_tokens,
            "reason": score.reason,
            **({"prefill": score.prefill_id} if score.prefill_id else {}),
        }
        for score in best
    ]
    texts, size = [], 0
    for row in rows:
        # Outside strings JSON is ASCII, so that what is not can be escaped wherever it stands.
        text = "".join(one if one < "\x7f" else "".join(_escaped(one)) for one in msgspec.json.encode(row).decode())
        size += len(text) + 1
        if size > MAX_BYTES:
            break
        texts.append(text)
    return f"{headers.EXPLAIN}: [{','.join(texts)}]\r\n".encode()


def _escaped(char: str) -> list[str]:
    units = char.encode("utf-16-be")
    return [f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2)]

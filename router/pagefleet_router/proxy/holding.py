"""A stream whose request waits: what its client gets meanwhile, so that neither it nor a proxy in between gives up."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_router.proxy.upstream import AnswerHead

COMMENT = b": waiting\n\n"
"""Readers of event streams skip it."""


@dataclass(frozen=True, slots=True)
class HoldTiming:
    """Seconds."""

    first: float = 5.0
    """Waiting that begins the answer; from then on errors are events."""
    at_engine: float = 15.0
    """The same while an engine is being asked: what it refuses it refuses sooner, and then with a true status."""
    period: float = 10.0
    """Between two comments."""


def held_head() -> AnswerHead:
    """Return the head of an event stream that begins before any engine has answered."""
    return AnswerHead(
        200,
        [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ],
    )


def error_event(body: bytes) -> bytes | None:
    """Return an engine's error answer as an event; None where it does not fit on a line."""
    text = body.strip()
    if not text.startswith(b"{") or b"\n" in text or b"\r" in text:
        return None
    return b"data: " + text + b"\n\n"

"""Whether an answer is from the engine that was asked: addresses pass from one pod to another."""

from __future__ import annotations

import enum
from urllib.parse import unquote

from pagefleet_protocol import headers

from pagefleet_router.endpoints import EngineView, Snapshot
from pagefleet_router.proxy.upstream import AnswerHead

_MODEL = headers.MODEL.encode()
_INCARNATION = headers.INCARNATION.encode()


class Identity(enum.Enum):
    """Who answered."""

    SAME = "same"
    """The engine that was asked, as far as anybody says."""
    RESTARTED = "restarted"
    """Another incarnation of it, whose cache is empty."""
    STRANGER = "stranger"
    """An engine of another model."""


def identify(head: AnswerHead, engine: EngineView, snapshot: Snapshot) -> Identity:
    """Compare what an answer says of its engine with what is known. Engines that say nothing are believed."""
    name = head.fields.get(_MODEL)
    if name is not None and not _stands_for(name, engine.endpoint.model, snapshot):
        return Identity.STRANGER
    incarnation = head.fields.get(_INCARNATION)
    if incarnation is not None and engine.facts is not None and incarnation != engine.facts.incarnation.encode():
        return Identity.RESTARTED
    return Identity.SAME


def _stands_for(value: bytes, model: str, snapshot: Snapshot) -> bool:
    text = value.decode("latin-1")
    return any(name == model or snapshot.model_of(name) == model for name in (text, unquote(text)))

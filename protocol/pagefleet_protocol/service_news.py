"""What a router can know of the InferenceService that it belongs to: how it is, and what its autoscalers decided.

In a cluster the router reads it from the object's status; `pagefleet up` writes the same object into a file.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pagefleet_protocol.console_state import Decision, ScalingState, Statement

MAX_DECISIONS = 20


class ServiceNews(msgspec.Struct, frozen=True, kw_only=True):
    """What is so."""

    name: str | None = None
    """None: the router belongs to no InferenceService."""
    namespace: str | None = None
    statements: tuple[Statement, ...] = ()
    scaling: tuple[ScalingState, ...] = ()
    """With the last decision, and those before as far as they were seen."""


NO_NEWS = ServiceNews()


class ServiceNewsError(ValueError):
    """Bytes that are no InferenceService."""


def read_news(data: bytes) -> ServiceNews:
    """Read an InferenceService with its status, as JSON; one without a status yet says nothing but its name.

    Raises:
        ServiceNewsError: it is something else.
    """
    try:
        found = msgspec.json.decode(data, type=_Service)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ServiceNewsError(str(error)[:200]) from None
    status = found.status or _Status()
    whole = () if status.scaling is None else (_state("engine", status.scaling),)
    return ServiceNews(
        name=found.metadata.name,
        namespace=found.metadata.namespace,
        statements=status.conditions,
        scaling=(*whole, *(_state(one.name, one.scaling) for one in status.role_scaling)),
    )


def with_history(before: ServiceNews, now: ServiceNews) -> ServiceNews:
    """Return what is so now, with the decisions that were known before behind the newest of each kind of engines."""
    known = {one.role: one.decisions for one in before.scaling}
    scaling = []
    for state in now.scaling:
        (newest,), older = state.decisions, known.get(state.role, ())
        if older and (older[0].wanted, older[0].reason) == (newest.wanted, newest.reason):
            older = older[1:]  # the same decision, with newer numbers
        scaling.append(msgspec.structs.replace(state, decisions=(newest, *older)[:MAX_DECISIONS]))
    return msgspec.structs.replace(now, scaling=tuple(scaling))


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    namespace: str | None = None


class _Scaling(msgspec.Struct, frozen=True):
    mode: Literal["Internal", "External", "Advisory"]
    current: int
    desired: int
    reason: str
    at: str
    signal: str = ""


class _RoleScaling(msgspec.Struct, frozen=True):
    name: Literal["prefill", "decode"]
    scaling: _Scaling


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    conditions: tuple[Statement, ...] = ()
    scaling: _Scaling | None = None
    role_scaling: tuple[_RoleScaling, ...] = ()


class _Service(msgspec.Struct, frozen=True):
    metadata: _Metadata
    status: _Status | None = None


def _state(role: Literal["engine", "prefill", "decode"], scaling: _Scaling) -> ScalingState:
    decision = Decision(at=scaling.at, wanted=scaling.desired, reason=scaling.reason, signal=scaling.signal)
    return ScalingState(role=role, mode=scaling.mode, current=scaling.current, decisions=(decision,))

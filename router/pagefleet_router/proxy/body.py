"""The few fields of a body that the choice of an engine depends on. All else is the engine's to judge."""

from __future__ import annotations

from typing import Any

import msgspec
from pagefleet_protocol.openai_json import json_name, shown

from pagefleet_router.endpoints import Snapshot
from pagefleet_router.errors import Refusal, no_engine
from pagefleet_router.prefix.pieces import hash_pieces
from pagefleet_router.request_view import ANONYMOUS, RequestView

_NOTHING = msgspec.Raw(b"")


class _Peek(msgspec.Struct):
    """What is looked at. `Raw` fields are skipped over and stay as they came."""

    model: Any = None
    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    cache_salt: Any = None


_DECODER = msgspec.json.Decoder(_Peek)


def view_request(body: bytes, snapshot: Snapshot, tenant: str | None, with_pieces: bool) -> RequestView:
    """Read a body once and work out what the scheduler needs.

    Args:
        body: JSON, as it came.
        snapshot: which models are served.
        tenant: whose request it is; two tenants never share a prefix.
        with_pieces: whether the policy looks at prompts.

    Raises:
        Refusal: the body is no JSON object (400), or its model is not served (404).
    """
    peek = _peek(body)
    model = _served_model(peek.model, snapshot)
    if not with_pieces:
        return RequestView(model, tenant=tenant or ANONYMOUS)
    text = bytes(peek.messages) or bytes(peek.prompt)
    salt = peek.cache_salt if isinstance(peek.cache_salt, str) else None
    pieces = hash_pieces((model, tenant, salt, bytes(peek.tools)), text)
    return RequestView(model, pieces, tenant=tenant or ANONYMOUS)


def _peek(body: bytes) -> _Peek:
    if not body:
        raise Refusal(400, "The request body is empty: send a JSON object.")
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError:
        raise Refusal(400, "The request body must be a JSON object.") from None
    except UnicodeDecodeError:
        raise Refusal(400, "The request body is not valid UTF-8.") from None
    except (msgspec.DecodeError, RecursionError):
        raise Refusal(400, "The request body is not valid JSON.") from None


def _served_model(model: object, snapshot: Snapshot) -> str:
    if isinstance(model, str):
        served = snapshot.model_of(model)
        if served is not None:
            return served
        if not snapshot.usable:
            raise no_engine()
        raise model_not_found(model)
    if len(snapshot.usable) == 1:
        return snapshot.models[0]  # only one engine can be meant, and it says best what is wrong
    if not snapshot.usable:
        raise no_engine()
    if model is None:
        raise Refusal(400, "Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
    message = f"Invalid type for 'model': expected a string, but got {json_name(model)} instead."
    raise Refusal(400, message, param="model", code="invalid_type")


def model_not_found(model: str) -> Refusal:
    """Return OpenAI's answer to an unknown model."""
    message = f"The model {shown(model)} does not exist or you do not have access to it."
    return Refusal(404, message, param="model", code="model_not_found")

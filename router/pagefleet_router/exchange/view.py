"""What admission and the choice of an engine depend on, read from a request's head and body once."""

from __future__ import annotations

import hashlib
import math
import random
import re
from dataclasses import dataclass

import msgspec
from pagefleet_protocol import headers
from pagefleet_protocol.openai_json import json_name, shown
from pagefleet_protocol.tenants import MAX_PRIORITY

from pagefleet_router.engines.endpoints import Snapshot
from pagefleet_router.errors import Refusal, no_engine, store_not_known
from pagefleet_router.exchange.json_shapes import BODY_DECODER, NOTHING, BodyFields
from pagefleet_router.prefix.knowledge import BYTES_PER_TOKEN, PIECE_BYTES, hash_pieces
from pagefleet_router.request_view import ANONYMOUS, Pieces, RequestView
from pagefleet_router.wire.client_request import ClientRequest

_BRACKET = ord("[")
_LOOK = 64
"""Bytes that tell what a prompt is; no list or object of more is decoded."""
_VALUE_DECODER = msgspec.json.Decoder()


def view_request(
    body: bytes, snapshot: Snapshot, asker: Asker, with_pieces: bool, generates: bool = True
) -> RequestView:
    """Read a body once and work out what admission and the scheduler need.

    Args:
        body: JSON, as it came.
        snapshot: which models are served.
        asker: whose request it is; two tenants never share a prefix.
        with_pieces: whether the policy looks at prompts.
        generates: whether an answer is computed from a prompt.

    Raises:
        Refusal: the body is no JSON object or says where KV is (400), or its model is not served (404).
    """
    fields = _read(body)
    if _value(fields.kv_transfer_params) is not None:
        message = "'kv_transfer_params' is not for clients: it is internal to the fleet."
        raise Refusal(400, message, param="kv_transfer_params", code="unsupported_parameter")
    model = _served_model(_value(fields.model), snapshot)
    text = fields.messages or fields.prompt or fields.input
    before = fields.system or fields.instructions
    num_bytes = len(text)
    store = "" if fields.input is NOTHING else _store_of(fields)
    pieces: Pieces = ()
    if with_pieces and num_bytes >= PIECE_BYTES:
        salt = _value(fields.cache_salt)
        scope = (model, asker.tenant, salt if isinstance(salt, str) else None, bytes(before) + bytes(fields.tools))
        pieces = hash_pieces(scope, bytes(text))
    return RequestView(
        model,
        pieces,
        (num_bytes + len(before) + len(fields.tools)) // BYTES_PER_TOKEN,
        _max_tokens(fields),
        tenant=asker.tenant,
        priority=asker.priority,
        session=asker.session,
        draw=_draw(asker) if snapshot.trials else 99,
        stream=_value(fields.stream) is True,
        may_split=generates and model in snapshot.prefills and _may_split(fields) and not store,
        store=store,
    )


def _draw(asker: Asker) -> int:
    """Return which hundredth of the requests this one is in: the same for all of a session."""
    return int(100 * random.random()) if asker.session is None else asker.session % 100  # noqa: S311 - spreads load


def view_stored(request: ClientRequest, asker: Asker) -> RequestView:
    """Return what is known of a request for a stored response."""
    response_id = request.target.partition(b"?")[0].split(b"/")[3]
    return RequestView(None, tenant=asker.tenant, priority=asker.priority, store=_store(_RESPONSE_ID, response_id))


_RESPONSE_ID = re.compile(rb"resp_([0-9a-f]{12})[0-9a-f]{20}")
_ITEM_REFERENCE = b"item_reference"
_ITEM_ID = re.compile(rb'"[a-z]{2,3}_([0-9a-f]{12})[0-9a-f]{24}"')
_BARE_REFERENCE = re.compile(rb'\{\s*"id"\s*:\s*' + _ITEM_ID.pattern + rb"\s*\}")
"""An item that is nothing but its id refers to one; items that are sent whole may have ids, too."""


def _store_of(fields: BodyFields) -> str:
    """Return the store of what a response goes on from, or refers to; empty where it does neither."""
    previous = _value(fields.previous_response_id)
    if isinstance(previous, str):
        return _store(_RESPONSE_ID, previous.encode("utf-8", "replace"))
    items = bytes(fields.input)
    found = _ITEM_ID.search(items) if _ITEM_REFERENCE in items else _BARE_REFERENCE.search(items)
    return "" if found is None else found[1].decode()


def _store(pattern: re.Pattern[bytes], value: bytes) -> str:
    found = pattern.fullmatch(value)
    return "" if found is None else found[1].decode()


def unknown_store(view: RequestView, snapshot: Snapshot, is_path: bool) -> Refusal | None:
    """Return the answer to a request for a response whose engine is gone, or not known yet; None where it is there.

    An engine that is ready without facts is not one of ours, and has no store.

    Args:
        view: of the request.
        snapshot: which engines there are.
        is_path: whether the response is in the request's path, and not in its body.
    """
    stores = (engine.facts.response_store for engine in snapshot.engines if engine.facts is not None)
    if not view.store or view.store in stores:
        return None
    if any(one.facts is None and not one.ready and not one.endpoint.coming for one in snapshot.engines):
        return store_not_known()
    if is_path:
        return Refusal(404, "The response was not found: no engine has it.", code="response_not_found")
    message = "Previous response not found: no engine has it."
    return Refusal(400, message, param="previous_response_id", code="previous_response_not_found")


def _max_tokens(fields: BodyFields) -> int | None:
    newer = fields.max_completion_tokens or fields.max_output_tokens
    return _count(_value(newer)) or _count(_value(fields.max_tokens))


def _value(raw: msgspec.Raw) -> object:
    """Return a scalar; of a list or an object, which is none's right value here, only the kind."""
    if raw is NOTHING:
        return None
    if len(raw) > _LOOK and (first := memoryview(raw)[0]) in b"[{":
        return [...] if first == _BRACKET else {...: ...}
    try:
        value = _VALUE_DECODER.decode(raw)
    except UnicodeDecodeError:
        raise _not_utf_8() from None
    except msgspec.MsgspecError:
        return math.inf  # a number of thousands of digits
    if isinstance(value, list):
        return [...]
    return {...: ...} if isinstance(value, dict) else value


def _not_utf_8() -> Refusal:
    return Refusal(400, "The request body is not valid UTF-8.")


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _may_split(fields: BodyFields) -> bool:
    """Whether nothing of the prompt is computed but K/V: that can be done elsewhere."""
    if _value(fields.echo) or _value(fields.background):
        return False
    return _value(fields.prompt_logprobs) is None and _is_one_prompt(fields.prompt)


def _is_one_prompt(raw: msgspec.Raw) -> bool:
    """Tell a text, a list of token ids, or a conversation, from a list of prompts."""
    if not raw:
        return True
    prompt = bytes(memoryview(raw)[:_LOOK])
    return prompt.startswith(b'"') or (prompt.startswith(b"[") and prompt[1:].lstrip()[:1].isdigit())


def _read(body: bytes) -> BodyFields:
    if not body:
        raise Refusal(400, "The request body is empty: send a JSON object.")
    try:
        return BODY_DECODER.decode(body)
    except msgspec.ValidationError:
        raise Refusal(400, "The request body must be a JSON object.") from None
    except UnicodeDecodeError:
        raise _not_utf_8() from None
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


_PRIORITY = headers.PRIORITY.encode()
_INTEGER = re.compile(rb"[+-]?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Asker:
    """Becomes part of the `RequestView`."""

    tenant: str = ANONYMOUS
    priority: int = 0
    session: int | None = None


NOBODY = Asker()
"""Who sends no key, no session and no priority."""


def read_asker(request: ClientRequest, session_header: bytes) -> Asker:
    """Read a head.

    A tenant gets no priority above its own highest; where no keys are asked for everybody may have any.

    Raises:
        Refusal: the priority is no integer (400).
    """
    priority = request.fields.get(_PRIORITY, b"")
    session = request.fields.get(session_header, b"")
    tenant = request.tenant
    if tenant is None and not priority and not session:
        return NOBODY
    name_of_tenant = ANONYMOUS if tenant is None else tenant.name
    highest = MAX_PRIORITY if tenant is None else tenant.max_priority
    return Asker(
        name_of_tenant,
        min(_priority(priority), highest) if priority or highest < 0 else 0,
        _session(name_of_tenant, session) if session else None,
    )


def _priority(value: bytes) -> int:
    if not value:
        return 0
    if not _INTEGER.fullmatch(value):
        message = f"The header {headers.PRIORITY} must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}."
        raise Refusal(400, message, param=headers.PRIORITY, code="invalid_value")
    return max(-MAX_PRIORITY, min(int(value), MAX_PRIORITY))


def _session(tenant: str, value: bytes) -> int:
    """Return a hash that is the same in every router: they must all prefer the same engine."""
    return int.from_bytes(hashlib.blake2b(tenant.encode() + b"\0" + value, digest_size=8).digest(), "little")

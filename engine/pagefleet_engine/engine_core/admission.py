"""From a message to a request of the scheduler: what the message itself may hold.

The API process calls this for an answer that names the field; the engine core calls it again, because it trusts no
sender. What depends on the queue and the KV pool is checked by the scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pagefleet_protocol.block_hash import PrefixScope

from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.admission import check_request as check_against_model
from pagefleet_engine.core.request import Request
from pagefleet_engine.core.stop import Stop, check_resumed
from pagefleet_engine.engine_core.messages import AddRequest
from pagefleet_engine.errors import ContextTooLong, InvalidRequest
from pagefleet_engine.sampling_params import SamplingParams

_SALT = re.compile(r"[A-Za-z0-9_-]{1,256}(?:/[A-Za-z0-9_-]{1,256})?")
"""A client's own, a tenant's, or both (`pagefleet_protocol.handoff.combined_salt`)."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


def to_request(message: AddRequest, limits: ModelLimits, model: str) -> Request:
    """Check a message, already fanned out (n is 1), and make the scheduler's request of it.

    Args:
        message: untrusted.
        limits: of the loaded model.
        model: name in the scope of the request's cached blocks.

    Raises:
        InvalidRequest: a field is wrong.
        ContextTooLong: `max_tokens` asks for more than the context leaves.
    """
    if not _REQUEST_ID.fullmatch(message.request_id):
        raise InvalidRequest("A request id has 1 to 256 printable ASCII characters.", "request_id", "invalid_value")
    if message.sampling.n != 1:
        raise InvalidRequest("The engine core takes one output per request.", "n", "invalid_value")
    if message.adapter is not None:
        raise InvalidRequest("Adapters are not served by this engine: leave 'adapter' out.", "adapter", "invalid_value")
    if message.cache_salt is not None and not _SALT.fullmatch(message.cache_salt):
        raise InvalidRequest("'cache_salt' takes 1 to 256 letters, digits, '_' and '-'.", "cache_salt", "invalid_value")
    if not -(2**63) <= message.priority < 2**63:
        raise InvalidRequest("'priority' is a 64-bit integer.", "priority", "invalid_value")
    _check_integers(message)
    _check_room(len(message.prompt_token_ids), message.sampling.max_tokens, limits)
    scope = PrefixScope(model, message.adapter, message.cache_salt)
    return Request(
        message.request_id,
        message.prompt_token_ids,
        message.sampling,
        message.eos_token_ids,
        scope,
        message.priority,
        message.resumed_token_ids,
        message.transfer,
    )


def check_message(message: AddRequest, limits: ModelLimits) -> Stop | None:
    """Check a message as the engine core will, apart from the state of its queue.

    Returns:
        How the output that it resumes has ended it already; None where it goes on, as all others do.

    Raises:
        InvalidRequest: a field is wrong.
        ContextTooLong: the prompt, or what `max_tokens` asks for, does not fit the context.
    """
    request = to_request(message, limits, "")
    check_against_model(request, limits, limits.max_model_len)
    request.limit(limits.max_model_len)
    return check_resumed(request)


def _check_room(num_prompt_tokens: int, max_tokens: int | None, limits: ModelLimits) -> None:
    context = limits.max_model_len
    # A prompt that fills the context by itself is the scheduler's to refuse, in words of its own.
    if max_tokens is not None and num_prompt_tokens < context < num_prompt_tokens + max_tokens:
        raise ContextTooLong(
            f"This model's context is {context} tokens, prompt and output together: the prompt has {num_prompt_tokens} "
            f"and 'max_tokens' asks for {max_tokens}. Lower one of them.",
            "max_tokens",
        )


def _check_integers(message: AddRequest) -> None:
    """Refuse what is no integer where a token id belongs; a bool is one in Python, and as a token a mistake."""
    sampling: SamplingParams = message.sampling
    groups: list[tuple[str, Iterable[object]]] = [
        ("prompt", message.prompt_token_ids),
        ("resumed_token_ids", message.resumed_token_ids),
        ("eos_token_ids", message.eos_token_ids),
        *(("bad_words", word) for word in sampling.bad_words_token_ids),
    ]
    for param, token_ids in groups:
        if not set(map(type, token_ids)) <= {int}:
            raise InvalidRequest(f"'{param}' takes token ids, which are integers.", param, "invalid_type")
    if any(not word for word in sampling.bad_words_token_ids):
        raise InvalidRequest("A word of 'bad_words' has no tokens.", "bad_words", "invalid_value")

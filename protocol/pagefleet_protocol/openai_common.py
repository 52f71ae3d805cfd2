"""What the chat and the completions bodies share: sampling fields, refused fields, usage, the model list.

Names and ranges are OpenAI's; where OpenAI lacks the field, vLLM's. An unknown field is ignored and reported; a field
that would change the answer and is not supported is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pagefleet_protocol.openai_json import MAX_CONTAINERS, Fields, InvalidRequest, checked_object, checked_string, shown
from pagefleet_protocol.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_CHARS, SamplingParams

MAX_STOP_STRINGS = 4
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 16_384
MAX_MODEL_CHARS = 16 * 1024
MAX_USER_CHARS = 512

_CACHE_SALT = re.compile(r"[A-Za-z0-9_-]{1,256}")
_DECIMAL = re.compile(r"[0-9]{1,10}")

_PLAIN_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "include_stop_str_in_output", "ignore_eos", "min_tokens", "prompt_logprobs", "skip_special_tokens",
)  # fmt: skip

TEXT_FORMAT_ONLY = 'Structured output is not supported yet; only {"type": "text"} is accepted.'

REFUSED = {
    "prompt_embeds": "Send text or token ids.",
    "kv_transfer_params": "It is internal to the fleet.",
    "chat_template": "The server's own template is used.",
    "chat_template_kwargs": "The server's own template is used without options.",
    "documents": "Put the text into a message.",
    "mm_processor_kwargs": "The model reads text only.",
    "functions": "Function calling is not supported yet.",
    "function_call": "Function calling is not supported yet.",
    "tools": "Tool calling is not supported yet.",
    "web_search_options": "Web search is not supported.",
    "audio": "Only text is produced.",
    "structured_outputs": "Structured output is not supported yet.",
    "guided_json": "Structured output is not supported yet.",
    "guided_regex": "Structured output is not supported yet.",
    "guided_choice": "Structured output is not supported yet.",
    "guided_grammar": "Structured output is not supported yet.",
    "truncate_prompt_tokens": "Shorten the prompt before sending it.",
    "logits_processors": "Use 'logit_bias'.",
}
"""Fields that would change the answer and are not supported -> what to do instead."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool = False
    """A last chunk without choices carries the usage."""
    continuous_usage_stats: bool = False
    """Every chunk carries the usage so far (as vLLM has it)."""


class CommonFields(msgspec.Struct, frozen=True, kw_only=True):
    """What the checked requests of both routes have."""

    model: str
    sampling: SamplingParams
    """Its `max_tokens` is None where the client leaves it to the context."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    priority: int = 0
    """Smaller runs earlier."""
    cache_salt: str | None = None
    """Keeps cached prefixes of a client's own users apart."""
    ignored: tuple[str, ...] = ()
    """Names of fields that nobody reads."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompt the prefix cache held."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request, over all its choices; a prompt counts once whatever `n`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Build the counts with their sum."""
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptTokensDetails(cached_tokens))


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `/v1/models`."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "pagefleet"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/v1/models`."""

    data: tuple[ModelCard, ...]
    object: str = "list"


def open_body(body: Mapping[str, Any]) -> tuple[Fields, str]:
    """Return the fields of a body, with its model; refuse what would change the answer and is not supported."""
    fields = Fields(body)
    model = fields.string("model", MAX_MODEL_CHARS, min_chars=1)
    if model is None:
        raise fields.missing("model")
    refuse_unsupported(fields)
    return fields, model


def read_common(fields: Fields, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
    """Read what `CommonFields` has but the model, after all other fields; the two given are spelled by each body."""
    stream, options = read_stream(fields)
    sampling = read_sampling(fields, max_tokens, logprobs)
    if sampling.prompt_logprobs is not None and stream:
        message = "'prompt_logprobs' is not available with 'stream': true."
        raise InvalidRequest(message, "prompt_logprobs", "invalid_value")
    return {
        "sampling": sampling,
        "stream": stream,
        "stream_options": options,
        "priority": fields.integer("priority", -(2**63), 2**63 - 1) or 0,
        "cache_salt": _read_cache_salt(fields),
        "ignored": tuple(fields.ignored()),
    }


def read_sampling(fields: Fields, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Read every sampling field but the two given, which the two bodies spell differently."""
    lists = {
        "stop": _read_stop(fields),
        "stop_token_ids": fields.array("stop_token_ids", MAX_STOP_TOKENS),
        "allowed_token_ids": fields.array("allowed_token_ids", MAX_ALLOWED_TOKENS, min_items=1),
        "bad_words": fields.array("bad_words", MAX_CONTAINERS),
        "logit_bias": _read_logit_bias(fields),
    }
    given = {name: fields.raw(name) for name in _PLAIN_FIELDS} | lists
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


def read_stream(fields: Fields) -> tuple[bool, StreamOptions]:
    """Read `stream` and `stream_options`; options without a stream are refused."""
    stream = bool(fields.boolean("stream"))
    options = fields.object("stream_options")
    if options is None:
        return stream, StreamOptions()
    if not stream:
        raise InvalidRequest("'stream_options' is only allowed with 'stream': true.", "stream_options", "invalid_value")
    inner = Fields(options, "stream_options.")
    read = StreamOptions(
        include_usage=bool(inner.boolean("include_usage")),
        continuous_usage_stats=bool(inner.boolean("continuous_usage_stats")),
    )
    inner.boolean("include_obfuscation")
    for name in inner.ignored():
        path = f"stream_options.{shown(name)[1:-1]}"
        raise InvalidRequest(f"Unknown parameter: '{path}'.", path, "unknown_parameter")
    return stream, read


def _read_cache_salt(fields: Fields) -> str | None:
    salt = fields.string("cache_salt", 256, min_chars=1)
    if salt is not None and not _CACHE_SALT.fullmatch(salt):
        message = "Invalid 'cache_salt': expected at most 256 characters of A-Z, a-z, 0-9, '_' and '-'."
        raise InvalidRequest(message, "cache_salt", "invalid_value")
    return salt


def refuse_unsupported(fields: Fields) -> None:
    """Refuse what would change the answer and is not supported."""
    for name, remedy in REFUSED.items():
        if fields.raw(name) is not None:
            raise unsupported(name, remedy)
    if fields.boolean("use_beam_search"):
        raise unsupported("use_beam_search", "Use 'n' with a temperature.")
    fields.string("user", MAX_USER_CHARS)


def unsupported(name: str, remedy: str) -> InvalidRequest:
    """Build the error of a field that is not supported."""
    return InvalidRequest(f"Unsupported parameter: '{name}' is not supported. {remedy}", name, "unsupported_parameter")


def _read_stop(fields: Fields) -> list[Any] | None:
    value = fields.raw("stop")
    if isinstance(value, list):
        return fields.array("stop", MAX_STOP_STRINGS)
    stop = fields.string("stop", MAX_STOP_CHARS, min_chars=1)
    return None if stop is None else [stop]


def _read_logit_bias(fields: Fields) -> dict[int, Any] | None:
    value = fields.raw("logit_bias")
    if value is None:
        return None
    return {_token_id(key): bias for key, bias in checked_object(value, "logit_bias", MAX_LOGIT_BIAS).items()}


def _token_id(key: str) -> int:
    if not _DECIMAL.fullmatch(checked_string(key, "logit_bias", MAX_MODEL_CHARS)):
        message = f"Invalid key in 'logit_bias': expected a token id, but got {shown(key)} instead."
        raise InvalidRequest(message, "logit_bias", "invalid_value")
    return int(key)

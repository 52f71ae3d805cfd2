"""What the chat and the completions bodies share: sampling fields, refused fields, usage, the model list.

Names and ranges are OpenAI's; where OpenAI lacks the field, vLLM's. Each field that either publishes is honoured, or
refused by name; one that nobody knows is ignored and reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pagefleet_protocol.beam_search import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY
from pagefleet_protocol.openai_forms import FORM_FIELDS, read_form
from pagefleet_protocol.openai_json import (
    MAX_CONTAINERS,
    Fields,
    InvalidRequest,
    checked_number,
    checked_object,
    checked_string,
    shown,
)
from pagefleet_protocol.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    SamplingParams,
)

MAX_STOP_STRINGS = 4
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 16_384
MAX_MODEL_CHARS = 16 * 1024
MAX_USER_CHARS = 512

ALL_LOGPROBS = -1
ALL_THAT_FIT = -1

_CACHE_SALT = re.compile(r"[A-Za-z0-9_-]{1,256}")
_DECIMAL = re.compile(r"[0-9]{1,10}")

_PLAIN_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
)  # fmt: skip

REFUSED = {
    "prompt_embeds": "Send text or token ids.",
    "kv_transfer_params": "It is internal to the fleet.",
    "mm_processor_kwargs": "The model reads text only.",
    "media_io_kwargs": "The model reads text only.",
    "functions": "Use 'tools'.",
    "function_call": "Use 'tool_choice'.",
    "web_search_options": "Web search is not supported.",
    "audio": "Only text is produced.",
    "prediction": "Answers are generated from the messages alone.",
    "logits_processors": "Use 'logit_bias', or 'vllm_xargs' for the server's own.",
    "request_id": "Send it in the header x-request-id.",
    "repetition_detection": "Use 'repetition_penalty' or 'stop'.",
    "guided_decoding_backend": "The server chooses it.",
    "moderation": "Answers are not moderated.",
    "prompt_cache_options": "Prefixes are cached by themselves; 'cache_salt' keeps them apart.",
}
"""Fields that would change the answer and are not supported -> what to do instead."""
_WITHOUT_BEAMS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens", "temperature"), (0,)),
    **dict.fromkeys(("top_p", "repetition_penalty", "best_of"), (1,)),
    **dict.fromkeys(("stop", "stop_token_ids", "bad_words", "logit_bias", "vllm_xargs"), ([], {})),
    **dict.fromkeys(("seed", "allowed_token_ids", "prompt_logprobs", "top_logprobs", "tools", *FORM_FIELDS), ()),
    **dict.fromkeys(("stream", "logprobs", "echo", "return_token_ids"), (False,)),
    "top_k": (0, -1),
}
"""Fields that a beam search does not take -> values under which they ask for nothing."""
_SERVICE_TIERS = (None, "auto", "default")

LABELS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Texts that tell a provider's own books who asks or what to keep for how long, and never change an answer."""


class RequestRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator of a server lets requests have, and what they get where they say nothing."""

    sampling_defaults: Mapping[str, Any] = {}
    """Of `SamplingParams`' fields, as the model's makers recommend them."""
    max_new_tokens: int | None = None
    """Of an answer to a chat whose request has no limit of its own."""
    max_logprobs: int = MAX_LOGPROBS
    """Alternatives per token; -1: the whole vocabulary, which a request asks for by -1."""
    trust_chat_template: bool = False
    """Requests may bring a chat template of their own."""

    def read_logprobs(self, fields: Fields, name: str) -> int | None:
        """Read a number of alternatives per token; more than any vocabulary has stands for all of them."""
        if self.max_logprobs == ALL_LOGPROBS:
            asked = fields.integer(name, ALL_LOGPROBS, MAX_TOKEN_ID)
            return MAX_TOKEN_ID if asked == ALL_LOGPROBS else asked
        return fields.integer(name, 0, self.max_logprobs)


NO_RULES = RequestRules()


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
    truncate_prompt_tokens: int | None = None
    """Only so many last tokens of each prompt count; -1: as many as fit beside the answer."""
    return_token_ids: bool = False
    """The answer names the ids of its tokens, and of its prompt's."""
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name tokens `token_id:7`, so that none look alike."""
    beam_length_penalty: float | None = None
    """The `sampling.n` choices are the best beams of a search that ranks them so; None: they are drawn."""
    form_path: str = ""
    """The field that gives `sampling.structured_outputs`, e.g. `response_format.json_schema.schema`."""
    ignored: tuple[str, ...] = ()
    """Names of fields that nobody reads."""

    def kept_prompt_tokens(self, max_model_len: int) -> int | None:
        """Return how many last tokens of a prompt count; None: all of them."""
        if self.truncate_prompt_tokens == ALL_THAT_FIT:
            return max(1, max_model_len - (self.sampling.max_tokens or 1))
        return self.truncate_prompt_tokens


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompt the prefix cache held."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """How much of the answer was a thought."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request, over all its choices; a prompt counts once whatever `n`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, thought_tokens: int = 0) -> Usage:
    """Build the counts with their sum."""
    total = prompt_tokens + completion_tokens
    of_prompt, of_completion = PromptTokensDetails(cached_tokens), CompletionTokensDetails(thought_tokens)
    return Usage(prompt_tokens, completion_tokens, total, of_prompt, of_completion)


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `/v1/models`."""

    id: str
    created: int
    max_model_len: int
    input_modalities: tuple[str, ...] = ("text",)
    """What a message may hold."""
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


def read_common(
    fields: Fields, max_tokens: int | None, logprobs: int | None, rules: RequestRules = NO_RULES
) -> dict[str, Any]:
    """Read what `CommonFields` has but the model, after all other fields; the two given are spelled by each body."""
    stream, options = read_stream(fields)
    beam_length_penalty = _read_beam_search(fields)
    form, form_path = read_form(fields)
    sampling = read_sampling(fields, max_tokens, logprobs, rules)
    if form is not None:
        sampling = msgspec.structs.replace(sampling, structured_outputs=form)
    return {
        "sampling": sampling,
        "stream": stream,
        "stream_options": options,
        "priority": fields.integer("priority", -(2**63), 2**63 - 1) or 0,
        "cache_salt": _read_cache_salt(fields),
        "truncate_prompt_tokens": _read_truncation(fields),
        "return_token_ids": bool(fields.boolean("return_token_ids")),
        "return_tokens_as_token_ids": bool(fields.boolean("return_tokens_as_token_ids")),
        "beam_length_penalty": beam_length_penalty,
        "form_path": form_path,
        "ignored": tuple(fields.ignored()),
    }


def read_sampling(
    fields: Fields, max_tokens: int | None, logprobs: int | None, rules: RequestRules = NO_RULES
) -> SamplingParams:
    """Read every sampling field but the two given, which the two bodies spell differently."""
    lists = {
        "stop": _read_stop(fields),
        "stop_token_ids": fields.array("stop_token_ids", MAX_STOP_TOKENS),
        "allowed_token_ids": fields.array("allowed_token_ids", MAX_ALLOWED_TOKENS, min_items=1),
        "bad_words": fields.array("bad_words", MAX_CONTAINERS),
        "logit_bias": _read_logit_bias(fields),
        "prompt_logprobs": rules.read_logprobs(fields, "prompt_logprobs"),
        "extra_args": fields.object("vllm_xargs") or None,
    }
    given = {name: fields.raw(name) for name in _PLAIN_FIELDS} | lists
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **(dict(rules.sampling_defaults) | given))


def _read_beam_search(fields: Fields) -> float | None:
    """Read how beams are ranked; a search draws nothing, so it takes no field that changes how tokens are drawn."""
    if not fields.boolean("use_beam_search"):
        refuse_other(fields, "length_penalty", 1, "It is for 'use_beam_search'.")
        return None
    for name, allowed in _WITHOUT_BEAMS.items():
        value = fields.raw(name)
        if value is not None and value not in allowed:
            raise unsupported(name, "A beam search does not take it.")
    fields.integer("n", 1, MAX_BEAM_WIDTH)
    penalty = fields.raw("length_penalty")
    return 1.0 if penalty is None else checked_number(penalty, "length_penalty", 0.0, MAX_LENGTH_PENALTY)


def _read_truncation(fields: Fields) -> int | None:
    kept = fields.integer("truncate_prompt_tokens", ALL_THAT_FIT, MAX_TOKENS)
    if kept == 0:
        message = "Invalid 'truncate_prompt_tokens': expected a value >= 1, or -1, but got 0 instead."
        raise InvalidRequest(message, "truncate_prompt_tokens", "integer_below_min_value")
    return kept


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
    if fields.raw("skip_special_tokens") is False:
        refuse_other(fields, "spaces_between_special_tokens", False, "Special tokens stand as they are.")
    fields.boolean("spaces_between_special_tokens")
    if fields.raw("service_tier") not in _SERVICE_TIERS:
        raise unsupported("service_tier", "All requests are served alike; use 'priority'.")
    for name in LABELS:
        fields.string(name, MAX_USER_CHARS)
    fields.object("metadata")


def refuse_other(fields: Fields, name: str, allowed: object, remedy: str) -> None:
    """Refuse any value of a field but the one that asks for nothing."""
    value = fields.raw(name)
    if value is not None and (value != allowed or isinstance(value, bool) != isinstance(allowed, bool)):
        raise unsupported(name, f"Only {msgspec.json.encode(allowed).decode()} is accepted. {remedy}")


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

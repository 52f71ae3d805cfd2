"""What the chat and the completions bodies share: sampling fields, refused fields, usage, the model list.

Names and ranges are OpenAI's; where OpenAI lacks the field, vLLM's. An unknown field is ignored and reported; a field
that would change the answer and is not supported is refused by name.
"""

from __future__ import annotations

import re

import msgspec

from pagefleet_protocol.openai_json import BodyError, Fields, checked_integer, checked_number, checked_string, shown

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_TOKEN_LIST = 1024
MAX_ALLOWED_TOKENS = 16_384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 128
MAX_LOGIT_BIAS = 1024
MAX_MODEL_CHARS = 16 * 1024
MAX_USER_CHARS = 512
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
INT64 = 2**63

_CACHE_SALT = re.compile(r"[A-Za-z0-9_-]{1,256}")
_DECIMAL = re.compile(r"[0-9]{1,10}")

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


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling fields of either body, checked for type and range; None where the client leaves the default."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True


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


def read_model(fields: Fields) -> str:
    """Read `model`, which must name one."""
    model = fields.string("model", MAX_MODEL_CHARS, min_chars=1)
    if model is None:
        raise fields.missing("model")
    return model


def read_sampling(fields: Fields) -> SamplingFields:
    """Read every sampling field but the token limits and `logprobs`, which the two bodies spell differently."""
    return SamplingFields(
        n=fields.integer("n", 1, MAX_N) or 1,
        temperature=fields.number("temperature", 0.0, 2.0),
        top_p=fields.number("top_p", 0.0, 1.0, open_low=True),
        top_k=fields.integer("top_k", -1, MAX_TOKEN_ID),
        min_p=fields.number("min_p", 0.0, 1.0),
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0),
        repetition_penalty=fields.number("repetition_penalty", 0.0, 1e6, open_low=True),
        seed=fields.integer("seed", -INT64, INT64 - 1),
        stop=_read_stop(fields),
        stop_token_ids=fields.integers("stop_token_ids", MAX_TOKEN_LIST, 0, MAX_TOKEN_ID) or (),
        include_stop_str_in_output=bool(fields.boolean("include_stop_str_in_output")),
        ignore_eos=bool(fields.boolean("ignore_eos")),
        min_tokens=fields.integer("min_tokens", 0, MAX_TOKENS) or 0,
        prompt_logprobs=fields.integer("prompt_logprobs", 0, MAX_LOGPROBS),
        logit_bias=_read_logit_bias(fields),
        allowed_token_ids=_read_allowed(fields),
        bad_words=fields.strings("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS) or (),
        skip_special_tokens=fields.boolean("skip_special_tokens") is not False,
    )


def read_stream(fields: Fields) -> tuple[bool, StreamOptions]:
    """Read `stream` and `stream_options`; options without a stream are refused."""
    stream = bool(fields.boolean("stream"))
    options = fields.object("stream_options")
    if options is None:
        return stream, StreamOptions()
    if not stream:
        raise BodyError("'stream_options' is only allowed with 'stream': true.", "stream_options", "invalid_value")
    inner = Fields(options, "stream_options.")
    read = StreamOptions(
        include_usage=bool(inner.boolean("include_usage")),
        continuous_usage_stats=bool(inner.boolean("continuous_usage_stats")),
    )
    inner.boolean("include_obfuscation")
    for name in inner.ignored():
        path = f"stream_options.{shown(name)[1:-1]}"
        raise BodyError(f"Unknown parameter: '{path}'.", path, "unknown_parameter")
    return stream, read


def read_priority(fields: Fields) -> int:
    """Read `priority`: smaller runs earlier."""
    return fields.integer("priority", -INT64, INT64 - 1) or 0


def read_cache_salt(fields: Fields) -> str | None:
    """Read `cache_salt`, which keeps cached prefixes of different tenants apart."""
    salt = fields.string("cache_salt", 256, min_chars=1)
    if salt is not None and not _CACHE_SALT.fullmatch(salt):
        message = "Invalid 'cache_salt': expected at most 256 characters of A-Z, a-z, 0-9, '_' and '-'."
        raise BodyError(message, "cache_salt", "invalid_value")
    return salt


def refuse_unsupported(fields: Fields) -> None:
    """Refuse what would change the answer and is not supported."""
    for name, remedy in REFUSED.items():
        if fields.raw(name) is not None:
            raise unsupported(name, remedy)
    if fields.boolean("use_beam_search"):
        raise unsupported("use_beam_search", "Use 'n' with a temperature.")
    fields.string("user", MAX_USER_CHARS)


def unsupported(name: str, remedy: str) -> BodyError:
    """Build the error of a field that is not supported."""
    return BodyError(f"Unsupported parameter: '{name}' is not supported. {remedy}", name, "unsupported_parameter")


def check_prompt_logprobs(prompt_logprobs: int | None, stream: bool) -> None:
    """Refuse prompt log-probabilities in a stream, which has no place for them."""
    if prompt_logprobs is not None and stream:
        raise BodyError("'prompt_logprobs' is not available with 'stream': true.", "prompt_logprobs", "invalid_value")


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if isinstance(value, list):
        return fields.strings("stop", MAX_STOP_STRINGS, MAX_STOP_CHARS) or ()
    stop = fields.string("stop", MAX_STOP_CHARS, min_chars=1)
    return () if stop is None else (stop,)


def _read_allowed(fields: Fields) -> tuple[int, ...] | None:
    fields.array("allowed_token_ids", MAX_ALLOWED_TOKENS, min_items=1)
    return fields.integers("allowed_token_ids", MAX_ALLOWED_TOKENS, 0, MAX_TOKEN_ID)


def _read_logit_bias(fields: Fields) -> dict[int, float] | None:
    value = fields.object("logit_bias")
    if value is None:
        return None
    if len(value) > MAX_LOGIT_BIAS:
        message = f"Invalid 'logit_bias': expected at most {MAX_LOGIT_BIAS} tokens, but got {len(value)} instead."
        raise BodyError(message, "logit_bias", "object_above_max_length")
    bias = {}
    for key, item in value.items():
        if not _DECIMAL.fullmatch(checked_string(key, "logit_bias", MAX_MODEL_CHARS)):
            message = f"Invalid key in 'logit_bias': expected a token id, but got {shown(key)} instead."
            raise BodyError(message, "logit_bias", "invalid_value")
        token = checked_integer(int(key), "logit_bias", 0, MAX_TOKEN_ID)
        bias[token] = checked_number(item, f"logit_bias.{token}", -100.0, 100.0)
    return bias

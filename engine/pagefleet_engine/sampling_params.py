"""How one request is sampled: vLLM's names, ranges of the OpenAI API where that has the field.

Ranges are checked on construction, so that every door (HTTP, offline, engine core) holds the same limits.
"""

from __future__ import annotations

import math

import msgspec

from pagefleet_engine.errors import InvalidRequest

MAX_N = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_BAD_WORDS = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one request; immutable.

    Raises:
        InvalidRequest: a value is out of its range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output tokens; the two above look at output tokens only."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: until the context is full."""
    min_tokens: int = 0
    logprobs: int | None = None
    """k: each output token's logprob and the k most likely; 0: only the sampled token's."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Filled from `bad_words` where a tokenizer is at hand."""
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is None and name != "allowed_token_ids":  # vLLM's defaults, which scripts spell out
                msgspec.structs.force_setattr(self, name, ())
            elif isinstance(value, str):
                msgspec.structs.force_setattr(self, name, (value,))
            elif isinstance(value, list):
                msgspec.structs.force_setattr(self, name, tuple(value))
        _check(self)

    @property
    def forbids_tokens(self) -> bool:
        """True when some tokens may not be taken, so that none may be left."""
        return self.allowed_token_ids is not None or bool(self.bad_words_token_ids) or self.min_tokens > 0

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0


def _check(p: SamplingParams) -> None:
    _integer(p, "n", 1, MAX_N)
    _number(p, "temperature", 0.0, 2.0)
    _number(p, "top_p", 0.0, 1.0, open_low=True)
    _integer(p, "top_k", -1, 2**31 - 1)
    _number(p, "min_p", 0.0, 1.0)
    _number(p, "presence_penalty", -2.0, 2.0)
    _number(p, "frequency_penalty", -2.0, 2.0)
    _number(p, "repetition_penalty", 0.0, 1e6, open_low=True)
    _integer(p, "seed", -(2**63), 2**63 - 1, optional=True)
    _integer(p, "max_tokens", 1, 2**31 - 1, optional=True)
    _integer(p, "min_tokens", 0, 2**31 - 1)
    _integer(p, "logprobs", 0, MAX_LOGPROBS, optional=True)
    _integer(p, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({p.min_tokens}) must not be over 'max_tokens' ({p.max_tokens}).",
            "min_tokens",
            "invalid_value",
        )
    _check_stops(p)
    _check_token_sets(p)


def _check_stops(p: SamplingParams) -> None:
    if len(p.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"'stop' takes at most {MAX_STOP_STRINGS} strings.", "stop", "array_above_max_length")
    for text in p.stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequest("'stop' takes strings of at least one character.", "stop", "invalid_value")
        if len(text) > MAX_STOP_STRING_CHARS:
            raise InvalidRequest(
                f"a 'stop' string has at most {MAX_STOP_STRING_CHARS} characters.", "stop", "string_above_max_length"
            )
    if p.stop and not p.detokenize:
        raise InvalidRequest("'stop' needs 'detokenize'.", "stop", "invalid_value")


def _check_token_sets(p: SamplingParams) -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        if not _are_token_ids(getattr(p, name) or ()):
            raise InvalidRequest(f"'{name}' takes token ids, integers of at least 0.", name, "invalid_value")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise InvalidRequest("'allowed_token_ids' must not be empty.", "allowed_token_ids", "invalid_value")
    if len(p.bad_words) > MAX_BAD_WORDS or any(not isinstance(word, str) or not word for word in p.bad_words):
        raise InvalidRequest(
            f"'bad_words' takes at most {MAX_BAD_WORDS} non-empty strings.", "bad_words", "invalid_value"
        )
    bias = p.logit_bias or {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"'logit_bias' takes at most {MAX_LOGIT_BIAS} tokens.", "logit_bias", "object_above_max_length"
        )
    for token, value in bias.items():
        if not isinstance(token, int) or token < 0:
            raise InvalidRequest("'logit_bias' has token ids as keys.", "logit_bias", "invalid_value")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise InvalidRequest("a 'logit_bias' value must be between -100 and 100.", "logit_bias", "invalid_value")


def _are_token_ids(values: tuple[object, ...]) -> bool:
    # Without a loop of Python's own: lists may be long, and every output of a request has one.
    return set(map(type, values)) <= {int} and min(values, default=0) >= 0  # type: ignore[type-var,operator]


def _integer(p: SamplingParams, name: str, low: int, high: int, optional: bool = False) -> None:
    value = getattr(p, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"Invalid type for '{name}': expected an integer.", name, "invalid_type")
    if value < low:
        raise InvalidRequest(
            f"Invalid '{name}': expected a value >= {low}, but got {value}.", name, "integer_below_min_value"
        )
    if value > high:
        raise InvalidRequest(
            f"Invalid '{name}': expected a value <= {high}, but got {str(value)[:24]}.", name, "integer_above_max_value"
        )


def _number(p: SamplingParams, name: str, low: float, high: float, open_low: bool = False) -> None:
    value = getattr(p, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"Invalid type for '{name}': expected a number.", name, "invalid_type")
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(
            f"Invalid '{name}': expected a value in {bracket}{low:g}, {high:g}], but got {value!r:.24}.",
            name,
            "decimal_out_of_range",
        )

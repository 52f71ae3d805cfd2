"""How one request is sampled: vLLM's names, ranges of the OpenAI API where that has the field.

One table of ranges, checked on construction: a body of HTTP, the offline API and the engine core, which decodes what a
sender wrote, take the same values and refuse all others in the same words.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from pagefleet_protocol.openai_json import (
    InvalidRequest,
    checked_boolean,
    checked_integer,
    checked_integers,
    checked_number,
    checked_object,
    checked_string,
    checked_strings,
    wrong_type,
)
from pagefleet_protocol.structured_outputs import StructuredOutputsParams
from pagefleet_protocol.thinking import Thinking

MAX_N = 128
MAX_LOGPROBS = 20
"""Where the operator allows no other number; the engine checks it."""
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 128
MAX_EXTRA_ARGS = 64
MAX_EXTRA_ARG_CHARS = 64
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MIN_TEMPERATURE = 0.01
"""Smaller ones but 0 are raised to it, as vLLM does: logits divided by less overflow."""

_INT64 = 2**63
_INTEGERS: Mapping[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "top_k": (-1, MAX_TOKEN_ID),
    "seed": (-_INT64, _INT64 - 1),
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "logprobs": (0, MAX_TOKEN_ID),
    "prompt_logprobs": (0, MAX_TOKEN_ID),
}
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
"""With these, and a logit's bias of 100 at most, no finite logit becomes infinite."""
_SEQUENCES = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_BOOLEANS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
_NONE_COUNTS = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})


class RequestOutputKind(enum.IntEnum):
    """What each output of a request that streams holds."""

    CUMULATIVE = 0
    """All so far."""
    DELTA = 1
    """What is new."""
    FINAL_ONLY = 2
    """Nothing before the end, then all."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Parameters of one request. A field may be set anew until they are submitted: who submits them takes a `clone`.

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
    structured_outputs: StructuredOutputsParams | None = None
    """The form that each output must have."""
    thinking: Thinking | None = None
    """None: the output is all answer."""
    extra_args: dict[str, Any] | None = None
    """Name -> what a logits processor of the engine reads; a name that none reads is refused."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Of outputs that come one by one: those of `LLMEngine` and `AsyncLLM`."""
    logits_processors: Any = None
    """Functions of vLLM's older scripts, which are refused: a processor is made once per engine, and named there."""

    def __post_init__(self) -> None:
        for name in _SEQUENCES:
            msgspec.structs.force_setattr(self, name, _sequence(name, getattr(self, name)))
        _check(self)
        _check_together(self)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", MIN_TEMPERATURE)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field anew; whether it goes with the others is checked when the parameters are submitted.

        Raises:
            InvalidRequest: the value is out of its range; the field is as before.
        """
        before = getattr(self, name, None)
        super().__setattr__(name, _sequence(name, value) if name in _SEQUENCES else value)
        try:
            _check(self)
        except InvalidRequest:
            super().__setattr__(name, before)
            raise

    def clone(self) -> Self:
        """Return a copy that shares nothing with this one that could change.

        Raises:
            InvalidRequest: fields that were set do not go together.
        """
        own = {name: copy.deepcopy(getattr(self, name)) for name in ("logit_bias", "extra_args")}
        return msgspec.structs.replace(self, **own)

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Make parameters of which None means the default, where it is no value; biases are cut to -100 to 100.

        Raises:
            InvalidRequest: a value is out of its range.
            TypeError: there is no such field.
        """
        biases = given.pop("logit_bias", None)
        known = {name: value for name, value in given.items() if value is not None or name in _NONE_COUNTS}
        if biases is None:
            return cls(**known)
        cut = {int(token): min(100.0, max(-100.0, bias)) for token, bias in biases.items()}
        return cls(**known, logit_bias=cut)

    @property
    def forbids_tokens(self) -> bool:
        """True when some tokens may not be taken, so that none may be left."""
        return (
            self.allowed_token_ids is not None
            or bool(self.bad_words_token_ids)
            or self.min_tokens > 0
            or self.extra_args is not None
        )

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0


def _check(p: SamplingParams) -> None:
    for name, (low, high) in _INTEGERS.items():
        value = getattr(p, name)
        if value is not None or name not in _NONE_COUNTS:
            checked_integer(value, name, low, high)
    for name, (least, most) in _NUMBERS.items():
        checked_number(getattr(p, name), name, least, most)
    for name in _BOOLEANS:
        checked_boolean(getattr(p, name), name)
    checked_strings(p.stop, "stop", MAX_STOP_STRINGS, MAX_STOP_CHARS)
    checked_strings(p.bad_words, "bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    checked_integers(p.stop_token_ids, "stop_token_ids", 0, MAX_TOKEN_ID)
    if p.allowed_token_ids is not None:
        checked_integers(p.allowed_token_ids, "allowed_token_ids", 0, MAX_TOKEN_ID, min_items=1)
    for word in p.bad_words_token_ids:
        checked_integers(word, "bad_words_token_ids", 0, MAX_TOKEN_ID, min_items=1)
    if p.logit_bias:
        for token, bias in checked_object(p.logit_bias, "logit_bias", MAX_LOGIT_BIAS).items():
            checked_integer(token, "logit_bias", 0, MAX_TOKEN_ID)
            checked_number(bias, f"logit_bias.{token}", -100.0, 100.0)
    _check_objects(p)
    _check_plugins(p)


def _sequence(name: str, value: Any) -> Any:
    """Return what vLLM's scripts give for a list: None, which its defaults spell out, one text, or a list."""
    if value is None and name != "allowed_token_ids":
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _check_objects(p: SamplingParams) -> None:
    if not isinstance(p.output_kind, RequestOutputKind):
        raise wrong_type("output_kind", "RequestOutputKind", p.output_kind)
    if p.thinking is not None and not isinstance(p.thinking, Thinking):
        raise InvalidRequest("'thinking' takes a Thinking.", "thinking", "invalid_type")


def _check_plugins(p: SamplingParams) -> None:
    if p.extra_args is not None:
        for name in checked_object(p.extra_args, "extra_args", MAX_EXTRA_ARGS):
            checked_string(name, "extra_args", MAX_EXTRA_ARG_CHARS, 1)
    if p.logits_processors:
        message = (
            "Functions as 'logits_processors' of a request are not supported: make a plug-in of them, name it by "
            "LLM(logits_processors=[...]), and give it what it reads as 'extra_args'."
        )
        raise InvalidRequest(message, "logits_processors", "unsupported_parameter")


def _check_together(p: SamplingParams) -> None:
    if p.structured_outputs is not None and not isinstance(p.structured_outputs, StructuredOutputsParams):
        raise wrong_type("structured_outputs", "StructuredOutputsParams", p.structured_outputs)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        message = f"'min_tokens' ({p.min_tokens}) must not be over 'max_tokens' ({p.max_tokens})."
        raise InvalidRequest(message, "min_tokens", "invalid_value")
    if p.stop and not p.detokenize:
        raise InvalidRequest("'stop' needs 'detokenize'.", "stop", "invalid_value")

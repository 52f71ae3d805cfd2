"""From the core's token outputs to what a caller sees: text, cut at stop strings, with the tokens that made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_text.detokenizer import Detokenizer
from pagefleet_text.stop_strings import StopStrings
from pagefleet_text.tokenizer import Tokenizer

from pagefleet_engine.core.outputs import Waits
from pagefleet_engine.core.stop import Stop
from pagefleet_engine.engine_core.messages import RequestOutput, WireLogprobs
from pagefleet_engine.engine_core.wire import FAILED_ALONE, INVALID, KV_LOAD_FAILED, OUT_OF_MEMORY, QUEUE_FULL
from pagefleet_engine.errors import (
    EngineError,
    InvalidRequest,
    KVLoadFailed,
    OwnFailure,
    QueueFull,
    RequestFailed,
    StepOutOfMemory,
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next part of one output. The last has a finish reason; the text may lag behind the tokens."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[WireLogprobs] | None = None
    """One entry per token, where asked for."""
    prompt_logprobs: Sequence[WireLogprobs] | None = None
    """One entry per prompt token after the first, all in the chunk that has the first token."""
    finish_reason: str | None = None
    """`stop`, `length` or `abort`."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    num_cached_tokens: int | None = None
    """With the first token: prompt tokens that came from the prefix cache."""
    waits: Waits | None = None
    """With the first token."""
    shown: str = ""
    """Of output that another engine began: its text before this chunk's, which the caller has already."""
    lengths: Sequence[int] = field(default=(), compare=False)
    """Characters that each token has added to the text; with `shown`, to that and then to the text."""


@dataclass(frozen=True, slots=True)
class OutputSoFar:
    """Output that another engine has made of the same request, from which this one goes on."""

    token_ids: list[int]
    num_chars: int
    """Of its text, how much the caller has."""


class OutputText:
    """Follows one output from its first token to its last.

    Args:
        tokenizer: None gives chunks without text, for a model without a tokenizer.
        sampling: of the request; its `n` is not looked at.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams) -> None:
        wants_text = tokenizer is not None and sampling.detokenize
        self._detokenizer = (
            Detokenizer(tokenizer, sampling.skip_special_tokens) if tokenizer is not None and wants_text else None
        )
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._sampling = sampling
        self._num_tokens = 0
        self._prompt_logprobs: list[WireLogprobs] = []

    def push(self, output: RequestOutput) -> Chunk | None:
        """Take the core's next output; None when there is nothing to show yet.

        A chunk may finish by a stop string while the core goes on: the caller then aborts the request.

        Raises:
            InvalidRequest, QueueFull, RequestFailed: the core ended the request with an error.
        """
        if output.finish_reason == "error":
            raise error_of(output)
        if output.prompt_logprobs:
            self._prompt_logprobs += output.prompt_logprobs
        if not output.new_token_ids and output.finish_reason is None:
            return None
        hides_last = output.finish_reason == "stop" and not output.form_complete
        text, lengths, stop = self._text_of(output.new_token_ids, output.finish_reason is not None, hides_last)
        num_kept = len(lengths)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        return Chunk(
            text,
            output.new_token_ids[:num_kept],
            None if output.logprobs is None else output.logprobs[:num_kept],
            prompt_logprobs or None,
            output.finish_reason if stop is None else "stop",
            output.stop_token_id if stop is None else stop,
            output.num_cached_tokens,
            output.waits,
            lengths=lengths,
        )

    def resume(self, so_far: OutputSoFar, ended: Stop | None) -> Chunk | None:
        """Take in another engine's output, before any of the core's; None where it has shown no text.

        Args:
            so_far: its tokens, and how much of their text the caller has.
            ended: how these tokens have ended the request, by the core's rules.

        Raises:
            InvalidRequest: the text is shorter than that, or ends before the last token.
        """
        reason = None if ended is None else ended.reason.value
        text, lengths, stop = self._text_of(so_far.token_ids, reason is not None, reason == "stop")
        if len(lengths) < len(so_far.token_ids) or len(text) < so_far.num_chars:
            raise InvalidRequest(
                "The output to resume is not what these parameters give.", "resumed_token_ids", "invalid_value"
            )
        if not text and reason is None and stop is None:
            return None
        stop_token_id = None if ended is None else ended.token_id
        return Chunk(
            text[so_far.num_chars :],
            (),
            finish_reason=reason if stop is None else "stop",
            stop_reason=stop_token_id if stop is None else stop,
            shown=text[: so_far.num_chars],
            lengths=lengths,
        )

    def _text_of(self, tokens: Sequence[int], finished: bool, hides_last: bool) -> tuple[str, list[int], str | None]:
        """Return new text, what each of the new tokens that count added to it, and the stop string that ended it.

        `hides_last`: the last token is what ended the text, and not part of it unless that is asked for.
        """
        hides_last &= not self._sampling.include_stop_str_in_output
        if self._detokenizer is None:
            return "", [0] * len(tokens), None
        shown, lengths = "", []
        for index, token in enumerate(tokens):
            last = finished and index == len(tokens) - 1
            piece = "" if last and hides_last else self._detokenizer.push((token,))
            if last:
                piece += self._detokenizer.finish()
            self._num_tokens += 1
            stop = None
            if self._num_tokens > self._sampling.min_tokens:
                piece, stop = self._stops.push(piece)
            shown += piece
            lengths.append(len(piece))
            if stop is not None:
                return shown, lengths, stop
        if finished:
            shown += (self._detokenizer.finish() if not tokens else "") + self._stops.finish()
        return shown, lengths, None


def merge_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Join the chunks of one output that a slow reader has not taken yet."""
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    has_logprobs = any(chunk.logprobs is not None for chunk in chunks)  # an end without tokens brings none
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.token_ids],
        [entry for chunk in chunks for entry in chunk.logprobs or ()] if has_logprobs else None,
        next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None),
        last.finish_reason,
        last.stop_reason,
        next((chunk.num_cached_tokens for chunk in chunks if chunk.num_cached_tokens is not None), None),
        next((chunk.waits for chunk in chunks if chunk.waits is not None), None),
        chunks[0].shown,
        [length for chunk in chunks for length in chunk.lengths],
    )


def error_of(output: RequestOutput) -> EngineError | InvalidRequest:
    """Return the error that an output with finish reason `error` stands for."""
    message = output.error or "The request failed."
    if output.error_kind == INVALID:
        return InvalidRequest(message, output.error_param, output.error_code)
    if output.error_kind == QUEUE_FULL:
        return QueueFull(message, output.retry_after_s or 1.0)
    if output.error_kind == KV_LOAD_FAILED:
        return KVLoadFailed(message, output.kv_fault)
    if output.error_kind == FAILED_ALONE:
        return OwnFailure(message)
    return StepOutOfMemory(message) if output.error_kind == OUT_OF_MEMORY else RequestFailed(message)


def spell_bad_words(sampling: SamplingParams, tokenizer: Encoder | None) -> SamplingParams:
    """Return `sampling` with the token ids of its bad words, if they are not there yet.

    Raises:
        InvalidRequest: there are bad words and no tokenizer.
    """
    if not sampling.bad_words or sampling.bad_words_token_ids:
        return sampling
    if tokenizer is None:
        raise InvalidRequest("'bad_words' needs a tokenizer, and the model has none.", "bad_words", "invalid_value")
    return msgspec.structs.replace(sampling, bad_words_token_ids=bad_words_token_ids(tokenizer, sampling.bad_words))


class Encoder(Protocol):
    """The part of a tokenizer that spelling needs."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...


def bad_words_token_ids(tokenizer: Encoder, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell each word: at the start of a text, and after a space.

    Spellings that tokenize in another way inside a longer word are not covered, as in other engines.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for spelling in (bare, " " + bare) if bare else (word,):
            token_ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            if token_ids:
                found[token_ids] = None
    return tuple(found)

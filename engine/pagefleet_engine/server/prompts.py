"""From the bodies' prompts to token ids that fit the model. All tokenizing happens in a thread pool.

A prompt has at most `max_model_len - 1` tokens, because at least one must be generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

from pagefleet_protocol.openai_chat import Message
from pagefleet_protocol.openai_completions import Prompt
from pagefleet_text.openai_messages import written

from pagefleet_engine.engine_core.output_text import spell_bad_words
from pagefleet_engine.errors import ContextTooLong, InvalidRequest
from pagefleet_engine.sampling_params import SamplingParams
from pagefleet_engine.server.ports import ChatPrompt, ServedModel, Tokenizer
from pagefleet_engine.text.model_files import own_errors

P = ParamSpec("P")
T = TypeVar("T")


class Prompts:
    """Builds the prompts of one model."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatPrompt, model: ServedModel, pool: Executor) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._model = model
        self._pool = pool

    async def of_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Render and tokenize a conversation; a developer's message is a system message to the template.

        Raises:
            InvalidRequest: the template refuses the messages, or the prompt is too long.
        """
        return await self._off_loop(self._chat_ids, messages, add_generation_prompt)

    async def of_completion(self, prompts: Sequence[Prompt], add_special_tokens: bool = True) -> list[list[int]]:
        """Tokenize each text; token ids are checked against the vocabulary.

        Raises:
            InvalidRequest: an id is out of range, or a prompt is too long.
        """
        return await self._off_loop(self._completion_ids, prompts, add_special_tokens)

    def of_router(self, token_ids: list[int], param: str) -> list[int]:
        """Return the ids that a router made of the field `param`, checked as a client's own would be.

        Raises:
            InvalidRequest: an id is out of range, or the prompt is too long.
        """
        ids = self._fitting(token_ids, param)  # first, because it bounds what the other check looks at
        self._check_ids(ids, param)
        return ids

    async def token_ids_of(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenize a text of any length."""
        return await self._off_loop(self._tokenizer.encode, text, add_special_tokens)

    async def spell(self, sampling: SamplingParams) -> SamplingParams:
        """Return `sampling` with the token ids of its bad words, of which there may be many long ones."""
        return await self._off_loop(spell_bad_words, sampling, self._tokenizer) if sampling.bad_words else sampling

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """Detokenize.

        Raises:
            InvalidRequest: an id is out of range.
        """
        if not token_ids:
            return ""
        self._check_ids(token_ids, "tokens")
        return await self._off_loop(self._tokenizer.decode, token_ids, False)

    async def offset_after(self, token_ids: Sequence[int]) -> int:
        """Return the length of the tokens' texts, as log-probabilities of `/v1/completions` count offsets.

        Raises:
            InvalidRequest: an id is out of range.
        """
        self._check_ids(token_ids, "resumed_token_ids")
        return await self._off_loop(lambda: sum(len(self._tokenizer.token_text(token)) for token in token_ids))

    async def _off_loop(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))

    def _chat_ids(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        self._refuse_hopeless(written(messages), "messages")
        with own_errors():
            ids = self._chat.conversation_tokens(messages, add_generation_prompt)
        return self._fitting(ids, "messages")

    def _completion_ids(self, prompts: Sequence[Prompt], add_special_tokens: bool) -> list[list[int]]:
        return [self._one(prompt, _name(i, len(prompts)), add_special_tokens) for i, prompt in enumerate(prompts)]

    def _one(self, prompt: Prompt, param: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(prompt, str):
            self._check_ids(prompt, param)
            return self._fitting(list(prompt), param)
        self._refuse_hopeless(prompt, param)
        return self._fitting(self._tokenizer.encode(prompt, add_special_tokens), param)

    def _refuse_hopeless(self, text: str, param: str) -> None:
        limit = self._model.max_model_len
        if self._tokenizer.surely_longer_than(text, limit):
            message = f"This model's context is {limit} tokens; the prompt has {len(text)} characters, far too many."
            raise ContextTooLong(message, param)

    def _fitting(self, ids: list[int], param: str) -> list[int]:
        limit = self._model.max_model_len
        if not ids:
            raise InvalidRequest("The prompt has no tokens.", param, "empty_prompt")
        if len(ids) >= limit:
            message = f"This model's context is {limit} tokens, one of them at least for the answer; "
            raise ContextTooLong(message + f"the prompt has {len(ids)}. Shorten it.", param)
        return ids

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        top = max(ids)
        if top >= self._model.vocab_size:
            message = f"Invalid '{param}': token id {top} is outside the vocabulary of {self._model.vocab_size} tokens."
            raise InvalidRequest(message, param, "token_id_out_of_range")


def _name(index: int, count: int) -> str:
    return "prompt" if count == 1 else f"prompt[{index}]"

"""An engine without a model: text follows from the prompt and the seed, one byte a token; tests set its switches."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence

from pagefleet_engine.client.stream import Chunks, Generation, Mailbox
from pagefleet_engine.engine_core.admission import fan_out
from pagefleet_engine.engine_core.messages import CoreStats, WireLogprobs
from pagefleet_engine.engine_core.output_text import Chunk
from pagefleet_engine.engine_core.progress import EngineHealth
from pagefleet_protocol.conversation import Conversation
from pagefleet_protocol.kv_handoff import KvTransfer
from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_text.errors import PromptRefused
from pagefleet_text.stop_strings import StopStrings
from pagefleet_text.text_model import for_template

VOCAB_SIZE = 300
MAX_MODEL_LEN = 256


class ByteTokenizer:
    """Token id = byte; ids from 256 on stand for nothing."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        return chr(token_id) if token_id < 128 else f"bytes:\\x{token_id:02x}"

    def surely_longer_than(self, text: str, num_tokens: int) -> bool:
        return len(text) > 4 * num_tokens


class PlainChat:
    """Renders `role: content` lines; refuses a conversation that opens with the assistant."""

    template_names = frozenset({"messages", "add_generation_prompt"})

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer

    def chat_tokens(self, conversation: Conversation) -> list[int]:
        seen = [for_template(message) for message in conversation.messages]
        if seen[0]["role"] == "assistant":
            raise PromptRefused("The conversation must open with the user.", "messages", "invalid_value")
        lines = [f"{message['role']}: {message['content']}\n" for message in seen]
        return self._tokenizer.encode("".join(lines) + ("assistant: " if conversation.add_generation_prompt else ""))


class ScriptedEngine:
    """Generates letters. All of its switches may be set from another thread before a request is sent."""

    def __init__(self) -> None:
        self.hold_after: int | None = None
        """Tokens after which every request waits until it may go on."""
        self.go_on = asyncio.Event()
        """Not set, unless a test does it, in the server's event loop."""
        self.fail_after: tuple[int, Exception] | None = None
        """Tokens after which every request fails, and how."""
        self.pause_s = 0.0
        """Between tokens."""
        self.now_health = EngineHealth(alive=True, stalled_s=0.0)
        self.seen: list[tuple[str, list[int], SamplingParams, int, str | None]] = []
        self.transfers: list[KvTransfer | None] = []
        """Of each request of `seen`, the leg that it is."""
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.stats: CoreStats | None = CoreStats(2, 1, 0.25, 100, 40, 3, 9)
        self.profiles: list[str] = []
        self.is_draining = False
        self.owes_nothing = asyncio.Event()
        """Set, unless a test says otherwise, in the server's event loop."""
        self.owes_nothing.set()

    def drain(self) -> None:
        self.is_draining = True

    async def transfers_over(self) -> None:
        await self.owes_nothing.wait()

    def health(self) -> EngineHealth:
        return self.now_health

    async def start_profile(self) -> None:
        self.profiles.append("started")

    async def stop_profile(self) -> str:
        self.profiles.append(f"stopped after {len(self.seen)} requests")
        return "/profiles/one.json.gz"

    async def generate(self, asked: Generation) -> Chunks:
        assert not asked.resumed, "a scripted engine has no text to go on from"
        mailbox, num_open = Mailbox(), asked.num_choices
        choices = [(prompt, sampling) for prompt in asked.prompts for sampling in fan_out(asked.sampling)]
        tasks = [
            asyncio.create_task(self._choice(asked, index, choice, mailbox)) for index, choice in enumerate(choices)
        ]
        try:
            while num_open:
                index, chunk = await mailbox.get()
                num_open -= chunk.finish_reason is not None
                yield index, chunk
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(
        self, asked: Generation, index: int, choice: tuple[list[int], SamplingParams], mailbox: Mailbox
    ) -> None:
        prompt, sampling = choice
        request_id = f"{asked.request_id}-{index}"
        self.transfers.append(asked.transfer)
        self.seen.append((request_id, list(prompt), sampling, asked.priority, asked.cache_salt))
        self.running.add(request_id)
        finished = False
        try:
            async for chunk in self._chunks(prompt, sampling):
                finished = chunk.finish_reason is not None
                mailbox.put(index, chunk)
        except Exception as error:
            mailbox.fail(error)
        finally:
            if not finished:
                self.aborted.append(request_id)
            self.running.discard(request_id)

    async def _chunks(self, prompt: Sequence[int], sampling: SamplingParams) -> AsyncGenerator[Chunk, None]:
        stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        scored = [_logprobs(token, sampling.prompt_logprobs) for token in prompt[1:]]
        for i in range(sampling.max_tokens or MAX_MODEL_LEN):
            if self.hold_after == i:
                await self.go_on.wait()
            if self.fail_after is not None and self.fail_after[0] == i:
                raise self.fail_after[1]
            await asyncio.sleep(self.pause_s)
            token = next_token(prompt, sampling.seed, i)
            text, stop = stops.push(chr(token))
            last = i + 1 == sampling.max_tokens
            reason = "stop" if stop else "length" if last else None
            yield Chunk(
                text + (stops.finish() if last and not stop else ""),
                [token],
                None if sampling.logprobs is None else [_logprobs(token, sampling.logprobs)],
                scored if i == 0 and sampling.prompt_logprobs is not None else None,
                reason,
                stop,
                len(prompt) // 2 if i == 0 else None,
            )
            if reason:
                return


def next_token(prompt: Sequence[int], seed: int | None, position: int) -> int:
    """Return the letter at a position of the answer."""
    digest = hashlib.sha256(repr((list(prompt), seed, position)).encode()).digest()
    return ord("a") + digest[0] % 26


def answer(prompt: str, num_tokens: int, seed: int | None = None) -> str:
    """Return what the engine answers to a text prompt."""
    ids = list(prompt.encode())
    return "".join(chr(next_token(ids, seed, i)) for i in range(num_tokens))


def _logprobs(token: int, top: int | None) -> WireLogprobs:
    """The chosen token is the most likely, at -0.5; the next ids follow."""
    others = [(token + i) % 128 for i in range(top or 0)]
    return WireLogprobs([token, *others], [-0.5, *(-0.5 - i for i in range(len(others)))], 1)

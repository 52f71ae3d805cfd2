"""Asynchronous use in a script: `async for output in AsyncLLM(model=...).generate(...)`, over the server's client."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_text.tokenizer import Tokenizer

from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.stream import Generation
from pagefleet_engine.engine_args import EngineArgs
from pagefleet_engine.engine_core.admission import check_message
from pagefleet_engine.engine_core.messages import AddRequest
from pagefleet_engine.engine_core.model_folder import resolve_model_folder
from pagefleet_engine.errors import EngineDead, InvalidRequest
from pagefleet_engine.llm_engine import UNBOUNDED, Prompt, auto_tokenizer, own_sampling, read_prompt
from pagefleet_engine.llm_keywords import known_settings
from pagefleet_engine.local_model import with_local_model
from pagefleet_engine.results import GrowingRequest, RequestOutput
from pagefleet_engine.settings import engine_config
from pagefleet_engine.text.model_files import load_text_model


class AsyncLLM:
    """A model whose core runs in a process of its own. It is loaded for the first request, in that event loop.

    Args:
        model: as `LLM` takes it; it needs a tokenizer.
        settings: as `LLM` takes them.

    Raises:
        TypeError, ConfigError, ModelLoadError: as `LLM` does; what only loading shows is raised by `start`.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        given = engine_config({**UNBOUNDED, **known_settings(settings), "model": str(model)})
        self._config = with_local_model(given, os.environ)
        folder = resolve_model_folder(self._config.model.model)
        self._tokenizer_folder = Path(self._config.model.tokenizer) if self._config.model.tokenizer else folder
        text = load_text_model(self._tokenizer_folder, folder, self._config.model.hf_overrides)
        self._tokenizer: Tokenizer = text.tokenizer
        self._starting: asyncio.Task[AsyncEngineClient] | None = None
        self._serial = itertools.count()
        self._open: dict[str, str] = {}
        """Names that the script gives its requests -> those that the core has."""
        self._is_shut = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an engine of what a script's flags or keywords say."""
        return cls(**engine_args.keywords)

    async def start(self) -> AsyncEngineClient:
        """Load the model, unless that is done; returns what talks to it.

        Raises:
            ConfigError, ModelLoadError: a setting cannot work, or the model cannot be loaded.
            EngineDead: the engine was shut down.
        """
        if self._is_shut:
            raise EngineDead("The engine was shut down.")
        if self._starting is None:
            self._starting = asyncio.create_task(AsyncEngineClient.start(self._config, self._tokenizer))
        return await asyncio.shield(self._starting)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what a prompt gives as its `output_kind` says; closing the generator early ends the request.

        Args:
            prompt: a text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
            sampling_params: of which a copy is taken.
            request_id: what its outputs are called, unique among the open ones; `abort` takes it.
            lora_request: adapters are not served; None.
            priority: smaller runs earlier under `policy="priority"`.

        Raises:
            InvalidRequest: the prompt or a parameter is wrong.
            ConfigError, ModelLoadError: as `start` does.
            RequestFailed, EngineDead: the model could not compute the request, or is gone.
        """
        arrived = time.time()
        if lora_request is not None:
            raise InvalidRequest("Adapters are not served by this engine.", "lora_request", "invalid_value")
        if request_id in self._open:
            raise InvalidRequest(f"There is an open request {request_id!r}.", "request_id", "invalid_value")
        name = self._open[request_id] = str(next(self._serial))
        try:
            client = await self.start()
            text, token_ids = read_prompt(prompt, self._tokenizer)
            sampling = own_sampling(sampling_params, len(token_ids), client.limits.max_model_len, self._tokenizer)
            check_message(AddRequest(name, token_ids, sampling, ()), client.limits)
            request = GrowingRequest(request_id, text, token_ids, sampling, arrived)
            async with aclosing(client.generate(Generation(name, [token_ids], sampling, priority))) as chunks:
                async for index, chunk in chunks:
                    request.take(index, chunk)
                    shown = request.show(self._tokenizer)
                    if shown is not None:
                        yield shown
        finally:
            del self._open[request_id]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; the last output of each has the finish reason `abort`. Ids of others are ignored."""
        client = await self.start()
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if one in self._open:
                client.abort(self._open[one])

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes but those of open requests; True, as in vLLM."""
        (await self.start()).reset_prefix_cache()
        return True

    async def check_health(self) -> None:
        """Return while the engine lives.

        Raises:
            EngineDead: it does not any more.
        """
        if not (await self.start()).health().alive:
            raise EngineDead("The engine stopped unexpectedly.")

    def get_tokenizer(self) -> Any:
        """Return the model's Hugging Face tokenizer, as scripts expect it. Imports transformers."""
        return auto_tokenizer(self._tokenizer_folder)

    def shutdown(self) -> None:
        """End the engine and every open request. The object is of no use then."""
        self._is_shut = True
        starting = self._starting
        if starting is None or starting.cancelled():
            return
        if not starting.done():
            starting.cancel()
        elif starting.exception() is None:
            starting.result().end()


AsyncLLMEngine = AsyncLLM

"""Offline use, one step at a time: `add_request`, then `step` while there are unfinished ones.

The engine core runs in the caller's process, without sockets: it starts fast and steps without a copy in between. Only
data ranks have processes of their own.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypedDict

import msgspec
from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_text.text_model import TextModel
from pagefleet_text.tokenizer import Tokenizer

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.cuda_context import open_ahead
from pagefleet_engine.engine_args import EngineArgs
from pagefleet_engine.engine_core.admission import check_message
from pagefleet_engine.engine_core.messages import AddRequest, CoreStats, Ready
from pagefleet_engine.engine_core.messages import RequestOutput as WireOutput
from pagefleet_engine.engine_core.model_folder import resolve_model_folder
from pagefleet_engine.engine_core.output_text import OutputText, spell_bad_words
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.llm_keywords import known_settings
from pagefleet_engine.local_model import with_local_model
from pagefleet_engine.results import GrowingRequest, RequestOutput
from pagefleet_engine.settings import engine_config
from pagefleet_engine.startup import StartupTimes
from pagefleet_engine.text.generation import recommended_sampling
from pagefleet_engine.text.model_files import has_tokenizer, load_text_model, read_eos_token_ids


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | Mapping[str, Any] | TextPrompt | TokensPrompt

logger = logging.getLogger(__name__)

TRANSFERS_S = 30.0
"""That an engine which ends waits for its connector; as long as a server does by default."""
UNBOUNDED = {"max_num_queued_reqs": 2**31 - 1, "max_num_queued_tokens": None}
"""Whoever asks is in this process: nobody has to be turned away."""


@dataclass(slots=True)
class OpenRequest(GrowingRequest):
    """A request that the core has, and what it has given."""

    message: AddRequest = field(kw_only=True)
    texts: list[OutputText] = field(kw_only=True)


class LLMEngine:
    """A model, driven by its caller. Not thread-safe. With `data_parallel_size` its copies run in their own processes.

    Args:
        model: as `LLM` takes it.
        skip_tokenizer_init: as `LLM` takes it.
        settings: as `LLM` takes them.

    Raises:
        TypeError, ConfigError, ModelLoadError: as `LLM` does.

    Attributes:
        tokenizer: the model's; None without one.
        text: what renders conversations; None without a tokenizer.
        recommended: sampling that the model's makers recommend.
    """

    def __init__(self, model: str, *, skip_tokenizer_init: bool = False, **settings: Any) -> None:
        given = engine_config({**UNBOUNDED, **known_settings(settings), "model": str(model)})
        self._config = config = with_local_model(given, os.environ)
        folder = resolve_model_folder(config.model.model)
        self._tokenizer_folder = Path(config.model.tokenizer) if config.model.tokenizer else folder
        self.tokenizer: Tokenizer | None = None
        self.text: TextModel | None = None
        self.recommended = recommended_sampling(config.model.generation_config, folder)
        if not skip_tokenizer_init and not has_tokenizer(self._tokenizer_folder):
            logger.warning(
                "%s holds no tokenizer: prompts must be token ids, outputs have no text", self._tokenizer_folder
            )
        elif not skip_tokenizer_init:
            self.text = load_text_model(self._tokenizer_folder, folder, config.model.hf_overrides)
            self.tokenizer = self.text.tokenizer
        overrides = config.model.hf_overrides
        self.eos_token_ids = self.tokenizer.eos_token_ids if self.tokenizer else read_eos_token_ids(folder, overrides)
        self._core, self._ready = _started(config)
        self._unless_shut = weakref.finalize(self, self._core.shutdown)
        self._open: dict[str, tuple[OpenRequest, int]] = {}
        """By the core's id of an output: its request, and which of its outputs it is."""
        self._by_id: dict[str, OpenRequest] = {}
        self._news: dict[str, OpenRequest] = {}
        """By the core's id: requests that got something of which `advance` has not told yet."""
        self._errors: dict[str, Exception] = {}
        """By the core's id: what ended a request, until `advance` raises it."""
        self._serial = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an engine of what a script's flags or keywords say."""
        return cls(**engine_args.keywords)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output."""
        return self._core.limits.max_model_len

    @property
    def startup_seconds(self) -> Mapping[str, float]:
        """Phase of the start -> seconds it took."""
        return self._ready.startup_seconds

    def save_sharded_state(self, path: str | Path) -> None:
        """Write the model into a new folder for `load_format="sharded_state"`, for ranks as this engine has them.

        Raises:
            ConfigError: the folder is not empty or cannot be written, or such weights cannot be saved so.
            ModelLoadError: the checkpoint cannot be read.
        """
        from pagefleet_engine.loader.save_shards import save_shards  # noqa: PLC0415 few need it, and it imports torch
        from pagefleet_engine.models.config_file import read_arch  # noqa: PLC0415

        folder = resolve_model_folder(self._config.model.model)
        save_shards(self._config, read_arch(folder, self._config.model.hf_overrides), folder, Path(path))

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, lora_request: None = None, priority: int = 0
    ) -> str:
        """Queue a prompt; returns its id.

        Args:
            request_id: what its outputs are called; unique among the open ones.
            prompt: a text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
            params: of which a copy is taken: they may be set anew afterwards.
            lora_request: adapters are not served; None.
            priority: smaller runs earlier under `policy="priority"`.

        Raises:
            InvalidRequest: the prompt or a parameter is wrong; nothing was queued.
        """
        if lora_request is not None:
            raise InvalidRequest("Adapters are not served by this engine.", "lora_request", "invalid_value")
        if request_id in self._by_id:
            raise InvalidRequest(f"There is an open request {request_id!r}.", "request_id", "invalid_value")
        self.submit(self.prepare(request_id, self.read_prompt(prompt), params, priority))
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns what it gave, of each request as its `output_kind` says.

        Raises:
            RequestFailed: the model could not compute a request, which is over then. Nothing of the others is lost:
                the next calls raise what else failed in this step, then return what it gave, before they compute.
            InvalidRequest: likewise; the engine saw only now that it cannot serve the request, for its form.
            EngineDead: the worker is broken.
        """
        outputs = []
        for request in self.advance():
            shown = request.show(self.tokenizer)
            if shown is not None:
                outputs.append(shown)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to compute, or to tell of what is over."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests are open, or over while `step` has yet to tell so."""
        return len(self._by_id) + len(self._errors) + sum(request.is_finished for request in self._news.values())

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests without another output; ids of others are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if one in self._by_id:
                self.drop(self._by_id[one])

    def get_tokenizer(self) -> Any:
        """Return the model's Hugging Face tokenizer, as scripts expect it. Imports transformers."""
        return auto_tokenizer(self._tokenizer_folder)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes but those of open requests; True, as in vLLM."""
        self._core.reset_prefix_cache()
        return True

    def stats(self) -> CoreStats:
        """Return the engine's gauges and running totals."""
        return self._core.stats()

    def shutdown(self) -> None:
        """Free the model's memory, once what `kv_connector` stores on disk is there. The object is of no use then.

        An engine that nobody holds any more frees it too, and waits for nothing.
        """
        self._unless_shut.detach()
        self._core.shutdown(TRANSFERS_S)

    @property
    def num_open_outputs(self) -> int:
        """Outputs that have not ended."""
        return len(self._open)

    # --- for `LLM`, which runs many requests to their ends

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return a prompt's text, if it has one, and its token ids; raises InvalidRequest for what is none."""
        return read_prompt(prompt, self.tokenizer)

    def prepare(
        self, request_id: str, prompt: tuple[str | None, list[int]], params: SamplingParams, priority: int
    ) -> OpenRequest:
        """Check a request; returns it as it can be submitted.

        Raises:
            InvalidRequest: a parameter is wrong.
        """
        text, token_ids = prompt
        sampling = own_sampling(params, len(token_ids), self.max_model_len, self.tokenizer)
        message = AddRequest(f"{next(self._serial)}", token_ids, sampling, self.eos_token_ids, priority)
        check_message(message, self._core.limits)
        texts = [OutputText(self.tokenizer, sampling) for _ in range(sampling.n)]
        return OpenRequest(request_id, text, token_ids, sampling, time.time(), message=message, texts=texts)

    def submit(self, request: OpenRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: the core refuses it.
        """
        refused = self._core.add(request.message)
        self._by_id[request.request_id] = request
        self._open.update({output_id: (request, index) for index, output_id in enumerate(request.message.output_ids)})
        for output in refused:
            self._take(output)
        error = self._errors.pop(request.message.request_id, None)
        if error is not None:
            raise error

    def advance(self) -> list[OpenRequest]:
        """Compute one step, unless the last has left something to tell; returns the requests that got anything.

        Raises:
            RequestFailed, InvalidRequest, EngineDead: as `step` does.
        """
        if not self._errors and not self._news:
            for output in self._core.step():
                self._take(output)
        if self._errors:
            raise self._errors.pop(next(iter(self._errors)))
        news, self._news = self._news, {}
        return list(news.values())

    def drop(self, request: OpenRequest) -> None:
        """End a request, whatever it lacks; nothing more is told of it."""
        self._news.pop(request.message.request_id, None)
        self._errors.pop(request.message.request_id, None)
        if self._by_id.pop(request.request_id, None) is not None:
            still_open = [one for one in request.message.output_ids if self._open.pop(one, None) is not None]
            self._core.abort(still_open)

    def _take(self, output: WireOutput) -> None:
        """Hand an output of the core to its request; notes what there is to tell of that."""
        request, index = self._open.get(output.request_id, (None, 0))
        if request is None:
            return
        try:
            chunk = request.texts[index].push(output)
        except Exception as error:
            self.drop(request)
            self._errors[request.message.request_id] = error
            return
        if chunk is None:
            return
        request.take(index, chunk)
        self._news[request.message.request_id] = request
        if chunk.finish_reason is not None:
            del self._open[output.request_id]
            if output.finish_reason is None:  # by a stop string, of which the core knows nothing
                self._core.abort([output.request_id])
            if request.is_finished:
                del self._by_id[request.request_id]


class _Core(Protocol):
    """What computes: the core in this process, or several in their own."""

    @property
    def limits(self) -> ModelLimits: ...

    def add(self, message: AddRequest) -> list[WireOutput]: ...

    def step(self) -> list[WireOutput]: ...

    def abort(self, request_ids: Sequence[str]) -> object: ...

    def stats(self) -> CoreStats: ...

    def reset_prefix_cache(self) -> None: ...

    def shutdown(self, within_s: float = 0.0) -> None: ...


def _started(config: EngineConfig) -> tuple[_Core, Ready]:
    """Load the model. What takes time to import comes after the cheap mistakes."""
    if config.parallel.data_ranks > 1:
        from pagefleet_engine.client.offline_cores import OfflineCores  # noqa: PLC0415

        cores = OfflineCores(config)
        return cores, cores.ready
    times = StartupTimes()
    if not config.has_processes:
        open_ahead(config.model.device)
    with times.importing():
        from pagefleet_engine.engine_core.build import build_core  # noqa: PLC0415 torch

    return build_core(config, times)


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """Return a prompt's text, if it has one, and its token ids.

    Raises:
        InvalidRequest: it is none, or a text for a model without a tokenizer.
    """
    content: Any = prompt
    text: str | None = None
    if isinstance(content, Mapping):
        for name in content.keys() - {"prompt", "prompt_token_ids"}:
            if content[name] is not None:
                raise InvalidRequest(f"A prompt takes no {name!r}: this engine reads text and token ids.", "prompt")
        text, token_ids = content.get("prompt"), content.get("prompt_token_ids")
        content = text if token_ids is None else token_ids
    if isinstance(content, Sequence) and not isinstance(content, str):
        return text, [int(token_id) for token_id in content]
    if not isinstance(content, str):
        raise InvalidRequest("A prompt is a text, token ids, {'prompt': ...} or {'prompt_token_ids': ...}.", "prompt")
    if tokenizer is None:
        raise InvalidRequest("Without a tokenizer prompts are token ids: {'prompt_token_ids': [...]}.", "prompt")
    return content, tokenizer.encode(content)


def own_sampling(
    params: SamplingParams, num_prompt_tokens: int, max_model_len: int, tokenizer: Tokenizer | None
) -> SamplingParams:
    """Return a copy of a script's parameters as they are submitted.

    `max_tokens` comes down to what the context leaves: offline, an output that fills it ends with `length`.

    Raises:
        InvalidRequest: they do not go together, or ban words without a tokenizer.
    """
    sampling, room = params.clone(), max_model_len - num_prompt_tokens
    if sampling.max_tokens is not None and 1 <= room < sampling.max_tokens:
        fewer = min(sampling.min_tokens, room)
        sampling = msgspec.structs.replace(sampling, max_tokens=room, min_tokens=fewer)
    return spell_bad_words(sampling, tokenizer)


def auto_tokenizer(folder: Path) -> Any:
    """Return the Hugging Face tokenizer in a folder. Imports transformers."""
    from transformers import AutoTokenizer  # noqa: PLC0415 slow to import, and the engine itself does not need it

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)

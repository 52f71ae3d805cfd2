"""Offline use: `LLM(model=...).generate(prompts)`, call-compatible with vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from pagefleet_protocol.beam_search import BeamSearchParams
from pagefleet_protocol.conversation import Conversation, read_conversation
from pagefleet_protocol.openai_chat import ChatRequest
from pagefleet_protocol.openai_json import Fields
from pagefleet_protocol.openai_tools import read_tools
from pagefleet_protocol.sampling_params import SamplingParams

from pagefleet_engine.answer_parts import TAIL_TOKENS, plan_answer
from pagefleet_engine.beam_search import BeamSearch
from pagefleet_engine.engine_core.garbage import GarbageSchedule
from pagefleet_engine.engine_core.messages import CoreStats
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.llm_engine import LLMEngine, OpenRequest, Prompt
from pagefleet_engine.parsers.families import answer_family
from pagefleet_engine.results import BeamSearchOutput, BeamSearchSequence, RequestOutput
from pagefleet_engine.text.model_files import own_errors

Message = Mapping[str, Any]


class LLM:
    """A model for offline inference. Not thread-safe.

    Args:
        model: organization/name of the Hugging Face Hub (with `revision=`), a folder in its layout, or builtin://tiny.
        skip_tokenizer_init: load no tokenizer; prompts are token ids then, and outputs have no text. So it is also,
            with a warning, where the folder holds none.
        settings: any field of `ModelConfig`, `CacheConfig`, `SchedulerConfig`, `ExecutionConfig`,
            `StructuredOutputsConfig` and `KVTransferConfig` by its name.

    Raises:
        TypeError: a keyword is unknown.
        ConfigError: a setting cannot work.
        ModelLoadError: the model cannot be loaded.

    Attributes:
        llm_engine: what runs the model, a step at a time.
    """

    def __init__(self, model: str, *, skip_tokenizer_init: bool = False, **settings: Any) -> None:
        self.llm_engine = LLMEngine(model, skip_tokenizer_init=skip_tokenizer_init, **settings)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the results are in their order.

        Args:
            prompts: one or several, each a text, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
            sampling_params: for all, or one each; default: `get_default_sampling_params()`.
            use_tqdm: show progress on a terminal.
            lora_request: adapters are not served; None.
            priority: one each, smaller runs earlier under `policy="priority"`.

        Raises:
            InvalidRequest: a prompt or a parameter is wrong; nothing was run.
            RequestFailed: the model could not compute a request.
        """
        if lora_request is not None:
            raise InvalidRequest("Adapters are not served by this engine.", "lora_request", "invalid_value")
        engine = self.llm_engine
        texts = [engine.read_prompt(prompt) for prompt in _as_list(prompts)]
        params = _one_each("sampling_params", sampling_params or self.get_default_sampling_params(), len(texts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(texts))
        requests = [
            engine.prepare(str(self._num_requests + index), text, sampling, urgency)
            for index, (text, sampling, urgency) in enumerate(zip(texts, params, priorities, strict=True))
        ]
        self._num_requests += len(requests)
        self._run(requests, use_tqdm)
        return [request.whole(engine.tokenizer) for request in requests]

    def chat(  # noqa: PLR0913 the signature is vLLM's
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": ..., "content": ...}`.

        Args:
            messages: one conversation, or a list of them.
            sampling_params: for all, or one each; default: `get_default_sampling_params()`.
            use_tqdm: show progress on a terminal.
            chat_template: jinja text in place of the model's own.
            add_generation_prompt: end with the opening of the assistant's answer.
            continue_final_message: go on with the last message's text; `add_generation_prompt` is False then.
            tools: that the prompt shows, as in a body of /v1/chat/completions; calls come as the model's own text.
            chat_template_kwargs: more names for the template, e.g. `enable_thinking`.

        A form (`SamplingParams.structured_outputs`) is that of the answer: a model that thinks may think before it.

        Raises:
            InvalidRequest: the model has no chat template or the template refuses the messages; they are read as those
                of a body are. Or `chat_template` is no template.
        """
        engine = self.llm_engine
        if engine.text is None:
            raise InvalidRequest("Without a tokenizer there is no chat: leave skip_tokenizer_init out.", "messages")
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        beside = {
            "tools": list(tools) if tools else None,
            "chat_template": chat_template,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        given = _one_each("sampling_params", sampling_params or self.get_default_sampling_params(), len(conversations))
        prompts: list[Prompt] = []
        planned = []
        for one, sampling in zip(conversations, given, strict=True):
            fields = Fields({"messages": [dict(message) for message in one], **beside})
            conversation = read_conversation(fields, read_tools(fields), trust_template=True)
            with own_errors():
                token_ids = engine.text.chat_tokens(conversation)
            text = engine.text.tokenizer.decode(token_ids, skip_special_tokens=False)
            prompts.append({"prompt_token_ids": token_ids, "prompt": text})
            planned.append(self._after_thoughts(sampling, conversation, token_ids))
        return self.generate(prompts, planned, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Search the likeliest answers; the results are in the prompts' order, and of each the best answer is first.

        Args:
            prompts: as `generate` takes them.
            params: how wide and how far to search; `params.max_tokens` ends with the context at the latest.
            use_tqdm: show the progress of each step on a terminal.

        Raises:
            InvalidRequest: a prompt or a parameter is wrong.
            RequestFailed: the model could not compute a beam.
        """
        engine = self.llm_engine
        token_ids = [engine.read_prompt(prompt)[1] for prompt in _as_list(prompts)]
        searches = []
        for prompt in token_ids:
            room = max(1, engine.max_model_len - len(prompt))
            bounded = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
            searches.append(BeamSearch(bounded, engine.eos_token_ids))
        while any(search.open for search in searches):
            beams = [
                [*prompt, *beam.token_ids]
                for prompt, search in zip(token_ids, searches, strict=True)
                for beam in search.open
            ]
            one_token = searches[0].one_token
            requests = [engine.prepare(str(index), (None, beam), one_token, 0) for index, beam in enumerate(beams)]
            self._run(requests, use_tqdm)
            entries = iter([request.chunks[0][0].logprobs or () for request in requests])
            for search in searches:
                if search.open:
                    search.advance([next(entries)[0] for _ in search.open])
        return [self._beams(prompt, search) for prompt, search in zip(token_ids, searches, strict=True)]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what requests get that do not say how to sample: as the model's makers recommend."""
        given, most = self.llm_engine.recommended
        return SamplingParams(**given) if most is None else SamplingParams(**given, max_tokens=most)

    def get_tokenizer(self) -> Any:
        """Return the model's Hugging Face tokenizer, as scripts expect it. Imports transformers."""
        return self.llm_engine.get_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; True, as in vLLM."""
        return self.llm_engine.reset_prefix_cache()

    @property
    def startup_seconds(self) -> Mapping[str, float]:
        """Phase of the start -> seconds it took."""
        return self.llm_engine.startup_seconds

    def stats(self) -> CoreStats:
        """Return the engine's gauges and running totals."""
        return self.llm_engine.stats()

    def save_sharded_state(self, path: str | Path) -> None:
        """Write the model into a new folder for `load_format="sharded_state"`, for ranks as this engine has them.

        Raises:
            ConfigError: the folder is not empty or cannot be written, or such weights cannot be saved so.
            ModelLoadError: the checkpoint cannot be read.
        """
        self.llm_engine.save_sharded_state(path)

    def shutdown(self) -> None:
        """Free the model's memory, once what `kv_connector` stores on disk is there. The object is of no use then."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _after_thoughts(
        self, sampling: SamplingParams, conversation: Conversation, token_ids: Sequence[int]
    ) -> SamplingParams:
        """Return parameters whose form begins where the model has thought, if it does."""
        text = self.llm_engine.text
        if sampling.structured_outputs is None or sampling.thinking is not None or text is None:
            return sampling
        tail = text.tokenizer.decode(token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
        asked = ChatRequest(model="", conversation=conversation, sampling=sampling)
        plan = plan_answer(asked, answer_family(text.chat_template or ""), tail, text.template_names)
        form, thinking = plan.sampling.structured_outputs, plan.sampling.thinking
        return msgspec.structs.replace(sampling, structured_outputs=form, thinking=thinking)

    def _beams(self, prompt: Sequence[int], search: BeamSearch) -> BeamSearchOutput:
        sequences = []
        tokenizer = self.llm_engine.tokenizer
        for beam in search.answers():
            shown = search.shown(beam)
            text = None if tokenizer is None else tokenizer.decode(shown)
            reason = "stop" if beam.has_ended else "length"
            sequences.append(BeamSearchSequence([*prompt, *shown], beam.logprob, text, reason))
        return BeamSearchOutput(sequences)

    def _run(self, requests: Sequence[OpenRequest], use_tqdm: bool) -> None:
        """Run requests to their ends; none is left open by an error or an interruption."""
        engine = self.llm_engine
        tell, finish = _progress_bar(sum(request.num_open for request in requests), use_tqdm)
        own, garbage = {id(request) for request in requests}, GarbageSchedule()
        try:
            for request in requests:
                engine.submit(request)
            with garbage.paused():
                while own:
                    num_open = engine.num_open_outputs
                    own -= {id(request) for request in engine.advance() if request.is_finished}
                    tell(num_open - engine.num_open_outputs)
                    garbage.between_steps()
        finally:
            finish()
            for request in requests:
                engine.drop(request)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """Return one value per prompt."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"'{name}' has {len(value)} entries for {count} prompts: give one each.", name)
    return list(value)


def _progress_bar(total: int, wanted: bool) -> tuple[Callable[[int], object], Callable[[], object]]:
    """Return what to call with outputs that have ended, and at the end; a bar only where somebody can see it."""
    if not wanted or not sys.stderr.isatty():
        return (lambda _: None), (lambda: None)
    from tqdm import tqdm  # noqa: PLC0415 only for a terminal

    bar = tqdm(total=total, unit="output", desc="pagefleet")
    return bar.update, bar.close

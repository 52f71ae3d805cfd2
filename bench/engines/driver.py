"""Runs one engine for the benchmarks: reads commands as JSON lines on stdin, answers each with a line of figures.

Every engine runs in a process, and if need be an environment, of its own; the caller interleaves them. Imports of the
engine happen inside its adapter, and count as its start-up time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Tokens = list[int]
Schema = dict[str, Any] | None


class Engine(Protocol):
    """What a benchmark asks of an engine: greedy, exactly as many tokens as asked for."""

    def generate(self, prompts: Sequence[Tokens], output_lens: Sequence[int], schema: Schema = None) -> list[Tokens]:
        """Return the output tokens of each prompt; with a JSON schema all hold it."""
        ...


class Pagefleet:
    """pagefleet, offline."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from pagefleet_engine import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(model=model, **options)

    def generate(self, prompts: Sequence[Tokens], output_lens: Sequence[int], schema: Schema = None) -> list[Tokens]:
        how: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        if schema is not None:  # a checkout of before has no forms, and is a peer without one
            from pagefleet_protocol.structured_outputs import StructuredOutputsParams

            how["structured_outputs"] = StructuredOutputsParams(json=schema)
        params = [self._params(max_tokens=n, **how) for n in output_lens]
        results = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]


class Vllm:
    """vLLM, offline; its CPU backend wants both cores bound and its own allocators preloaded."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

        self._params = SamplingParams
        self._llm = LLM(model=model, **{"skip_tokenizer_init": True, "disable_log_stats": True, **options})

    def generate(self, prompts: Sequence[Tokens], output_lens: Sequence[int], schema: Schema = None) -> list[Tokens]:
        from vllm.sampling_params import StructuredOutputsParams  # type: ignore[import-not-found]

        form = None if schema is None else StructuredOutputsParams(json=schema)
        how: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "structured_outputs": form}
        params = [self._params(max_tokens=n, **how) for n in output_lens]
        results = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]


class Transformers:
    """transformers, on a GPU if there is one.

    Options: `batch_size`: of static batches with left padding, 1 is one by one; `cache`: "static" lets it compile the
    decode step on a GPU; `continuous`: its own continuous batching, all outputs of one length, over `num_blocks` pages
    if given; `dummy`: random weights.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_grad_enabled(False)
        torch.set_num_threads(int(options.get("num_threads", len(os.sched_getaffinity(0)))))
        self._options = options
        self._batch_size = int(options.get("batch_size", 1))
        with torch.device("cuda" if torch.cuda.is_available() and options.get("device") != "cpu" else "cpu"):
            if options.get("dummy"):
                self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
            else:
                self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._model.eval()

    def generate(self, prompts: Sequence[Tokens], output_lens: Sequence[int], schema: Schema = None) -> list[Tokens]:
        assert schema is None, "transformers holds no forms"
        if self._options.get("continuous"):
            return self._continuous(prompts, output_lens)
        outputs: list[Tokens] = []
        for start in range(0, len(prompts), self._batch_size):
            stop = start + self._batch_size
            outputs += self._static_batch(prompts[start:stop], output_lens[start:stop])
        return outputs

    def _static_batch(self, prompts: Sequence[Tokens], output_lens: Sequence[int]) -> list[Tokens]:
        import torch

        width, longest, device = max(map(len, prompts)), max(output_lens), self._model.device
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=self._options.get("cache"),
        )
        return [row[width : width + n].tolist() for row, n in zip(out, output_lens, strict=True)]

    def _continuous(self, prompts: Sequence[Tokens], output_lens: Sequence[int]) -> list[Tokens]:
        from transformers import GenerationConfig

        (length,) = set(output_lens)
        config = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
        more: dict[str, Any] = {"persistent_manager": True}  # the cache is made and graphs are captured once
        if "num_blocks" in self._options:
            from transformers.generation.configuration_utils import ContinuousBatchingConfig

            more["continuous_batching_config"] = ContinuousBatchingConfig(
                num_blocks=self._options["num_blocks"], page_size=16, max_batch_tokens=64
            )
        answers = self._model.generate_batch(inputs=[list(p) for p in prompts], generation_config=config, **more)
        return [list(answer.generated_tokens) for answer in answers.values()]


class LlamaCpp:
    """llama.cpp, of a GGUF file, all prompts at once.

    Options: `streams` at most, `context` of all of them together, `threads`.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import llama_cpp  # type: ignore[import-not-found]

        self._lib, self._streams = llama_cpp, int(options["streams"])
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        given = llama_cpp.llama_context_default_params()
        given.n_ctx, given.n_seq_max, given.kv_unified = int(options["context"]), self._streams, True
        given.n_batch = given.n_ctx
        given.n_threads = given.n_threads_batch = int(options["threads"])
        self._context = llama_cpp.llama_init_from_model(self._model, given)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(given.n_batch, 0, self._streams)

    def generate(self, prompts: Sequence[Tokens], output_lens: Sequence[int], schema: Schema = None) -> list[Tokens]:
        assert schema is None, "measured without forms"
        assert len(prompts) <= self._streams, "one sequence for each"
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        outputs: list[Tokens] = [[] for _ in prompts]
        given = [(stream, list(prompt), 0) for stream, prompt in enumerate(prompts)]
        while given:
            for stream, token in self._step(given):
                outputs[stream].append(token)
            given = [
                (stream, outputs[stream][-1:], len(prompts[stream]) + len(outputs[stream]) - 1)
                for stream, wanted in enumerate(output_lens)
                if len(outputs[stream]) < wanted
            ]
        return outputs

    def _step(self, given: Sequence[tuple[int, Tokens, int]]) -> list[tuple[int, int]]:
        """The next token of each stream that is given tokens from a position on."""
        import numpy as np

        batch, ends = self._batch, []
        batch.n_tokens = 0
        for stream, tokens, start in given:
            for place, token in enumerate(tokens):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, start + place
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, stream
                batch.logits[at] = place == len(tokens) - 1
                batch.n_tokens += 1
            ends.append((stream, batch.n_tokens - 1))
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed: give a longer context")
        return [
            (
                stream,
                int(np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, at), (self._vocab,)).argmax()),
            )
            for stream, at in ends
        ]


ADAPTERS: dict[str, Callable[[str, dict[str, Any]], Engine]] = {
    "pagefleet": Pagefleet,
    "vllm": Vllm,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}


def timed(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    """Run one command `{"prompts", "output_lens", "schema"}`; report seconds and the tokens."""
    started = time.perf_counter()
    outputs = engine.generate(command["prompts"], command["output_lens"], command.get("schema"))
    seconds = time.perf_counter() - started
    lens = [len(tokens) for tokens in outputs]
    if lens != list(command["output_lens"]):
        raise RuntimeError(f"asked for {command['output_lens']} tokens, got {lens}")
    return {"seconds": seconds, "outputs": outputs}


def main() -> None:
    """Serve commands until stdin closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=sorted(ADAPTERS))
    parser.add_argument("model")
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()
    # The engine's own prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started = time.perf_counter()
    engine = ADAPTERS[arguments.engine](arguments.model, arguments.options)
    answers.write(json.dumps({"load_seconds": time.perf_counter() - started}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(timed(engine, json.loads(line))) + "\n")


if __name__ == "__main__":
    main()

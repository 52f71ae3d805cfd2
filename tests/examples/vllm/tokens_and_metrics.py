"""Prompts as token ids, seeds that repeat, priorities, and when each request was where."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams, TokensPrompt

llm = LLM(model="facebook/opt-125m", seed=42, scheduling_policy="priority", trust_remote_code=True, swap_space=4)
prompt = TokensPrompt(prompt_token_ids=[5, 6, 7, 8])
params = SamplingParams(temperature=1.0, seed=7, max_tokens=6, ignore_eos=True, logprobs=2)
first, second = llm.generate([prompt, prompt], params, priority=[1, 0], use_tqdm=False)
assert first.outputs[0].token_ids == second.outputs[0].token_ids
assert len(first.outputs[0].logprobs) == 6
metrics = first.metrics
assert metrics.arrival_time > 1e9
assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
assert metrics.first_token_latency > 0
print(metrics.num_generation_tokens, len(llm.get_tokenizer().encode("What is")) > 0)

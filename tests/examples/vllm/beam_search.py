"""The likeliest answers."""

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="facebook/opt-125m", max_logprobs=10)
for output in llm.beam_search([{"prompt": "What is"}], BeamSearchParams(beam_width=3, max_tokens=6)):
    for sequence in output.sequences:
        print(round(sequence.cum_logprob, 3), sequence.text)

"""The same answers with and without the cache of prefixes, and how much came from it."""

from vllm import LLM, SamplingParams

PREFIX = "You are an expert school principal, skilled in managing the staff of a large school. " * 2
PROMPTS = [PREFIX + prompt for prompt in ("Hello, my name is", "The president of", "The capital of", "The future")]


def main() -> None:
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8)
    regular = LLM(model="facebook/opt-125m", gpu_memory_utilization=0.4, enable_prefix_caching=False)
    texts = [output.outputs[0].text for output in regular.generate(PROMPTS, sampling_params)]
    del regular
    cached = LLM(model="facebook/opt-125m", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    cached.generate(PROMPTS[0], sampling_params)
    outputs = cached.generate(PROMPTS, sampling_params)
    print("same:", texts == [output.outputs[0].text for output in outputs])
    print("cached:", all(output.num_cached_tokens > 0 for output in outputs))
    assert cached.reset_prefix_cache()
    (fresh,) = cached.generate(PROMPTS[0], sampling_params)
    print("after a reset:", fresh.num_cached_tokens)


if __name__ == "__main__":
    main()

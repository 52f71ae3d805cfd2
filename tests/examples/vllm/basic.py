"""Complete a batch of prompts."""

from vllm import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "The president of", "What is", "The future of AI is"]


def main() -> None:
    llm = LLM(model="facebook/opt-125m")
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()

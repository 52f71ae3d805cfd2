"""Tools that the prompt shows, and a conversation that goes on with their results."""

from vllm import LLM
from vllm.sampling_params import SamplingParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius"]}},
                "required": ["city"],
            },
        },
    }
]

llm = LLM(model="facebook/opt-125m")
sampling_params = SamplingParams(max_tokens=24, temperature=0.0)
messages = [{"role": "user", "content": "What is the weather in Dallas?"}]
outputs = llm.chat(messages, sampling_params=sampling_params, tools=TOOLS)
assert "get_current_weather" in outputs[0].prompt
messages.append({"role": "assistant", "content": outputs[0].outputs[0].text})
messages.append({"role": "user", "content": "It is 35 degrees. Thank you!"})
print(llm.chat(messages, sampling_params, tools=TOOLS)[0].outputs[0].finish_reason)

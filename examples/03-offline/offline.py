"""Text completion and chat in this process: no server, no sockets."""

from pagefleet import LLM, SamplingParams

llm = LLM(model="builtin://tiny", max_model_len=512)
greedy = SamplingParams(temperature=0, max_tokens=64)

# All prompts at once: the engine batches them, and the results come in their order.
for result in llm.generate(["What is", "How", "To serve a model"], greedy):
    completion = result.outputs[0]
    print(f"{result.prompt}{completion.text}  [{len(completion.token_ids)} tokens, {completion.finish_reason}]")

conversation = [
    {"role": "user", "content": "Is decode bound by compute?"},
    {"role": "assistant", "content": "No, by memory bandwidth."},
    {"role": "user", "content": "Why?"},
]
(reply,) = llm.chat(conversation, greedy)
print(f"Why? {reply.outputs[0].text}")
